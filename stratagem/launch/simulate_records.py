"""`--wire` and `--sync` of `stratagem simulate`: records as they are written in Python.

--wire bfloat16   --wire Int8   --wire "TopK(0.01)"
--sync "LocalSteps(20)"   --sync "DiLoCo(20, fragments=4, overlap=2, wire=Int8())"
"""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING, Any

from stratagem.errors import UsageError

if TYPE_CHECKING:
    from stratagem.codecs.wire_choice import Wire
    from stratagem.rules.cadence import Sync


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what workers send that all-reduce, and when."""
    add = parser.add_argument
    add(
        "--wire",
        metavar="RECORD",
        help="--servers 0: what gradients travel as: bfloat16, Int8, 'TopK(0.01)', Sign (they are "
        "sent whole)",
    )
    add(
        "--sync",
        metavar="RECORD",
        help="--servers 0: when workers meet: 'LocalSteps(20)', 'DiLoCo(20, fragments=4)', Gossip "
        "(every step)",
    )


def read_wire(text: str | None) -> Wire:
    """The wire that `--wire` means."""
    from stratagem.codecs.wire_choice import RECORDS, check_wire

    if text is None:
        return None
    plain = text.isidentifier() and text not in RECORDS
    found: Wire = text if plain else _record(text, "--wire", "Int8, 'TopK(0.01)' or bfloat16")
    check_wire(found)
    return found


def read_sync(text: str | None) -> Sync | None:
    """The cadence that `--sync` means."""
    from stratagem.rules.cadence import Sync

    if text is None:
        return None
    known = "'LocalSteps(20)', 'DiLoCo(20)', Gossip or EveryStep"
    found = _record(text, "--sync", known)
    if not isinstance(found, Sync):
        raise UsageError(f"--sync {text!r} is none of {known}.")
    return found


def _record(text: str, option: str, known: str) -> Any:
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as problem:
        raise UsageError(f"{option} {text!r} is no record such as {known} ({problem}).") from None


def _value(written: ast.expr) -> Any:
    """A record, given what stands in its brackets; or a number, text or None."""
    from stratagem.codecs.wire_choice import RECORDS
    from stratagem.rules import cadence

    call = written if isinstance(written, ast.Call) else None
    name = written if call is None else call.func
    word = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
    kinds = (cadence.EveryStep, cadence.LocalSteps, cadence.DiLoCo, cadence.Gossip, cadence.Outer)
    made: Any = {**RECORDS, **{kind.__name__: kind for kind in kinds}}.get(word)
    if made is None:
        return ast.literal_eval(written)
    if call is None:
        return made()
    return made(*map(_value, call.args), **{str(k.arg): _value(k.value) for k in call.keywords})
