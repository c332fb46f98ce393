"""What the three fronts' cases have in common: the table, one run of a case, the comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import stratagem as sg
from stratagem import capabilities
from tests.conformance.placements import PLACEMENTS, Placement
from tests.spread import Work, assert_work


@dataclass(frozen=True)
class Case:
    """A row of a front's table."""

    name: str
    #: a loop (own loops), or what describes a training (`sg.Model`, Keras)
    play: Callable[..., Any]
    #: options of stratagem/capabilities.py that it needs
    needs: tuple[str, ...]
    #: in float64, and in float32
    tolerance: tuple[float, float]
    #: whether a replica may be without rows of a batch, and borrow one
    borrows: bool
    #: cells that differ in silence today: placement -> reason
    differs: Mapping[str, str]
    #: placements on which it has no meaning: placement -> reason
    without: Mapping[str, str]
    #: cells that differ in silence only sometimes: placement -> reason
    races: Mapping[str, str]
    #: refusals that do not stand in stratagem/capabilities.py yet: a kind of placement -> words
    elsewhere: Mapping[str, str]


class Cases(dict[str, Case]):
    """A front's table of cases; of placements in `thinned`, `make test` runs every third."""

    def __init__(self, *thinned: str) -> None:
        super().__init__()
        self.thinned = thinned

    def __call__(
        self,
        name: str,
        *,
        needs: Sequence[str] = (),
        tolerance: tuple[float, float] = (1e-9, 1e-6),
        borrows: bool = False,
        differs: Mapping[str, str] | None = None,
        without: Mapping[str, str] | None = None,
        races: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        linear: bool = True,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """`@case("clip by norm", needs=["clip"])` adds a row.

        linear: whether the mean of the replicas' own updates is that of one device, so that
            `sync=sg.LocalSteps(1)` has its answer.
        """
        assert name not in self, f"two cases are called {name!r}"

        def add(play: Callable[..., Any]) -> Callable[..., Any]:
            options = tuple(needs)
            apart = {} if linear else {"averaged 2": "each replica's own update is not linear"}
            self[name] = Case(
                name,
                play,
                options,
                tolerance,
                borrows,
                differs or {},
                {**apart, **(without or {})},
                races or {},
                elsewhere or {},
            )
            return play

        return add

    def cells(self) -> Iterator[Any]:
        """Every pair of a placement and a case, placement by placement, with its marks."""
        for at, (name, placement) in enumerate(PLACEMENTS.items()):
            for number, case in enumerate(self.values()):
                if name in case.without:
                    continue
                quick = "some" if name in self.thinned else placement.quick
                yield pytest.param(
                    name,
                    case.name,
                    marks=_marks(quick, case, name, number + at),
                    id=f"{name}-{case.name}",
                )


def _marks(quick: str, case: Case, name: str, turn: int) -> list[Any]:
    marks: list[Any] = []
    if quick == "none" or (quick == "some" and turn % 3):
        marks.append(pytest.mark.exhaustive)
    if name in case.differs:
        marks.append(pytest.mark.xfail(reason=case.differs[name], strict=True))
    if name in case.races:
        marks.append(pytest.mark.xfail(reason=case.races[name], strict=False))
    return marks


#: optimizers whose float32 steps divide by small numbers
ADAPTIVE = (1e-9, 1e-5)

#: no synchronised statistics there: each replica's own are documented, and told of once
UNSYNCED = dict.fromkeys(("servers 2", "central 2", "averaged 2"), "normalises each replica's rows")

Result = dict[str, Any]


def assert_alike(found: Result, wanted: Result, case: Case, dtype: torch.dtype) -> None:
    """Compare named tensors and numbers; None in `found`: not known there."""
    assert found.keys() == wanted.keys()
    exact, single = case.tolerance
    for name, value in wanted.items():
        most = single if dtype is torch.float32 or _is_single(value) else exact
        apart = _apart(found[name], value)
        assert apart <= most, f"{name!r} differs by {apart:.2g}, more than {most}"


def _is_single(value: Any) -> bool:
    """Whether a result is float32, also in a case in float64: metrics are."""
    return isinstance(value, Tensor) and value.dtype is torch.float32


def _apart(found: Any, wanted: Any) -> float:
    if found is None:
        return 0.0
    a, b = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    gaps = (a - b).abs()
    gaps[(a == b) | (a.isnan() & b.isnan())] = 0
    worst = float(gaps.max()) if gaps.numel() else 0.0
    return math.inf if math.isnan(worst) else worst


def assert_spread(
    alone: Work, spread: Work, placement: Placement, case: Case, *, exact: bool
) -> None:
    """Every process computed a part of the rows, or layers, and weights moved.

    exact: a front that puts each row through the layers once; those with a check of rows before
    the first step put some through them on the first process, too.
    """
    assert_work(alone, spread, shared=not case.borrows)
    if placement.divides != "rows":
        return
    (rows,) = alone.rows
    checked = spread.rows[1:] if not exact else spread.rows
    assert all(each < rows for each in checked), (spread.rows, rows)
    if exact and not case.borrows:
        assert sum(spread.rows) == rows, (spread.rows, rows)
    else:
        assert sum(spread.rows) >= rows, (spread.rows, rows)


def assert_refused(run: Callable[[], Any], placement: Placement, case: Case, front: str) -> bool:
    """Whether the case is refused there; then that very sentence of the table must be raised."""
    sentence = capabilities.refused(placement.kinds, [front, *case.needs])
    if sentence is not None:
        pattern = re.sub(r"\\{[^{}]*\\}", ".*", re.escape(sentence))
    else:
        words = [case.elsewhere[kind] for kind in placement.kinds if kind in case.elsewhere]
        if not words:
            return False
        pattern = re.escape(words[0])
    with pytest.raises(sg.StratagemError, match=pattern):
        run()
    return True


def plain(tensors: Mapping[str, Any], prefix: str = "") -> Result:
    """Copies of named tensors."""
    return {
        f"{prefix}{name}": value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }


def closed(strategy: sg.Strategy) -> Iterator[sg.Strategy]:
    """A fixture's strategy, closed in the end."""
    try:
        yield strategy
    finally:
        strategy.close()
