"""Pipelines whose stages share no memory: messages between tasks of a cluster, and between hosts.

During a training each stage has only its own layers. The reference is one device.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
import torch.nn.functional as F

import stratagem as sg
from stratagem.state.parted_model import PartedTensors
from stratagem.wire.tree_channel import open_channels
from tests.clock import SLOWER, in_time
from tests.frontends.keras.test_stages import apart, numbers, trained
from tests.frontends.keras.test_stages import deep as keras_deep
from tests.hosts import Hosts, needs_hosts
from tests.launch.run_processes import Launcher
from tests.replicas.scripts import nursery
from tests.strategies.stage_scripts import HEAD, TRAIN
from tests.strategies.test_multi_worker import SOON, Cluster, end_well
from tests.strategies.test_pipeline import Knotted, adam, deep, doubles, fitted
from tests.support import by_hand, cpus, distance, moved

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(nursery(), tmp_path)
    nursery().clear()


@pytest.fixture(scope="module")
def apart_pair() -> Iterator[sg.PipelineStrategy]:
    with sg.PipelineStrategy(cpus(2), 3, cross_device_ops="ring") as made:
        yield made


# --- messages -------------------------------------------------------------------------------------


def test_messages_carry_their_shape_and_keep_their_order(
    apart_pair: sg.PipelineStrategy,
) -> None:
    """Both sides send messages of any size before they read, also to themselves."""

    def swap() -> list[Any]:
        replica = sg.current_replica()
        there, back, own = open_channels(replica.collective, [(0, 1), (1, 0), (0, 0)], 2)
        mine, theirs = (there, back) if replica.index == 0 else (back, there)
        for size in (3, 0, 300_000):
            mine.post({"x": torch.full((size, 2), float(replica.index)), "n": size})
        found = [theirs.take() for _ in range(3)]
        if replica.index == 0:
            own.post([torch.ones(2)])
            assert own.take()[0].sum() == 2
        assert all((told["x"] == 1 - replica.index).all() for told in found)
        return [(told["n"], tuple(told["x"].shape)) for told in found]

    expected = [(3, (3, 2)), (0, (0, 2)), (300_000, (300_000, 2))]
    assert apart_pair.run(swap) == [expected, expected]


# --- the same answer ------------------------------------------------------------------------------


def test_numbers_of_rows(apart_pair: sg.PipelineStrategy, monkeypatch: Any) -> None:
    """During the training the chief has only its own layers."""
    held: set[tuple[int, ...]] = set()
    plain = PartedTensors.leave_home

    def leave(self: PartedTensors) -> bool:
        left = plain(self)
        held.add(tuple(t.numel() for t in self._tensors))
        return left

    monkeypatch.setattr(PartedTensors, "leave_home", leave)
    module = deep()
    for rows in (1, 2, 3, 7):
        x, y = doubles(7 + rows)
        one = by_hand(module, adam, F.cross_entropy, x, y, batch=7, epochs=1)
        model = fitted(apart_pair, module, x, y, optimizer=adam, batch=7, epochs=1)
        assert distance(one, model.module) < 1e-12, rows
        assert moved(module, one)
    whole = sum(p.numel() for p in module.parameters())
    assert held and all(0 < sum(each) < whole for each in held)


@pytest.mark.parametrize("schedule", ["interleaved", "1f1b"])
def test_skips_and_ties(apart_pair: sg.PipelineStrategy, schedule: str) -> None:
    """A tied weight is used on two stages, and updated on one of them."""
    module = Knotted().double()
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 11, (2, 23, 5), generator=dice)
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=9, epochs=3)
    with sg.PipelineStrategy(cpus(2), 4, schedule, cross_device_ops="ring") as on:
        model = fitted(on, module, x, y, optimizer=adam, batch=9, epochs=1)
        model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)  # with all states
    assert distance(one, model.module) < 1e-12
    assert moved(module, one)


@pytest.mark.slow
def test_rows_of_pipelines() -> None:
    """22 rows in batches of 7: the last batch has one, so a row of the mesh has none."""
    module, (x, y) = deep(), doubles(22)
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=7)
    patient = sg.Patience(answer=30.0)  # processes are more than cores
    with sg.Mesh(2, 2, microbatches=2, cross_device_ops="ring", patience=patient) as on:
        model = fitted(on, module, x, y, optimizer=adam, batch=7)
    assert distance(one, model.module) < 1e-12
    assert moved(module, one)


def test_a_keras_model(apart_pair: sg.PipelineStrategy) -> None:
    """The chief has weights and slots for validation, callbacks and another call."""
    x, y = numbers(22)

    class Halve(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for variable in self.model.trainable_variables:
                variable.assign(variable * 0.99)

    models = []
    for on in (None, apart_pair):
        model, _ = trained(on, keras_deep, x, y, optimizer=keras.optimizers.Adam)
        model.fit(x, y, batch_size=7, verbose=0, shuffle=False, validation_data=(x, y))
        model.fit(x, y, batch_size=7, verbose=0, shuffle=False, callbacks=[Halve()])
        models.append(model)
    assert apart(*models) < 1e-6
    slots = zip(*(each.optimizer.variables for each in models), strict=True)
    assert max(float((a.value - b.value).abs().max()) for a, b in slots) < 1e-6


def test_custom_loops_are_refused(apart_pair: sg.PipelineStrategy) -> None:
    def loop() -> None:
        module = deep()
        apart_pair.prepare(module, adam(module.parameters()))

    with pytest.raises(sg.NotDistributable, match=r"on other hosts or devices; use sg\.Model"):
        apart_pair.run(loop)


def test_a_failure_leaves_no_old_layers(
    apart_pair: sg.PipelineStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    """The layers of the lost stage are lost; its initial weights do not pass for trained ones."""
    x, y = doubles(22)

    def judge(output: Any, target: Any) -> Any:
        if bool((target == 3).any()) and judge.calls > 3:  # type: ignore[attr-defined]
            raise ValueError("enough")
        judge.calls += 1  # type: ignore[attr-defined]
        return F.cross_entropy(output, target)

    judge.calls = 0  # type: ignore[attr-defined]
    model = sg.Model(deep(), apart_pair)
    model.compile(optimizer=adam, loss=judge, check=False)
    with caplog.at_level(logging.ERROR), pytest.raises(sg.ReplicaFailed, match="enough"):
        model.fit(x, y, batch_size=7, verbose=0)
    assert "go on from a checkpoint" in caplog.text
    lost = [bool(p.isnan().any()) for p in model.module.parameters()]
    assert lost[-1] and not lost[0]


# --- tasks ----------------------------------------------------------------------------------------


SCRIPT = f'{HEAD}strategy = sg.PipelineStrategy(cross_device_ops="ring"){TRAIN}'
COLUMNS = """
import torch
import torch.nn.functional as F
from torch import nn
from tests.strategies.test_columns import Stack, adam, fitted, rows
from tests.support import by_hand, distance
import stratagem as sg
strategy = sg.PipelineStrategy(columns=3, cross_device_ops="ring")
x, y = rows("all")
module = Stack(nn.LSTM, "all").double()
one = by_hand(module, adam, F.cross_entropy, x, y, batch=5)
model = fitted(strategy, module, x, y, clip_norm=1e3, validation_data=(x, y))
print("columns", distance(one, model.module) < 1e-12, distance(one, module) > 1e-3, flush=True)
"""


def test_workers_of_a_cluster(two: Cluster) -> None:
    """`sg.PipelineStrategy()` in a script that is started twice, one task per stage; then, in the
    same tasks, recurrent layers in columns."""
    everybody = two.all(f"{SCRIPT}strategy.close()\n{COLUMNS}")
    end_well(everybody)
    assert all("exact True True 2" in each.out for each in everybody), everybody
    assert all("columns True True" in each.out for each in everybody), everybody


@pytest.mark.slow
def test_workers_of_stratagem_run(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    try:
        child = launcher(SCRIPT, "--workers", "2", PYTHONPATH=str(Path(__file__).parents[2]))
        out, err = child.communicate(timeout=100 * SLOWER)
    finally:
        launcher.end()
    assert child.returncode == 0, err
    assert out.count("exact True True 2") == 2, out


class Bomb(torch.nn.Module):
    """Sends its process a signal in the third batch."""

    def __init__(self, task: int, kind: str) -> None:
        super().__init__()
        self.task, self.kind, self.calls = task, kind, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) != 0.0:  # so it is not traced
            self.calls += 1
        if self.calls > 40 and sg.current_replica().index == self.task:
            print("now", flush=True)
            os.kill(os.getpid(), getattr(signal, self.kind))
        return x


def with_bomb(task: int, kind: str) -> torch.nn.Module:
    """On the task's stage."""
    module: Any = deep()
    return module.insert([1, -1][task], Bomb(task, kind))  # type: ignore[no-any-return]


FIT = """
from tests.strategies.test_pipeline import doubles, fitted
from tests.strategies.test_pipeline_hosts import with_bomb
strategy = sg.PipelineStrategy(None, 2, cross_device_ops="ring", patience=sg.Patience(answer=4))
try:
    fitted(strategy, with_bomb({task}, {kind!r}), *doubles(40), epochs=20)
except sg.ReplicaError as error:
    explain(error)
"""


@pytest.mark.parametrize("dead", [0, 1])
def test_a_stage_is_killed(two: Cluster, dead: int) -> None:
    everybody = two.all(FIT.format(task=dead, kind="SIGKILL"))
    survivor = everybody[1 - dead]
    assert everybody[dead].ends() == -signal.SIGKILL
    in_time(survivor.says(f"raised ReplicaLost about worker {dead} ::"), SOON)
    assert survivor.ends() == 0


@pytest.mark.slow
def test_a_stage_that_stops_is_named(two: Cluster) -> None:
    everybody = two.all(FIT.format(task=1, kind="SIGSTOP"))
    everybody[1].says("now")
    in_time(everybody[0].says("raised ReplicaStalled about worker 1 ::"), 20.0)
    assert everybody[0].ends() == 0
    everybody[1].signal(signal.SIGKILL)


def test_tasks_that_split_differently_are_refused(two: Cluster) -> None:
    everybody = two.all(
        """
        try:
            sg.PipelineStrategy(None, 2 + me)
        except sg.ClusterError as error:
            print("refused", error)
        """
    )
    end_well(everybody)
    assert all("do not split the model in the same way" in each.out for each in everybody)


# --- hosts ----------------------------------------------------------------------------------------

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
from tests.frontends.keras.test_stages import apart, deep, numbers, trained
import stratagem as sg
strategy = sg.PipelineStrategy(microbatches=3)
x, y = numbers(22)
one, _ = trained(None, deep, x, y, optimizer=keras.optimizers.Adam)
model, _ = trained(strategy, deep, x, y, optimizer=keras.optimizers.Adam)
print("exact", apart(one, model) < 1e-6)
"""

#: three strategies one after another, in the same tasks
STAGES = f"""{HEAD}strategy = sg.PipelineStrategy(){TRAIN}
strategy.close()
{COLUMNS.replace(', cross_device_ops="ring"', "")}
strategy.close()
{KERAS}"""
MESH = f"{HEAD}strategy = sg.Mesh(data=2, stage=2, microbatches=2){TRAIN}"


@pytest.mark.slow
@pytest.mark.timeout(420)
@needs_hosts
def test_stages_on_two_hosts(tmp_path: Path) -> None:
    said = on_hosts(tmp_path, 2, STAGES)
    assert said == [["exact True True 2", "columns True True", "exact True"]] * 2


@pytest.mark.slow
@pytest.mark.timeout(420)
@needs_hosts
def test_a_mesh_on_two_hosts(tmp_path: Path) -> None:
    """Two tasks per host, so that its columns cross the hosts."""
    assert on_hosts(tmp_path, 4, MESH) == [["exact True True 2"]] * 4


def on_hosts(tmp_path: Path, count: int, script: str) -> list[list[str]]:
    """Run a script in so many tasks on two hosts; what each says about its result."""
    (tmp_path / "train.py").write_text(script)
    with Hosts(2) as hosts:
        workers = [f"{hosts.address(i * 2 // count)}:{2222 + i}" for i in range(count)]
        running = [
            hosts.start(
                i * 2 // count,
                sys.executable,
                tmp_path / "train.py",
                STRATAGEM_SECRET="of a test",
                OMP_NUM_THREADS="1",
                TF_CONFIG=json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}
                ),
            )
            for i in range(count)
        ]
        said = [each.communicate(timeout=360)[0].splitlines() for each in running]
    return [[line for line in lines if line.startswith(("exact", "columns"))] for lines in said]
