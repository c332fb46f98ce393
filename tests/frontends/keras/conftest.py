"""Teams that a file's tests share end with the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.keras_support import close_all


@pytest.fixture(scope="module", autouse=True)
def teams_end_with_the_file() -> Iterator[None]:
    yield
    close_all()
