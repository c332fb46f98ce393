"""The table of what placements refuse: its page, its cases, and the code that raises from it."""

from __future__ import annotations

import ast

import pytest

from stratagem import capabilities
from tests.conformance.placements import PLACEMENTS
from tests.sources import ROOT, nodes

PAGE = ROOT.parent / "docs" / "strategies.md"


def test_the_page_prints_the_table() -> None:
    """`python -m tests.conformance.write_page` writes it."""
    assert "\n".join(capabilities.page()) in PAGE.read_text()


def test_every_placement_of_the_net_is_in_the_table() -> None:
    known = {kind for placement in PLACEMENTS.values() for kind in placement.kinds}
    assert known | {"compressed"} == capabilities.TABLE.keys() == capabilities.PLACEMENTS.keys()


def test_a_sentence_begins_with_its_remedy() -> None:
    verbs = "add call change detach give leave load loop put read use write {instead},".split()  # noqa: SIM905
    for rows in capabilities.TABLE.values():
        for said in rows.values():
            assert said.split()[0] in verbs, said
            assert said.endswith("."), said


def raised() -> set[tuple[str, str]]:
    """The rows that the package raises; a placement that is passed on counts for all of its."""
    found: set[tuple[str, str]] = set()
    for path in ROOT.rglob("*.py"):
        for node in nodes(path):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "sentence"
            if called and len(node.args) == 2:  # type: ignore[attr-defined]
                place, option = node.args  # type: ignore[attr-defined]
                assert isinstance(option, ast.Constant), path
                fixed = isinstance(place, ast.Constant)
                places = [place.value] if fixed else capabilities.TABLE  # type: ignore[attr-defined]
                found |= {
                    (p, option.value) for p in places if option.value in capabilities.TABLE[p]
                }
    return found


def test_every_row_is_raised_somewhere() -> None:
    rows = {(p, option) for p, options in capabilities.TABLE.items() for option in options}
    assert raised() == rows


def test_a_row_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        capabilities.sentence("replicas", "nothing of the kind")
