"""When replicas synchronise, and how gossip averages their weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import stratagem as sg
from stratagem.rules.cadence import Cadence


def matrix(graph: str, size: int, turn: int) -> Tensor:
    """Return the weights of gossip: row i is what replica i takes from each replica."""
    found = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        for other, weight in sg.Gossip(graph).weights(rank, size, turn).items():
            found[rank, other] += weight
    return found


@given(st.sampled_from(["ring", "exponential"]), st.integers(1, 17), st.integers(0, 40))
def test_gossip_keeps_the_mean_and_takes_what_is_sent(graph: str, size: int, turn: int) -> None:
    """Rows add up to 1, so that equal weights stay; columns do, so that the mean stays."""
    weights = matrix(graph, size, turn)
    assert torch.allclose(weights.sum(0), torch.ones(size).double(), atol=1e-15)
    assert torch.allclose(weights.sum(1), torch.ones(size).double(), atol=1e-15)
    for rank in range(size):
        taken = {i for i in range(size) if i != rank and weights[i, rank] > 0}
        assert set(sg.Gossip(graph).receivers(rank, size, turn)) == taken


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_the_exponential_graph_comes_to_the_mean(power: int) -> None:
    size = 2**power
    product = torch.eye(size).double()
    for turn in range(5, 5 + power):  # from any turn on
        product = matrix("exponential", size, turn) @ product
    assert torch.allclose(product, torch.full_like(product, 1 / size), atol=1e-15)


def test_a_ring_of_eight_mixes_as_known() -> None:
    seconds = torch.linalg.eigvalsh(matrix("ring", 8, 0)).abs().sort().values
    assert float(seconds[-2]) == pytest.approx(0.8047, abs=1e-4)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 60))
def test_every_fragment_meets_once_in_a_round(parts: int, pace: int, updates: int) -> None:
    cadence = Cadence(sg.DiLoCo(parts * pace, fragments=parts))
    met = [cadence.updated() for _ in range(updates)]
    times: dict[int, list[int]] = {}
    for at, part in enumerate(met, 1):
        if part is not None:
            times.setdefault(part, []).append(at)
    for part, each in times.items():
        assert each[0] == (part + 1) * pace
        assert all(b - a == parts * pace for a, b in itertools.pairwise(each))
    assert sum(map(len, times.values())) == updates // pace


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 60))
def test_a_part_meets_so_many_updates_after_it_was_sent(
    data: st.DataObject, parts: int, pace: int, updates: int
) -> None:
    """One part at a time is under way, and meanwhile `apart` is true."""
    delay = data.draw(st.integers(0, pace - 1))
    cadence = Cadence(sg.DiLoCo(parts * pace, fragments=parts, overlap=delay))
    sent, met = [], []
    for at in range(updates):
        part = cadence.updated()
        if part is not None:
            sent.append((at, part))
        if cadence.ends:
            assert cadence.apart and cadence.under_way is not None
            assert cadence.unmet[cadence.under_way] == delay
            met.append((at - delay, cadence.under_way))
            cadence.ended(alike=data.draw(st.booleans()))
            assert cadence.under_way is None
    assert met == sent[: len(met)] and len(sent) - len(met) in (0, 1)
    cadence.met()
    assert not cadence.apart and not cadence.ends


def test_several_fragments_are_sent_while_training_goes_on() -> None:
    assert [sg.DiLoCo(n, fragments=2).delay for n in (2, 4, 8, 100)] == [0, 1, 2, 5]
    assert [sg.DiLoCo(100).delay, sg.DiLoCo(100, fragments=4, overlap=0).delay] == [0, 0]


def test_exact_steps_come_first_and_a_forced_meeting_begins_anew() -> None:
    cadence = Cadence(sg.LocalSteps(3, after=2))
    assert [cadence.together, cadence.updated(), cadence.together, cadence.updated()] == [
        True,
        None,
        True,
        None,
    ]
    assert not cadence.together and cadence.since == 0
    assert [cadence.updated() for _ in range(4)] == [None, None, 0, None]
    cadence.met()
    assert [cadence.updated() for _ in range(3)] == [None, None, 0]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sg.LocalSteps(0), "every is a whole number"),
        (lambda: sg.LocalSteps(2, after=-1), "after is a whole number"),
        (lambda: sg.DiLoCo(5, fragments=2), "multiple of fragments"),
        (lambda: sg.DiLoCo(6, fragments=2, overlap=3), "less than the 3 updates"),
        (lambda: sg.DiLoCo(6, overlap=-1), "overlap is a whole number"),
        (lambda: sg.DiLoCo(6, mix=1.0), "mix is at least 0 and less than 1"),
        (lambda: sg.Gossip("star"), '"ring" or "exponential"'),
        (lambda: sg.Outer(lr=0), "greater than 0"),
        (lambda: sg.Outer(momentum=1.0), "less than 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: object, sentence: str) -> None:
    with pytest.raises(sg.UsageError, match=sentence):
        make()  # type: ignore[operator]
