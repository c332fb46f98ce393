"""The package's source, parsed once for the tests that read it."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import stratagem

ROOT = Path(stratagem.__file__).parent


@cache
def _package() -> dict[Path, list[ast.AST]]:
    gc.disable()  # it would look through half a million nodes again and again
    try:
        return {path: list(ast.walk(ast.parse(path.read_text()))) for path in ROOT.rglob("*.py")}
    finally:
        gc.enable()


def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file, of the package or not."""
    found = _package().get(path)
    return found if found is not None else list(ast.walk(ast.parse(path.read_text())))
