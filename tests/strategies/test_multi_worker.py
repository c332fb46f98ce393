"""Several workers, each a process with TF_CONFIG (or torchrun's variables), on this machine.

They must reach the weights of one device, only the chief may write, and no worker may wait in
silence: a missing, late, dead, stopped or failed worker is named on the others.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tests.clock import in_time, unless_late
from tests.ports import free_ports
from tests.replicas.scripts import ROOT, Nursery, Script, nursery, wait_for
from tests.support import by_hand, data, distance, mlp

pytestmark = pytest.mark.timeout(120)

SOON = 5.0  # seconds until a death must be known; the promise is 2
BOTH = [None, "ring"]

HEAD = """
import json, os, signal, sys, time
import torch
import torch.nn.functional as F
import stratagem as sg
from tests.support import data, mlp

me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)

def train(strategy, loss=F.cross_entropy, epochs=2, rows=100, **options):
    x, y = data(rows)
    with strategy.scope():
        model = sg.Model(mlp())
        model.compile(optimizer=sgd, loss=loss)
    model.fit(x, y, batch_size=32, epochs=epochs, **{"verbose": 0, "shuffle": False, **options})
    return model

def explain(error):
    print("raised", type(error).__name__, "about", error.who, "::", error)
"""

# A loss that does something on one worker, in the third step of the second epoch.
ACT = """
class Act:
    def __init__(self, worker, act):
        self.worker, self.act, self.step = worker, act, 0
    def __call__(self, output, target):
        self.step += 1
        if me == self.worker and self.step == 7:
            print("now", flush=True)
            self.act()
        return F.cross_entropy(output, target)
"""


def alone(rows: int = 100, epochs: int = 2) -> nn.Module:
    def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    x, y = data(rows)
    return by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=32, epochs=epochs)


class Cluster:
    """Workers on ports of 127.0.0.1; the test starts each of them."""

    def __init__(self, scripts: Nursery, where: Path, count: int = 2, name: str = "worker") -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.name = name
        self._scripts, self._where = scripts, where

    def config(self, index: int) -> str:
        cluster = {"worker": self.addresses}
        return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})

    def start(self, index: int, source: str, **environ: str) -> Script:
        return self._scripts.start(
            self._where,
            HEAD + ACT + textwrap.dedent(source),
            f"{self.name}{index}",
            TF_CONFIG=self.config(index),
            **environ,
        )

    def all(self, source: str | Sequence[str]) -> list[Script]:
        sources = [source] * len(self.addresses) if isinstance(source, str) else source
        return [self.start(i, each) for i, each in enumerate(sources)]


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


@pytest.fixture
def two(scripts: Nursery, tmp_path: Path) -> Cluster:
    return Cluster(scripts, tmp_path)


def end_well(everybody: Sequence[Script], seconds: float = 40) -> None:
    for script in everybody:
        assert script.ends(seconds) == 0, str(script)


def weights(path: Path) -> nn.Module:
    module = mlp()
    module.load_state_dict(torch.load(path, weights_only=True))
    return module


# --- the same answer -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "how"), [(2, None), (3, "ring"), (2, "auto")])
def test_same_weights_and_only_the_chief_writes(
    scripts: Nursery, tmp_path: Path, count: int, how: str | None
) -> None:
    everybody = Cluster(scripts, tmp_path, count).all(
        f"""
        strategy = sg.MultiWorkerMirroredStrategy({how!r})
        assert strategy.num_replicas_in_sync == {count}
        assert strategy.is_chief == (me == 0)
        assert strategy.run(lambda: sg.current_replica().index) == [me]
        save = sg.callbacks.ModelCheckpoint(f"saved{{me}}" + "-{{epoch}}")
        speak = sg.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("callback"))
        model = train(strategy, verbose=2, callbacks=[save, speak])
        total = strategy.reduce("sum", torch.tensor([me + 1.0]))
        assert total.item() == sum(range(1, {count} + 1)), total
        torch.save(model.module.state_dict(), f"weights{{me}}.pt")
        model.save(f"final{{me}}")
        """
    )
    end_well(everybody)
    reference = alone()
    assert distance(reference, mlp()) > 1e-2
    for i in range(count):
        assert distance(reference, weights(tmp_path / f"weights{i}.pt")) < 1e-6
    chief, *others = everybody
    assert len(re.findall(r"epoch \d/2", chief.out)) == chief.out.count("callback") == 2
    assert all(other.out == "" for other in others)
    assert ("taking" in chief.err) == (how == "auto")
    assert not any("Traceback" in other.err for other in others)
    unless_late(all(other.err == "" for other in others), [other.err for other in others])
    saved = {path.name.partition(".")[0] for path in tmp_path.glob("*.safetensors")}
    assert saved == {"saved0-1", "saved0-2", "final0"}
    module = mlp()
    module.load_state_dict(load_file(tmp_path / "final0.safetensors"))
    assert distance(reference, module) < 1e-6


@pytest.mark.parametrize("how", BOTH)
def test_what_only_the_chief_has_reaches_the_others(
    two: Cluster, tmp_path: Path, how: str | None
) -> None:
    """The chief's callbacks and file, with the optimizer's state, reach the other workers."""
    everybody = two.all(
        f"""
        strategy = sg.MultiWorkerMirroredStrategy({how!r})
        watch = sg.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        mine = [watch, sg.callbacks.ModelCheckpoint(f"epoch{{me}}")] if me == 0 else []
        first = train(strategy, epochs=1, callbacks=mine)
        first.save(f"first{{me}}")
        x, y = data(100)
        again = sg.Model(mlp(), strategy)
        again.compile(optimizer=sgd, loss=F.cross_entropy)
        again.load(f"first{{me}}")
        again.fit(x, y, batch_size=32, verbose=0, shuffle=False)
        torch.save(again.module.state_dict(), f"weights{{me}}.pt")
        """
    )
    end_well(everybody)
    reference = alone()
    for i in range(2):
        assert distance(reference, weights(tmp_path / f"weights{i}.pt")) < 1e-6


@pytest.mark.slow
def test_two_devices_each(two: Cluster, tmp_path: Path) -> None:
    """Four replicas in two processes; one strategy after another on the same addresses.

    At the end worker 1 leaves, but worker 0 goes on, and waits for two replicas that are gone.
    """
    everybody = two.all(
        """
        for how in ("ring", None):
            strategy = sg.MultiWorkerMirroredStrategy(how, devices=["cpu:0", "cpu:1"])
            assert strategy.num_replicas_in_sync == 4
            indices = strategy.run(lambda: sg.current_replica().index)
            assert indices == [2 * me, 2 * me + 1], indices
            model = train(strategy)
            torch.save(model.module.state_dict(), f"{how}{me}.pt")
            gathered = strategy.gather(strategy.run(lambda: torch.tensor([indices[0] + 1.0])))
            assert gathered.tolist() == [1, 1, 3, 3], gathered
            if how is None and me == 0:
                try:
                    train(strategy)
                except sg.ReplicaError as error:
                    explain(error)
            strategy.close()
        """
    )
    end_well(everybody, 60)
    for name in ("None0", "None1", "ring0", "ring1"):
        assert distance(alone(), weights(tmp_path / f"{name}.pt")) < 1e-6, name
    assert everybody[0].out.startswith("raised ReplicaLost about worker 1 ::")
    assert "finished and left" in everybody[0].out


@pytest.mark.slow
def test_unequal_workers_and_the_death_of_a_follower(two: Cluster, tmp_path: Path) -> None:
    """Worker 0 has one device, worker 1 two. The follower of worker 1 dies: worker 0 names it."""
    everybody = two.all(
        """
        devices = ["cpu:0", "cpu:1"][: me + 1]
        strategy = sg.MultiWorkerMirroredStrategy(devices=devices)
        assert strategy.num_replicas_in_sync == 3
        torch.save(train(strategy).module.state_dict(), f"weights{me}.pt")

        def die():
            if sg.current_replica().index == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            train(strategy, loss=Act(1, die))
        except sg.ReplicaLost as error:
            explain(error)
        """
    )
    end_well(everybody, 60)
    for i in range(2):
        assert distance(alone(), weights(tmp_path / f"weights{i}.pt")) < 1e-6
        assert "raised ReplicaLost about worker 1 replica 1 ::" in everybody[i].out


@pytest.mark.parametrize("how", BOTH)
def test_unseeded_workers_end_alike(two: Cluster, tmp_path: Path, how: str | None) -> None:
    """The initial weights and the order of the data differ."""
    everybody = two.all(
        f"""
        strategy = sg.MultiWorkerMirroredStrategy({how!r})
        print("start =", torch.randn(1).item())
        x, y = data(100)
        with strategy.scope():
            model = sg.Model(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Dropout(0.2)))
            model.compile("adam", "cross_entropy")
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        torch.save(model.module.state_dict(), f"weights{{me}}.pt")
        """
    )
    end_well(everybody)
    assert everybody[0].noted("start") != everybody[1].noted("start")
    ours, theirs = (torch.load(tmp_path / f"weights{i}.pt", weights_only=True) for i in range(2))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_worker_of_one_device_is_its_replica_outside_of_run_too(two: Cluster) -> None:
    """So that a block under `if sg.current_replica().is_chief:` runs once."""
    everybody = two.all(
        """
        def who():
            replica = sg.current_replica()
            return replica.index, replica.count, replica.is_chief, replica.name

        def fit_alone():
            model = sg.Model(mlp())
            model.compile(sgd, "cross_entropy")
            model.fit(*data(8), batch_size=4, verbose=0)

        alone, mine = (0, 1, True, "replica 0"), (me, 2, me == 0, f"worker {me}")
        assert who() == alone
        strategy = sg.MultiWorkerMirroredStrategy()
        assert who() == mine
        assert sg.current_replica().all_reduce(torch.ones(1)).item() == 2
        assert strategy.run(who) == [mine]
        assert strategy.run(lambda: strategy.is_chief) == [me == 0] == [strategy.is_chief]
        train(strategy)
        fit_alone()
        assert who() == mine
        second = sg.MultiWorkerMirroredStrategy("ring")
        strategy.run(lambda: sg.current_replica().barrier())  # both have it, before one fails
        strategy.close()
        assert who() == mine
        try:
            second.run(lambda: second.run(who))
        except sg.StratagemError as error:  # its own, or what the other one was first to tell
            assert "already runs on every replica" in str(error)
        assert who() == mine, "a failure does not make a chief of everybody"
        second.close()
        assert who() == alone
        """
    )
    end_well(everybody)


# --- coming together -----------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_late_worker_is_named(two: Cluster, late: int) -> None:
    source = "print(sg.MultiWorkerMirroredStrategy().num_replicas_in_sync)"
    early = two.start(1 - late, source)
    in_time(early.says("waiting for"), SOON)
    assert f"waiting for worker {late} at {two.addresses[late]}, " in early.err
    two.start(late, source)
    assert early.ends() == 0
    assert early.out == "2\n"


def test_nobody_leaves_before_all_are_up(two: Cluster) -> None:
    """The chief owns the memory that a slow worker is still about to map."""
    slow = """
    from stratagem.wire.segment import Segment
    attach = Segment.attach
    Segment.attach = lambda handle: (time.sleep(0.7), attach(handle))[1]
    sg.MultiWorkerMirroredStrategy()
    """
    end_well(two.all(["sg.MultiWorkerMirroredStrategy()", slow]))


@pytest.mark.slow
def test_workers_that_never_come(scripts: Nursery, tmp_path: Path) -> None:
    """The chief of one cluster and a worker of another wait in vain."""
    source = "sg.MultiWorkerMirroredStrategy(patience=sg.Patience(arrive=3))"
    clusters = [Cluster(scripts, tmp_path, 3, f"lonely{i}-") for i in range(2)]
    start = time.monotonic()
    chief, worker = (cluster.start(i, source) for i, cluster in enumerate(clusters))
    for script in (chief, worker):
        assert script.ends() == 1
        assert "ReplicaMissing: " in script.err
        assert "never came" in script.err and "`stratagem check`" in script.err
    in_time(time.monotonic() - start, 3 + SOON, least=3)
    for i in (1, 2):
        assert f"worker {i} at {clusters[0].addresses[i]}" in chief.err.rpartition("Missing")[2]
    assert f"worker 0 at {clusters[1].addresses[0]}" in worker.err.rpartition("Missing")[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_worker_can_be_ended(
    scripts: Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    """The chief, which listens, and a worker, which connects, both end at once."""
    clusters = [Cluster(scripts, tmp_path, name=f"waits{i}-") for i in range(2)]
    waiting = [
        cluster.start(i, "sg.MultiWorkerMirroredStrategy()") for i, cluster in enumerate(clusters)
    ]
    for script in waiting:
        script.says("waiting for")
    for script in waiting:
        if number == signal.SIGINT:
            script.keyboard()
        else:
            script.signal(number)
    for script in waiting:
        in_time(wait_for(lambda script=script: script.status is not None), SOON)  # type: ignore[misc]
        assert script.status == -number
        assert "Interrupted" in script.err or number == signal.SIGTERM


def test_a_wrong_secret_is_refused(two: Cluster) -> None:
    chief = two.start(
        0,
        "sg.MultiWorkerMirroredStrategy(patience=sg.Patience(arrive=5))",
        STRATAGEM_SECRET="right",
    )
    worker = two.start(1, "sg.MultiWorkerMirroredStrategy()", STRATAGEM_SECRET="wrong")
    assert worker.ends() == 1
    assert re.search(r"WrongSecret: .*same STRATAGEM_SECRET", worker.err.splitlines()[-1]), worker
    assert chief.ends() == 1
    assert re.search(r"refused a connection from 127.0.0.1:\d+: .*SECRET", chief.err), chief
    assert "worker 1 at" in chief.err.rpartition("ReplicaMissing")[2]


def test_workers_that_add_up_differently_are_refused(two: Cluster) -> None:
    """They would otherwise wait for each other on different addresses."""
    everybody = two.all(
        ["sg.MultiWorkerMirroredStrategy('ring')", "sg.MultiWorkerMirroredStrategy()"]
    )
    for script in everybody:
        assert script.ends() == 1
        last = script.err.splitlines()[-1]
        assert "worker 0 RingAllReduce(), worker 1 SharedMemoryAllReduce()" in last
        assert "same cross_device_ops" in last


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("wire='bfloat16'", "worker 0 wire='bfloat16', worker 1 wire='float32'"),
        ("sync_batchnorm=True", "worker 0 sync_batchnorm=True, worker 1 sync_batchnorm=False"),
    ],
)
def test_workers_with_other_options_are_refused(two: Cluster, option: str, words: str) -> None:
    """They would otherwise all-reduce different bytes, or wait on different addresses."""
    everybody = two.all(
        [f"sg.MultiWorkerMirroredStrategy({option})", "sg.MultiWorkerMirroredStrategy()"]
    )
    for script in everybody:
        assert script.ends() == 1
        last = script.err.splitlines()[-1]
        assert last.startswith("stratagem.errors.ClusterError: ") and words in last, last
        assert f"same {option.partition('=')[0]}." in last


@pytest.mark.parametrize(
    "other, words",
    [
        ("sg.ShardedStrategy()", "divide parameters in the same way"),
        ("sg.MultiWorkerMirroredStrategy(elastic=True)", "let replicas leave in the same way"),
    ],
)
@pytest.mark.parametrize("chief", [0, 1])
def test_workers_with_other_strategies_are_refused(
    two: Cluster, other: str, words: str, chief: int
) -> None:
    everybody = two.all(
        f"""
        try:
            {other} if me == {chief} else sg.MultiWorkerMirroredStrategy()
        except sg.ClusterError as error:
            print("refused", error)
        """
    )
    end_well(everybody)
    assert all(words in each.out for each in everybody)


def test_central_storage_takes_no_part_in_a_cluster(two: Cluster) -> None:
    """Each task would train the whole, and both write the same files."""
    for script in two.all("sg.CentralStorageStrategy(['cpu:0', 'cpu:1'])"):
        assert script.ends() == 1
        last = script.err.splitlines()[-1]
        assert "NotDistributable: parameters are on one device" in last, last
        assert "start the script without it" in last


def test_two_names_of_the_usual_type_are_alike(two: Cluster) -> None:
    option = "sg.MultiWorkerMirroredStrategy(wire={})"
    end_well(two.all([option.format("None"), option.format("'float32'")]))


@pytest.mark.parametrize("dead", [0, 1])
def test_death_while_process_groups_form(two: Cluster, dead: int) -> None:
    """A worker dies after all have arrived, before the ring is complete."""
    die = "from stratagem.training import placement; placement._connect = lambda *a: os._exit(3)"
    ring = "sg.MultiWorkerMirroredStrategy('ring')"
    everybody = [two.start(i, f"{die}\n{ring}" if i == dead else ring) for i in range(2)]
    assert everybody[dead].ends() == 3
    in_time(wait_for(lambda: everybody[1 - dead].status is not None), SOON)
    assert everybody[1 - dead].status == 1
    assert f"worker {dead}" in everybody[1 - dead].err.rpartition("ReplicaLost")[2]


# --- coming apart --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("dead", [0, 1])
def test_a_worker_is_killed(two: Cluster, how: str | None, dead: int) -> None:
    everybody = two.all(
        f"""
        strategy = sg.MultiWorkerMirroredStrategy({how!r})
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
    assert two.addresses[dead] in survivor.out
    assert survivor.ends() == 0


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_worker_raises(two: Cluster, how: str | None, bad: int) -> None:
    everybody = two.all(
        f"""
        def oops():
            raise ZeroDivisionError("a bad day")

        train(sg.MultiWorkerMirroredStrategy({how!r}), loss=Act({bad}, oops))
        """
    )
    for script in everybody:
        assert script.ends() == 1
    assert everybody[bad].err.rstrip().endswith("ZeroDivisionError: a bad day")
    told = everybody[1 - bad].err
    assert f"ReplicaFailed: worker {bad} ({two.addresses[bad]}) raised an exception" in told
    assert "in oops" in told.rpartition("ReplicaFailed")[2], "the traceback of the other worker"


def test_a_script_fails_between_two_fits(two: Cluster) -> None:
    """Outside of any call, the end of the interpreter tells the other workers why."""
    everybody = two.all(
        """
        strategy = sg.MultiWorkerMirroredStrategy()
        train(strategy)
        if me == 1:
            open("/nowhere/at/all")
        try:
            train(strategy)
        except sg.ReplicaFailed as error:
            explain(error)
        """
    )
    assert everybody[1].ends() == 1
    assert everybody[0].ends() == 0
    assert "raised ReplicaFailed about worker 1 ::" in everybody[0].out
    assert "FileNotFoundError" in everybody[0].out


@pytest.mark.parametrize(
    ("how", "then"),
    [
        (None, "exit"),
        ("ring", "exit"),
        (None, "live on"),
        pytest.param("ring", "live on", marks=pytest.mark.slow),
    ],
)
def test_a_worker_leaves_early(two: Cluster, how: str | None, then: str) -> None:
    """The worker leaves by the end of its script, or by closing its strategy."""
    everybody = two.all(
        f"""
        strategy = sg.MultiWorkerMirroredStrategy({how!r})
        train(strategy)
        if me == 1:
            strategy.close()
            print("left")
            time.sleep(0 if {then!r} == "exit" else 60)
        else:
            try:
                train(strategy)
            except sg.ReplicaLost as error:
                explain(error)
        """
    )
    everybody[1].says("left")
    assert everybody[0].ends() == 0
    assert "raised ReplicaLost about worker 1 ::" in everybody[0].out
    assert "finished and left" in everybody[0].out
    assert "same number of steps" in everybody[0].out


def test_workers_that_part_ways_are_named(two: Cluster) -> None:
    everybody = two.all(
        """
        strategy = sg.MultiWorkerMirroredStrategy()
        replica = sg.current_replica()
        replica.broadcast(torch.ones(1)) if me else replica.barrier()
        """
    )
    for script in everybody:
        assert script.ends() == 1
    said = everybody[0].err + everybody[1].err
    assert re.search("worker [01] is at a (barrier|broadcast) where worker [01] is at a b", said)
    assert "replica 0 is at" not in said and "replica 1 is at" not in said


def test_workers_that_disagree_about_the_number_of_epochs(two: Cluster) -> None:
    everybody = two.all("train(sg.MultiWorkerMirroredStrategy(), epochs=2 - me)")
    for script in everybody:
        assert script.ends() == 1
        assert re.search("number of (epochs|steps)", script.err)


@pytest.mark.slow
@pytest.mark.parametrize("how", BOTH)
def test_a_worker_that_does_not_come_is_given_up(two: Cluster, how: str | None) -> None:
    """The worker answers, but does not come; in the end all tasks raise, that worker included."""
    everybody = two.all(
        f"""
        strategy = sg.MultiWorkerMirroredStrategy({how!r}, patience=sg.Patience(step=3))
        replica = sg.current_replica()
        replica.barrier()
        time.sleep(6 * me)
        try:
            replica.barrier()
            replica.barrier()
        except sg.ReplicaStalled as error:
            explain(error)
        """
    )
    end_well(everybody)
    for script in everybody:
        assert "raised ReplicaStalled about worker 1 ::" in script.out, script
        assert "has not come to the step where others wait for it, in 3 s" in script.out


@pytest.mark.slow
def test_a_worker_is_stopped_and_woken(scripts: Nursery, tmp_path: Path) -> None:
    """The other worker's log names it within seconds; woken, it reaches the same weights."""
    clusters = [Cluster(scripts, tmp_path, name=f"{how}-") for how in BOTH]
    both = [
        cluster.all(
            f"""
            stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
            model = train(sg.MultiWorkerMirroredStrategy({how!r}), loss=Act(1, stop))
            torch.save(model.module.state_dict(), f"{how}-{{me}}.pt")
            """
        )
        for cluster, how in zip(clusters, BOTH, strict=True)
    ]
    for _, stopped in both:
        stopped.says("now")
    for cluster, (chief, stopped) in zip(clusters, both, strict=True):
        words = f"worker 1 ({cluster.addresses[1]}) has not answered"
        in_time(chief.says(words), 6.5)
        stopped.signal(signal.SIGCONT)
    for cluster, everybody in zip(clusters, both, strict=True):
        end_well(everybody)
        assert f"worker 1 ({cluster.addresses[1]}) answers again" in everybody[0].err
    for how in BOTH:
        for i in range(2):
            assert distance(alone(), weights(tmp_path / f"{how}-{i}.pt")) < 1e-6


# --- torchrun ------------------------------------------------------------------------------------

TORCHRUN = """
import os
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import stratagem as sg
from tests.support import data, mlp

torch.set_num_threads(1)
strategy = sg.MirroredStrategy()
assert strategy.num_replicas_in_sync == 2
replica = sg.current_replica()
assert (replica.index, replica.count) == (int(os.environ["RANK"]), 2)
if sg.current_replica().is_chief:
    print("once")
x, y = data(100)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x, y), batch_size=32)
model, optimizer, loader = strategy.prepare(model, optimizer, loader)
for _ in range(2):
    for a, b in loader:
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert replica.share.examples in (16, 2) and replica.share.total in (32, 4)
torch.save(model.state_dict(), f"weights{os.environ['RANK']}.pt")
"""


@pytest.mark.slow
def test_own_loop_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCHRUN)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "train.py",
        ],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=80,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n"
    for i in range(2):
        assert distance(alone(), weights(tmp_path / f"weights{i}.pt")) < 1e-6
