"""Shares of a batch: contiguous, nearly equal, nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from stratagem.data.loader import ShareLoader
from stratagem.data.shares import agreed_batches, count_rows, rows, rows_of, share
from stratagem.errors import NotDistributable, UsageError
from stratagem.wire.collective import Alone


@given(st.integers(0, 300), st.integers(1, 20))
def test_shares_partition_the_batch(total: int, parts: int) -> None:
    cuts = [share(total, parts, i) for i in range(parts)]
    assert [i for a, b in cuts for i in range(a, b)] == list(range(total))
    lengths = [b - a for a, b in cuts]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("rows_", "batch", "expected"),
    [
        (9, 5, [[[0, 1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        (7, 4, [[[0, 1], [2, 3]], [[4, 5], [6]]]),
    ],
)
def test_the_splits_of_the_textbook(
    rows_: int, batch: int, expected: list[list[list[int]]]
) -> None:
    found = []
    for start in range(0, rows_, batch):
        part = list(range(start, min(start + batch, rows_)))
        found.append([part[slice(*share(len(part), 2, i))] for i in range(2)])
    assert found == expected


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=5), max_size=2100))
def test_batches_of_any_number_arrive_as_they_were(batches: list[list[int]]) -> None:
    assert list(agreed_batches(batches, Alone())) == batches


def test_indices_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(NotDistributable, match="whole numbers"):
        list(agreed_batches([["a"]], Alone()))  # type: ignore[list-item]


def test_rows_of_a_nested_batch() -> None:
    batch = {"x": torch.arange(10), "more": (torch.arange(20).view(10, 2), "label")}
    part = rows(batch, 2, 5)
    assert part["x"].tolist() == [2, 3, 4] and part["more"][0].shape == (3, 2)
    assert count_rows(batch) == 10 and count_rows({"a": "text"}) == -1


def test_time_before_the_rows_is_told() -> None:
    batch = torch.zeros(10, 12, 3), torch.zeros(12)
    with pytest.raises(NotDistributable, match=r"of 10 and of 12 rows.*\(batch_first=True\)"):
        rows(batch, 0, 5)


X = torch.arange(3)
CUT: dict[str, tuple[Any, Any]] = {  # a batch of three rows, and its rows 1 and 2
    "texts": ((("a", "b", "c"), X), (("b", "c"), [1, 2])),
    "numbers": ({"id": [7, 8, 9], "x": X}, {"id": [8, 9], "x": [1, 2]}),
    "texts alone": (["a", "b", "c"], ["b", "c"]),
    "texts in columns": ([("a", "b", "c"), ("d", "e", "f")], [("b", "c"), ("e", "f")]),
    "as many columns as rows": (
        [[("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i")], X],
        [[("b", "c"), ("e", "f"), ("h", "i")], [1, 2]],
    ),
    "rows of any length": (([[1, 2, 3], [4], []], X), ([[4], []], [1, 2])),
    "pairs of numbers": (([(1, 2, 3), (4, 5, 6), (7, 8, 9)], X), ([(4, 5, 6), (7, 8, 9)], [1, 2])),
    "facts": (([{"a": 1}, {"a": None}, {}], X), ([{"a": None}, {}], [1, 2])),
    "another length": ((("a", "b"), [1.0] * 4, "text", X), (("a", "b"), [1.0] * 4, "text", [1, 2])),
    "three inputs": (((X, X, X), [X, "a", "b"]), (([1, 2],) * 3, [[1, 2], "a", "b"])),
    "a scalar before": ({"t": torch.tensor(5), "x": X}, {"t": 5, "x": [1, 2]}),
}


@pytest.mark.parametrize("kind", list(CUT))
def test_what_is_cut_and_what_is_kept(kind: str) -> None:
    batch, expected = CUT[kind]
    assert count_rows(batch) == 3
    assert plain(rows(batch, 1, 3)) == expected
    assert plain(rows(batch, 0, 3)) == plain(batch)


def plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return type(tree)(map(plain, tree)) if isinstance(tree, list | tuple) else tree


def test_names_are_no_column() -> None:
    found = rows(Sizes(torch.arange(2), 7), 0, 1)
    assert isinstance(found, Sizes) and found.x.tolist() == [0] and found.size == 7
    assert count_rows(Sizes("a", 3)) == -1  # type: ignore[arg-type]


class Sizes(NamedTuple):
    x: torch.Tensor
    size: int


def test_a_batch_without_rows_is_refused() -> None:
    for batch in ([["a", "b"], ["c"]], "text", {"a": 1}, []):
        with pytest.raises(NotDistributable, match="row for each example"):
            rows_of(batch)


def test_one_device_alone_takes_a_loader_without_batches() -> None:
    loader: DataLoader[Any] = DataLoader(torch.arange(3), batch_size=None)  # type: ignore[arg-type]
    sizes: list[tuple[int, int]] = []
    whole = ShareLoader(loader, Alone(), lambda n, m: sizes.append((n, m)))
    assert [int(row) for row in whole] == [0, 1, 2] and sizes == [(1, 1)] * 3
    both = Alone()
    both.size = 2
    with pytest.raises(NotDistributable, match="batch_size"):
        ShareLoader(loader, both, lambda n, m: None)


# --- samplers that take a part -------------------------------------------------------------------


class Chunks:
    """A batch sampler of somebody's own that takes every second batch."""

    num_replicas, rank = 2, 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2, 3], [6, 7]])


def partial_loader(how: str, parts: int = 2) -> Any:
    dataset: Any = torch.arange(12)
    sampler: Any = DistributedSampler(dataset, num_replicas=parts, rank=0, shuffle=False)
    if how == "sampler":
        return DataLoader(dataset, batch_size=4, sampler=sampler)
    if how == "in a batch sampler":
        return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    return DataLoader(dataset, batch_sampler=Chunks())  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["sampler", "in a batch sampler", "of one's own"])
def test_a_sampler_that_takes_a_part_is_refused(how: str) -> None:
    with pytest.raises(UsageError, match=r"one part in 2.*leave the sampler out.*shuffle=True"):
        ShareLoader(partial_loader(how), Alone(), lambda n, m: None)


def test_a_distributed_sampler_of_everything_is_a_sampler() -> None:
    loader = partial_loader("sampler", parts=1)
    assert torch.cat(list(ShareLoader(loader, Alone(), lambda n, m: None))).tolist() == [*range(12)]


@pytest.mark.parametrize(
    "kind", ["plain", "several", "unsigned", "transposed", "learned", "picked"]
)
def test_batches_of_tensors_are_those_of_torch(kind: str) -> None:
    """Fetched at once where an index makes the same of them, row by row elsewhere."""
    first = torch.arange(36.0).view(12, 3)
    tensors = {
        "several": (first, torch.arange(12), torch.ones(12, 2, 2, dtype=torch.bool)),
        "unsigned": (first, torch.arange(12).to(torch.uint16)),
        "transposed": (first.T.contiguous().T,),
        "learned": (first.clone().requires_grad_(),),
    }.get(kind, (first,))
    picked = [[torch.tensor(3), torch.tensor(1)], [torch.tensor(0)]]
    how: dict[str, Any] = {"batch_sampler": picked} if kind == "picked" else {"batch_size": 5}
    loader = DataLoader(TensorDataset(*tensors), **how)
    for ours, theirs in zip(ShareLoader(loader, Alone(), lambda n, m: None), loader, strict=True):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
            assert a.requires_grad == b.requires_grad
