"""Fixtures: each kind of connection, and the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stratagem.wire.tcp import Connection
from tests.wire.wire_pairs import KINDS, Lines, pair


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(kind: str) -> Iterator[tuple[Connection, Connection]]:
    with pair(kind) as both:
        yield both


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("stratagem")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
