"""`strategy.gather` in custom loops: every row once, in its order, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import data, mlp

pytestmark = pytest.mark.timeout(60)

#: gathers what it is given, or returns it as it is on one device
Gather = Callable[[Tensor], Tensor]
Way = Callable[[nn.Module, Any, Gather], Iterator[Tensor]]


def in_the_loop(model: nn.Module, loader: Any, gather: Gather) -> Iterator[Tensor]:
    for x, _ in loader:
        yield gather(model(x).argmax(1))


def of_a_list(model: nn.Module, loader: Any, gather: Gather) -> Iterator[Tensor]:
    for x, y in list(loader):
        yield gather(x[:, 0])
        yield gather((model(x).argmax(1) == y).float())


def one_ahead(model: nn.Module, loader: Any, gather: Gather) -> Iterator[Tensor]:
    batches = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        (x, y), ahead = ahead, next(batches, None)
        yield gather(y)
        yield gather(model(x))


def values_of_rows(model: nn.Module, loader: Any, gather: Gather) -> Iterator[Tensor]:
    for x, _ in loader:
        yield gather(x.flatten())
        yield gather(model(x).softmax(1).flatten())


def behind_it(model: nn.Module, loader: Any, gather: Gather) -> Iterator[Tensor]:
    yield gather(torch.cat([model(x) for x, _ in loader]))


def until_a_break(model: nn.Module, loader: Any, gather: Gather) -> Iterator[Tensor]:
    kept = []
    for x, _ in loader:
        kept.append(model(x))
        if len(kept) == len(loader):
            break
    yield gather(torch.cat(kept))


WAYS: list[Way] = [in_the_loop, of_a_list, one_ahead, values_of_rows, behind_it, until_a_break]


def gathered(
    on: sg.Strategy | None, way: Way, batch: int, *, trains: bool, grad: bool
) -> list[Tensor]:
    """What is gathered of 19 rows, from a loader with a model or by itself."""
    model = mlp()
    loader: Any = DataLoader(TensorDataset(*data(19)), batch_size=batch)
    gather: Gather = (lambda tensor: tensor) if on is None else on.gather
    if on is not None and trains:
        model, _, loader = on.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    elif on is not None:
        loader = on.prepare(loader)
    with torch.set_grad_enabled(grad):
        found = [each.detach() for each in way(model, loader, gather)]
    if way in (behind_it, until_a_break):  # the rows of each replica come together
        found = [each[each.sum(1).argsort()] for each in found]
    return found


def is_told(way: Way, trains: bool) -> bool:
    """Whether forward tells of which of several batches something is: not of a model that is not
    prepared."""
    return trains or way not in (of_a_list, one_ahead)


@pytest.mark.parametrize("batch", [6, 9, 2])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)
def test_every_row_comes_once(
    way: Way, trains: bool, batch: int, two: sg.MirroredStrategy, three: sg.MirroredStrategy
) -> None:
    """With 9, the last batch has one row; with 2, every batch is borrowed on the third replica."""
    for grad in (False, True) if is_told(way, trains) else ():
        expected = gathered(None, way, batch, trains=trains, grad=grad)
        for on in (two, three):
            run = lambda on=on, grad=grad: gathered(on, way, batch, trains=trains, grad=grad)  # noqa: E731
            for found in on.run(run):
                assert [len(each) for each in found] == [len(each) for each in expected]
                assert all(map(torch.allclose, found, expected))


@pytest.mark.parametrize("way", [of_a_list, one_ahead])
def test_which_of_several_batches_it_is_of_is_asked(way: Way, two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"cut what this replica has borrowed"):
        two.run(lambda: gathered(two, way, 6, trains=False, grad=False))


def loader_of(on: sg.Strategy, rows: int, batch: int) -> Any:
    return on.prepare(DataLoader(TensorDataset(*data(rows)), batch_size=batch))


def counted(on: sg.Strategy) -> None:
    """A number of each replica is no value of a row."""
    seen = torch.zeros(1)
    for _ in loader_of(on, 5, 4):
        seen += sg.current_replica().share.examples
        on.gather(seen)


def unlike_loaders(on: sg.Strategy) -> None:
    """As many rows come here from both, and some of the first loader's are borrowed."""
    kept = [torch.cat([x[:, 0] for x, _ in loader_of(on, *each)]) for each in ((19, 6), (20, 4))]
    on.gather(kept[0])


@pytest.mark.parametrize("case", [counted, unlike_loaders])
def test_what_may_or_may_not_be_borrowed_is_refused(
    case: Callable[[sg.Strategy], None], two: sg.MirroredStrategy
) -> None:
    with pytest.raises(sg.UsageError, match=r"cut what this replica has borrowed"):
        two.run(case, two)


def test_a_tensor_that_is_as_long_by_chance_loses_nothing(two: sg.MirroredStrategy) -> None:
    def found() -> list[float]:
        kept = [x for x, _ in loader_of(two, 5, 4)]  # 2 and 1 rows, or a borrowed one
        three_of_each = torch.arange(3.0) + 10 * sg.current_replica().index
        assert len(torch.cat(kept)) == 3
        return two.gather(three_of_each[:2]).tolist()

    assert two.run(found)[0] == [0, 1, 10, 11]
