"""ShardedStrategy over workers of a cluster: each a process with TF_CONFIG on this machine.

Over shared memory they have one set of parameters; over Gloo, as between machines, each has its
shard. A worker that dies is named on the others.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.clock import in_time
from tests.hosts import Hosts, needs_hosts
from tests.replicas.scripts import nursery
from tests.strategies.test_multi_worker import SOON, Cluster, alone, end_well, weights
from tests.support import distance, mlp

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(nursery(), tmp_path)
    nursery().clear()


@pytest.mark.parametrize("how", [None, "ring"])
def test_same_weights_and_only_the_chief_writes(
    two: Cluster, tmp_path: Path, how: str | None
) -> None:
    everybody = two.all(
        f"""
        strategy = sg.ShardedStrategy(None, {how!r})
        assert strategy.num_replicas_in_sync == 2
        save = sg.callbacks.ModelCheckpoint(f"saved{{me}}" + "-{{epoch}}")
        model = train(strategy, callbacks=[save], verbose=0)
        model.save(f"final{{me}}")
        again = sg.Model(mlp(), strategy)
        again.compile(optimizer=sgd, loss=F.cross_entropy)
        again.load(f"saved{{me}}-1")  # of the first epoch, with the optimizer's state
        x, y = data(100)
        again.fit(x, y, batch_size=32, verbose=0, shuffle=False)
        torch.save(again.module.state_dict(), f"weights{{me}}.pt")
        """
    )
    end_well(everybody)
    reference = alone()
    assert distance(reference, mlp()) > 1e-2
    for i in range(2):
        assert distance(reference, weights(tmp_path / f"weights{i}.pt")) < 1e-6
    saved = {path.name.partition(".")[0] for path in tmp_path.glob("*.safetensors")}
    assert saved == {"saved0-1", "saved0-2", "final0"}
    module = mlp()
    module.load_state_dict(load_file(tmp_path / "final0.safetensors"))
    assert distance(reference, module) < 1e-6


@pytest.mark.parametrize("how", [None, "ring"])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_worker_is_killed(two: Cluster, how: str | None, dead: int) -> None:
    everybody = two.all(
        f"""
        strategy = sg.ShardedStrategy(None, {how!r})
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(strategy, loss=Act({dead}, kill))
        except sg.ReplicaLost as error:
            explain(error)
        """
    )
    survivor = everybody[1 - dead]
    assert everybody[dead].ends() == -signal.SIGKILL
    in_time(survivor.says(f"raised ReplicaLost about worker {dead} ::"), SOON)
    assert survivor.ends() == 0


def test_a_worker_that_stops_is_named(two: Cluster) -> None:
    everybody = two.all(
        """
        strategy = sg.ShardedStrategy(None, "ring", patience=sg.Patience(answer=4))
        stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
        try:
            train(strategy, loss=Act(1, stop))
        except sg.ReplicaError as error:
            explain(error)
        """
    )
    everybody[1].says("now")
    in_time(everybody[0].says("about worker 1 ::"), 20.0)
    assert everybody[0].ends() == 0
    everybody[1].signal(signal.SIGKILL)


def test_an_exception_in_backward_comes_back(two: Cluster) -> None:
    everybody = two.all(
        """
        strategy = sg.ShardedStrategy(None, "ring")
        def fail():
            raise ValueError("not today")
        try:
            train(strategy, loss=Act(1, fail))
        except (sg.ReplicaError, ValueError) as error:
            print("raised", type(error).__name__, "::", error)
        """
    )
    in_time(everybody[0].says("raised ReplicaFailed"), SOON)
    assert "not today" in everybody[0].out
    end_well(everybody)


HOST = """
import torch.nn.functional as F
import stratagem as sg
from stratagem.training.layer_shards import LayerShards
from tests.support import by_hand, data, distance, mlp
import torch

made, plain = [], LayerShards.leave_home
LayerShards.leave_home = lambda self: (made.append(self), plain(self))
def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)
strategy = sg.ShardedStrategy()
x, y = data(100)
with strategy.scope():
    model = sg.Model(mlp())
    model.compile(optimizer=sgd, loss=F.cross_entropy)
model.fit(x, y, batch_size=33, epochs=2, verbose=0, shuffle=False)  # shares of 17 and 16, 1 and 0
one = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=33, epochs=2)
print("divided", len({id(each) for each in made}), "exact", distance(one, model.module) < 1e-6)
"""


@pytest.mark.slow
@needs_hosts
def test_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HOST)
    with Hosts(2) as hosts:
        workers = [f"{hosts.address(i)}:2222" for i in range(2)]
        tasks = [
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}
            for i in range(2)
        ]
        running = [
            hosts.start(
                i,
                sys.executable,
                tmp_path / "train.py",
                STRATAGEM_SECRET="of a test",
                TF_CONFIG=json.dumps(task),
            )
            for i, task in enumerate(tasks)
        ]
        said = [each.communicate(timeout=90)[0].splitlines()[-1] for each in running]
    assert said == ["divided 1 exact True"] * 2
