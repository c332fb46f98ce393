"""Replicas that wait for a live but late replica name it."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn

import stratagem as sg
from tests.clock import in_time
from tests.support import strategy


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", ["shared_memory", "ring", "hierarchical"])
def test_the_late_one_is_named(op: str, caplog: pytest.LogCaptureFixture) -> None:
    def dawdle() -> None:
        replica = sg.current_replica()
        replica.barrier()
        if replica.index == 2:
            time.sleep(8)
        replica.barrier()

    made = strategy(3, cross_device_ops=op)
    with caplog.at_level(logging.WARNING, "stratagem"):
        made.run(dawdle)
    made.close()
    lines = [record.getMessage() for record in caplog.records if "waiting for" in record.message]
    assert lines and all("replica 2," in line and "replica 1" not in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", ["shared_memory", "ring"])
@pytest.mark.parametrize("late", [0, 2])
def test_the_late_one_is_given_up(op: str, late: int) -> None:
    """A replica has a longer loop: the others wait for the strategy's `Patience`."""

    def uneven() -> None:
        replica = sg.current_replica()
        replica.barrier()
        if replica.index == late:
            time.sleep(6)
        replica.barrier()

    made = strategy(3, cross_device_ops=op, patience=sg.Patience(step=3))
    made.run(lambda: None)
    start = time.monotonic()
    with pytest.raises(sg.ReplicaStalled, match=rf"replica {late} .*has not come") as caught:
        made.run(uneven)
    in_time(time.monotonic() - start, 5.9 if late else 12, least=3)
    assert caught.value.who == f"replica {late}"
    assert "in 3 s" in str(caught.value) and "Patience(step=...)" in str(caught.value)
    assert made.run(lambda: 1) == [1] * 3
    made.close()


@pytest.mark.timeout(60)
def test_another_number_of_backward_passes() -> None:
    """It cannot be refused beforehand, but ends with an error on every replica."""

    def train() -> None:
        net = nn.Linear(2, 1)
        made.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(3 + sg.current_replica().index):
            net(torch.ones(1, 2)).sum().backward()

    made = strategy(2, cross_device_ops="ring", patience=sg.Patience(step=3))
    with pytest.raises(sg.ReplicaStalled, match=r"replica 0 .*has not come"):
        made.run(train)
    made.close()
