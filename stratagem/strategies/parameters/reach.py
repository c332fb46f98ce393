"""Connect to servers that may not have started yet, and say for whom one waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.cluster.handshake import Stranger, WrongSecret
from stratagem.cluster.trouble import Member
from stratagem.cluster.waiting import FIRST, Wait, missing_error, say_missing
from stratagem.wire.tcp import Connection, connect

_RETRY = 0.1  # seconds between two tries
_TRY = 2.0  # seconds for one


def reach(
    tasks: Sequence[tuple[str, str]], secret: bytes, hello: Mapping[str, Any], limit: float,
    watch: Callable[[], None] = lambda: None,
) -> list[Connection]:  # fmt: skip
    """A connection to each (name, address), all of which have been told `hello`.

    `watch` is called between two tries, and may raise: whoever started them knows if they died.
    """
    patience = Wait(limit, first=FIRST)
    found: dict[str, Connection] = {}
    why = ""
    try:
        while True:
            for name, address in tasks:
                if name not in found:
                    try:
                        found[name] = connect(address, secret, limit=min(_TRY, limit))
                    except (Stranger, WrongSecret):
                        raise
                    except OSError as problem:
                        why = str(problem)
            missing = [Member(name, where) for name, where in tasks if name not in found]
            if not missing:
                break
            if patience.over:
                raise missing_error(missing, patience.waited, why)
            watch()
            say_missing(missing, patience)
            time.sleep(_RETRY)
        for connection in found.values():
            connection.send(hello)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return [found[name] for name, _ in tasks]
