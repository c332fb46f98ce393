"""Cross-device operations by name: their packs, their roots, and where they can run."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.training.cross_device import ReplicaHardware, check, named, possible
from tests.support import by_hand, data, distance, mlp, strategy

CPUS = ReplicaHardware(frozenset({"cpu"}), one_host=True, apart=True)
CPUS_APART = ReplicaHardware(frozenset({"cpu"}), one_host=False, apart=True)
GPUS = ReplicaHardware(frozenset({"cuda"}), one_host=True, apart=True)
ONE_GPU = ReplicaHardware(frozenset({"cuda"}), one_host=True, apart=False)
MIXED = ReplicaHardware(frozenset({"cpu", "cuda"}), one_host=True, apart=True)

HOSTS = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=40)


@given(HOSTS, st.none() | st.integers(1, 50))
def test_every_rank_is_in_one_pack(hosts: list[str], count: int | None) -> None:
    """For odd numbers too: TensorFlow drops the last replica there."""
    packs = sg.HierarchicalCopyAllReduce(num_packs=count).packs(hosts)
    assert sorted(rank for pack in packs for rank in pack) == list(range(len(hosts)))
    assert all(pack == sorted(pack) and pack for pack in packs)
    if count is not None:
        assert len(packs) == min(count, len(hosts))
        assert max(map(len, packs)) - min(map(len, packs)) <= 1


@given(HOSTS)
def test_a_pack_a_host(hosts: list[str]) -> None:
    packs = sg.HierarchicalCopyAllReduce().packs(hosts)
    if len(set(hosts)) > 1:
        assert [{hosts[rank] for rank in pack} for pack in packs] == [
            {host} for host in dict.fromkeys(hosts)
        ]
    else:
        assert len(packs) == min(2, len(hosts))


@pytest.mark.parametrize("count", [0, -1])
def test_no_packs(count: int) -> None:
    with pytest.raises(sg.UsageError, match=f"num_packs is {count}; it must be 1 or more"):
        sg.HierarchicalCopyAllReduce(num_packs=count)


def test_the_device_that_adds_up() -> None:
    devices = ["cpu:0", "cpu:1", "cuda:0", "cpu:0"]
    assert sg.ReductionToOneDevice().root(devices) == 0
    assert sg.ReductionToOneDevice("/cpu:1").root(devices) == 1
    assert sg.ReductionToOneDevice("/gpu:0").root(devices) == 2
    assert sg.ReductionToOneDevice("cpu").root(devices) == 0
    with pytest.raises(sg.UsageError, match=r"'cpu:7' is not among.*cpu:0, cpu:1, cuda:0"):
        sg.ReductionToOneDevice("cpu:7").root(devices)
    with pytest.raises(sg.DeviceError):
        sg.ReductionToOneDevice("npu:7").root(devices)


@pytest.mark.timeout(60)
def test_an_absent_device_is_refused_before_any_work() -> None:
    made = strategy(2, cross_device_ops=sg.ReductionToOneDevice("cpu:7"))
    with contextlib.closing(made), pytest.raises(sg.UsageError, match="not among"):
        made.run(lambda: 1)


def test_names() -> None:
    assert named("nccl") == sg.NcclAllReduce()
    assert named("ring") == named("RING") == sg.RingAllReduce()
    assert named("hierarchical") == sg.HierarchicalCopyAllReduce()
    assert named("one_device") == sg.ReductionToOneDevice()
    assert named("shared_memory") == sg.SharedMemoryAllReduce()
    assert named(None) is None and named("auto") == "auto"
    op = sg.HierarchicalCopyAllReduce(num_packs=3)
    assert named(op) is op


@pytest.mark.parametrize("choice", ["tree", "", 5, sg.RingAllReduce])
def test_what_is_no_name(choice: object) -> None:
    with pytest.raises(sg.UsageError, match=r"is not known; choose one of 'auto', 'nccl', 'ring'"):
        sg.MirroredStrategy(["cpu:0"], cross_device_ops=choice)  # type: ignore[arg-type]


def test_communication_has_fewer_names() -> None:
    with pytest.raises(sg.UsageError, match=r"'one_device' is not known.*'ring'.*'hierarchical'"):
        sg.MultiWorkerMirroredStrategy("one_device")
    for choice in ("hierarchical", sg.experimental.CollectiveCommunication.RING):
        with contextlib.closing(sg.MultiWorkerMirroredStrategy(choice, devices=["cpu:0"])) as made:
            assert made.settings.op == named(choice)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sg.MultiWorkerMirroredStrategy(cross_device_ops="ring"),  # type: ignore[call-arg]
            r"^MultiWorkerMirroredStrategy has no cross_device_ops: it is communication=\"ring\"",
        ),
        (
            lambda: sg.MirroredStrategy(cross_device_op="ring"),  # type: ignore[call-arg]
            "^MirroredStrategy has no cross_device_op: perhaps it is cross_device_ops",
        ),
        (
            lambda: sg.ParameterServerStrategy(variable_partitioner=None),  # type: ignore[call-arg]
            "^ParameterServerStrategy has no variable_partitioner: it is partitioner",
        ),
        (
            lambda: sg.CentralStorageStrategy(wire="bfloat16"),  # type: ignore[call-arg]
            "^CentralStorageStrategy has no wire: there are compute_devices, parameter_device",
        ),
        (
            lambda: sg.LocalCluster(workers=2, servers=1),  # type: ignore[call-arg]
            "^LocalCluster has no servers: it is ps",
        ),
        (
            lambda: sg.LocalCluster(2, 1, 1),  # type: ignore[call-arg]
            "^LocalCluster takes workers and ps by their place, and 3 were given",
        ),
        (
            lambda: sg.LocalCluster(workers="two"),  # type: ignore[arg-type]
            r"^LocalCluster\(workers='two', ps=1\): both are whole numbers, at least one",
        ),
    ],
)
def test_arguments_that_are_not_there(make: Callable[[], object], words: str) -> None:
    with pytest.raises(sg.UsageError, match=words):
        make()


def test_the_usual_choice() -> None:
    assert possible(CPUS)[0] == sg.SharedMemoryAllReduce()
    assert possible(GPUS)[0] == sg.NcclAllReduce()
    assert possible(CPUS_APART)[0] == possible(MIXED)[0] == sg.RingAllReduce()
    assert possible(ONE_GPU)[0] == sg.RingAllReduce(), "NCCL refuses to share a GPU"


def told(hardware: ReplicaHardware) -> str:
    """A name that is the same in every process: sets have no order."""
    return f"{'+'.join(sorted(hardware.kinds))} one_host={hardware.one_host} apart={hardware.apart}"


@pytest.mark.parametrize("hardware", [CPUS, CPUS_APART, GPUS, ONE_GPU, MIXED], ids=told)
def test_what_is_possible_is_not_refused(hardware: ReplicaHardware) -> None:
    for op in possible(hardware):
        check(op, hardware)


@pytest.mark.parametrize("hardware", [CPUS, CPUS_APART, ONE_GPU, MIXED], ids=told)
def test_nccl_needs_gpus(hardware: ReplicaHardware) -> None:
    with pytest.raises(sg.UsageError, match=r"between NVIDIA GPUs only.*RingAllReduce\(\)"):
        check(sg.NcclAllReduce(), hardware)


@pytest.mark.parametrize("hardware", [CPUS_APART, GPUS, MIXED], ids=told)
def test_shared_memory_needs_one_machine(hardware: ReplicaHardware) -> None:
    with pytest.raises(sg.UsageError, match=r"CPU replicas of one machine only.*RingAllReduce"):
        check(sg.SharedMemoryAllReduce(), hardware)


@pytest.mark.timeout(60)
def test_nccl_on_cpus_is_refused_by_the_strategy() -> None:
    made = strategy(2, cross_device_ops="nccl")
    with contextlib.closing(made), pytest.raises(sg.UsageError, match="replicas run on cpu"):
        made.run(lambda: 1)


@pytest.mark.timeout(60)
def test_auto_measures_says_so_and_takes_one(caplog: pytest.LogCaptureFixture) -> None:
    """Every operation is timed; the one named last trains, with the result of one device."""

    def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    x, y = data(100)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=32)
    with contextlib.closing(strategy(2, cross_device_ops="auto")) as made:
        for _ in range(2):
            with made.scope():
                model = sg.Model(mlp())
                model.compile(optimizer=sgd, loss="cross_entropy")
            with caplog.at_level(logging.INFO, "stratagem"):
                model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
            assert distance(alone, model.module) < 1e-6
    lines = [r.getMessage() for r in caplog.records if "auto" in r.getMessage()]
    assert len(lines) == 1, "measured once for one size"
    times = {name: float(ms) for name, ms in re.findall(r"(\w+) ([\d.]+) ms", lines[0])}
    assert times.keys() == {type(op).__name__ for op in possible(CPUS)}
    taken = lines[0].rpartition("taking ")[2]
    assert times[taken] == min(times.values())
