"""Replicas that fill a machine get a core each while they train, and give it back."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stratagem as sg
from stratagem.strategies.cores import available, own_core


@given(cores=st.sets(st.integers(0, 300), min_size=1), replicas=st.integers(1, 64),
       threads=st.integers(1, 8))  # fmt: skip
def test_never_two_replicas_on_one_core(cores: set[int], replicas: int, threads: int) -> None:
    offered = tuple(sorted(cores))
    chosen = [own_core(offered, replicas, threads, i) for i in range(replicas)]
    if None in chosen:
        assert set(chosen) == {None}
        assert threads > 1 or replicas == 1 or not replicas <= len(cores) < 2 * replicas
    else:
        assert len(set(chosen)) == replicas and set(chosen) <= cores


def test_half_a_machine_is_left_to_the_kernel() -> None:
    assert own_core(tuple(range(16)), replicas=8, threads=1, index=0) is None
    assert own_core(tuple(range(15)), replicas=8, threads=1, index=7) == 7


class Cores(sg.callbacks.Callback):
    """What the thread that trains on the chief may use, during and after."""

    def __init__(self) -> None:
        self.during: set[int] = set()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.during = set(os.sched_getaffinity(0))


@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_fit_holds_its_core_and_gives_it_back() -> None:
    before = os.sched_getaffinity(0)
    count = len(available())
    if not 1 < count <= 4:
        pytest.skip("needs 2 to 4 cores, one for each replica")
    cores = Cores()
    strategy = sg.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    with strategy.scope():
        model = sg.Model(nn.Linear(3, 1))
        model.compile(optimizer="sgd", loss="mse")
    x = torch.randn(16, 3)
    model.fit(x, x.sum(1, keepdim=True), batch_size=8, verbose=0, callbacks=[cores])
    assert cores.during == {available()[0]}
    assert os.sched_getaffinity(0) == before
    inside = strategy.run(lambda: os.sched_getaffinity(0))
    assert inside == [before] * count  # followers gave theirs back, too
