"""One client per worker: every task of a TF_CONFIG cluster is a process of its own, on loopback.

A late, missing, killed or restarted task is named in the output of the others; the other tasks go
on or end with a reason, and all processes end by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clock import in_time, unless_late
from tests.ports import free_ports
from tests.replicas.scripts import ROOT, Nursery, Script, nursery, wait_for

pytestmark = pytest.mark.timeout(120)

SOON = 5.0  # seconds; the promise is 2, the rest is for a busy machine

HEAD = """
import json, os, signal, sys, time
import torch
import stratagem as sg
from tests.servers.fault_support import ROWS, balanced, count, mean

task = json.loads(os.environ["TF_CONFIG"])["task"]
me = task["type"], task["index"]
in_step, free = sg.Synchronous(), sg.Asynchronous()

def made(updates, **options):
    patience = sg.Patience(arrive=20, answer=options.pop("answer", 20))
    return sg.ParameterServerStrategy(updates=updates, patience=patience,
                                      partitioner=sg.FixedShards(2), **options)

class Tell(sg.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, flush=True)

def report(strategy, counts, epochs):
    stats = strategy.stats()
    print("counted =", json.dumps(bool((counts - epochs).abs().max() < 1e-3)))
    print("balanced =", json.dumps(balanced(stats) and not stats.buffered))
    print("applied =", json.dumps([stats.by_worker.get(i, {}).get("applied", 0) for i in (0, 1)]))

def explain(error):
    print("raised", type(error).__name__, "about", error.who, "::", error, flush=True)
    sys.exit(3)
"""

TRAIN = """
strategy = made({updates})
counts = count(strategy, {epochs}, pause={pause}, callbacks=[Tell()])
if me == ("worker", 0):
    report(strategy, counts, {epochs})
"""


def train(updates: str = "free", epochs: int = 3, pause: float = 0.005) -> str:
    return TRAIN.format(updates=updates, epochs=epochs, pause=pause)


class Cluster:
    """Tasks on ports of 127.0.0.1 that run the same script; the test starts each of them."""

    def __init__(self, scripts: Nursery, where: Path, workers: int = 2, ps: int = 2) -> None:
        ports = [f"127.0.0.1:{port}" for port in free_ports(workers + ps)]
        self.jobs = {"worker": ports[:workers], "ps": ports[workers:]}
        self._scripts, self._where, self._started = scripts, where, 0

    def environ(self, task: str) -> dict[str, str]:
        role, _, index = task.partition(" ")
        told = {"cluster": self.jobs, "task": {"type": role, "index": int(index)}}
        return {"TF_CONFIG": json.dumps(told)}

    def start(self, task: str, source: str) -> Script:
        self._started += 1
        name = f"{task.replace(' ', '')}-{self._started}"
        source = HEAD + textwrap.dedent(source)
        return self._scripts.start(self._where, source, name, **self.environ(task))

    def all(self, source: str, but: str = "") -> dict[str, Script]:
        tasks = [f"{role} {i}" for role, there in self.jobs.items() for i in range(len(there))]
        return {task: self.start(task, source) for task in tasks if task != but}


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


@pytest.fixture
def cluster(scripts: Nursery, tmp_path: Path) -> Cluster:
    return Cluster(scripts, tmp_path)


def went_well(chief: Script) -> None:
    assert chief.noted("counted") is True, chief
    assert chief.noted("balanced") is True, chief


def all_end(tasks: dict[str, Script], seconds: float = 40.0) -> None:
    until = time.monotonic() + seconds
    for task, script in tasks.items():
        code = script.ends(max(0.1, until - time.monotonic()))
        assert code == 0, f"{task}: {script}"


# --- as it should be -----------------------------------------------------------------------------


@pytest.mark.parametrize("updates", ["in_step", "free"])
def test_a_client_for_each_worker(cluster: Cluster, updates: str) -> None:
    """Both train, and all tasks end by themselves with success, ps tasks, too."""
    tasks = cluster.all(train(updates) + "print('still here', flush=True)")
    all_end(tasks)
    went_well(tasks["worker 0"])
    applied: Any = tasks["worker 0"].noted("applied")
    unless_late(min(applied) > 0, applied)
    for task, script in tasks.items():
        assert ("still here" in script.out) == task.startswith("worker")
        unless_late(script.err == "", script)  # that somebody is waited for, say


@pytest.mark.slow
def test_several_trainings_with_one_that_is_slow(cluster: Cluster) -> None:
    """The slow worker gets the last values of each, though the chief begins the next at once."""
    all_end(
        cluster.all("""
    from stratagem.servers.client import Client
    refresh = Client.refresh

    def slow(worker):
        time.sleep(0.3)
        refresh(worker)

    if me == ("worker", 1):
        Client.refresh = slow

    def loss(output, target):
        time.sleep(0.1 * (me == ("worker", 1)))  # late with what it has in hand at the end
        return output.mean()

    strategy = made(sg.Synchronous(spares=1))
    time.sleep(2 * (me == ("worker", 0)))  # who comes when all is over has missed it
    for _ in range(3):
        counts = count(strategy, 1, loss=loss)
        assert (counts == 1).all(), counts
    """)
    )


def test_a_strategy_that_its_function_forgets_says_goodbye_all_the_same(cluster: Cluster) -> None:
    """The strategy is garbage when the script ends; other tasks must not take that for a death."""
    all_end(
        cluster.all("""
    import gc

    def main():
        assert len(count(made(free), 1)) == ROWS

    main()
    gc.collect()
    time.sleep(0.5)
    """)
    )


def test_servers_without_user_code(cluster: Cluster) -> None:
    """`python -m stratagem.ps`."""
    serve = "from stratagem.ps import main\nsys.exit(main([]))"
    tasks = {task: cluster.start(task, serve) for task in ("ps 0", "ps 1")}
    tasks |= {task: cluster.start(task, train()) for task in ("worker 0", "worker 1")}
    all_end(tasks)
    went_well(tasks["worker 0"])


def test_a_server_that_waits_for_others_ends_when_it_is_told(cluster: Cluster) -> None:
    serve = "from stratagem.ps import main\nsys.exit(main([]))"
    task = cluster.start("ps 1", serve)
    host, _, port = cluster.jobs["ps"][1].partition(":")

    def listens() -> bool:
        with socket.socket() as made:
            return made.connect_ex((host, int(port))) == 0

    wait_for(listens, 40.0)
    os.kill(task.pid, signal.SIGTERM)
    assert task.ends(SOON) == -signal.SIGTERM


def test_sigterm_to_the_chief_ends_the_training_of_all(cluster: Cluster) -> None:
    """It saves, and the exit code says so: no script goes on as if the training were done."""
    source = """
    class End(sg.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            if batch == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    strategy = made(in_step)
    with strategy.scope():
        model = sg.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    x = torch.ones(4000, 2)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[End()], checkpoint="run")
    print("still here", flush=True)
    """
    tasks = cluster.all(source)
    for task in ("worker 0", "worker 1"):
        assert tasks[task].ends(40.0) == 75, tasks[task]
        assert "still here" not in tasks[task].out, tasks[task]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_under_the_launcher(tmp_path: Path) -> None:
    """`stratagem run --workers 2 --ps 1 train.py`."""
    (tmp_path / "train.py").write_text(HEAD + train("in_step", pause=0.02))
    done = subprocess.run(
        [sys.executable, "-m", "stratagem", "run", "--workers", "2", "--ps", "1", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done
    assert "counted = true" in done.stdout and "balanced = true" in done.stdout, done


@pytest.mark.slow
def test_the_launcher_starts_a_killed_server_again(tmp_path: Path) -> None:
    """Twice: each time the other server holds its shard and sends it back."""
    (tmp_path / "train.py").write_text(
        HEAD
        + """
import logging
from pathlib import Path

class Heard(logging.Handler):
    returns = 0
    def emit(self, record):
        print(record.getMessage(), file=sys.stderr)
        self.returns += "ps 1 is back" in record.getMessage()

heard = Heard()
logging.getLogger("stratagem").addHandler(heard)

class Kill(sg.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if me == ("worker", 0) and epoch in (1, 3):
            before, until = heard.returns, time.monotonic() + 45
            os.kill(int(Path("pid").read_text()), signal.SIGKILL)
            while heard.returns == before and time.monotonic() < until:
                time.sleep(0.05)

if me == ("ps", 1):
    Path("pid").write_text(str(os.getpid()))
strategy = made(in_step, backups=1)
counts = count(strategy, 6, callbacks=[Kill()])
if me == ("worker", 0):
    report(strategy, counts, 6)
"""
    )
    words = ["run", "--workers", "2", "--ps", "2", "--task-restarts", "5", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "stratagem", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done
    assert "counted = true" in done.stdout and "balanced = true" in done.stdout, done
    assert done.stderr.count("killed by SIGKILL") == 2, done
    assert done.stderr.count("[worker 0] ps 1 is back") == 2, done


UNLIKE = """
from torch.utils.data import DataLoader, TensorDataset, random_split
x = torch.arange(48.0).reshape(24, 2)
torch.manual_seed(me[1] * differs)
rows = random_split(TensorDataset(x, x.sum(1, keepdim=True)), [16, 8])[0]
net = torch.nn.Linear(2, 1)

def by_fit(strategy):
    model = sg.Model(net, strategy)
    model.compile("sgd", "mse")
    model.fit(DataLoader(rows, batch_size=4), verbose=0)

def by_hand(strategy):
    sgd = torch.optim.SGD(net.parameters(), lr=1e-4)
    prepared = strategy.prepare(net, sgd, DataLoader(rows, batch_size=4))
    for x, y in prepared.loader:
        sgd.zero_grad()
        torch.nn.functional.mse_loss(prepared.model(x), y).backward()
        sgd.step()

try:
    how(made(in_step))
except sg.StratagemError as error:
    print("told =", json.dumps(str(error)), flush=True)
    raise
"""


@pytest.mark.parametrize("how", [pytest.param("by_fit", marks=pytest.mark.slow), "by_hand"])
def test_workers_with_unlike_data_are_told(cluster: Cluster, how: str) -> None:
    """Tickets name rows, so workers with random splits of their own would read other data."""
    source = UNLIKE.replace("how(", f"{how}(")
    all_end(same := cluster.all(source.replace("differs", "0")))
    assert not any("told" in script.out for script in same.values())
    unlike = cluster.all(source.replace("differs", "1"))
    for task in ("worker 0", "worker 1"):
        unlike[task].ends(20)
        told = str(unlike[task].noted("told"))
        assert "worker 1" in told and "another subset for" in told, unlike[task]


# --- who comes late, or again --------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_is_missing_comes_late_dies_and_is_restarted(cluster: Cluster) -> None:
    """The chief begins without the worker, and goes on whatever happens to it."""
    source = train("free", epochs=20, pause=0.02)
    tasks = cluster.all(source, but="worker 1")
    chief = tasks["worker 0"]
    chief.says("epoch 0", 20)
    late = cluster.start("worker 1", source)
    time.sleep(1.0)
    late.signal(signal.SIGKILL)
    in_time(chief.says("worker 1 is gone"), SOON)
    assert chief.status is None
    tasks["worker 1"] = cluster.start("worker 1", source)
    all_end(tasks, 40)
    went_well(chief)
    applied: Any = chief.noted("applied")
    unless_late(applied[1] > 5, applied)


@pytest.mark.parametrize("memory", ["0", "1"])
def test_one_that_comes_when_all_is_over(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """A worker that joins after the training has the trained values."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", memory)
    source = """
    import pathlib
    counts = count(made(free), 2)
    print("all alike =", json.dumps(bool((counts - 2).abs().max() < 1e-3)), flush=True)
    while me == ("worker", 0) and not pathlib.Path("go").exists():
        time.sleep(0.05)
    """
    tasks = cluster.all(source, but="worker 1")
    tasks["worker 0"].says("all alike", 20)
    tasks["worker 1"] = cluster.start("worker 1", source)
    tasks["worker 1"].says("all alike", 20)
    (tmp_path / "go").touch()
    all_end(tasks)
    for worker in ("worker 0", "worker 1"):
        assert tasks[worker].noted("all alike") is True, tasks[worker]


@pytest.mark.slow
def test_another_takes_the_place_of_one_that_lives(cluster: Cluster) -> None:
    """The old process gets an error, and only it ends."""
    source = f"""
try:
    {textwrap.indent(train("free", epochs=10, pause=0.02).strip(), "    ").lstrip()}
except sg.ReplicaError as error:
    explain(error)
"""
    tasks = cluster.all(source)
    tasks["worker 0"].says("epoch 1", 20)
    first = tasks["worker 1"]
    tasks["worker 1"] = cluster.start("worker 1", source)
    assert first.ends(20) == 3
    assert "raised ReplicaLost about worker 1" in first.out, first
    all_end(tasks, 40)
    went_well(tasks["worker 0"])


@pytest.mark.slow
def test_one_that_sleeps_through_the_end_of_a_training(cluster: Cluster, tmp_path: Path) -> None:
    """Its gradient is ignored when it wakes, and it joins the next training."""
    tasks = cluster.all("""
    import pathlib
    def loss(output, target):
        if me == ("worker", 1) and not pathlib.Path("slept").exists():
            pathlib.Path("slept").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return output.mean()

    strategy = made(sg.Synchronous(spares=1))
    count(strategy, 3, pause=0.02, loss=loss)
    print("first", flush=True)
    while me == ("worker", 0) and not pathlib.Path("go").exists():
        time.sleep(0.05)
    counts = count(strategy, 3, pause=0.02)
    if me == ("worker", 0):
        report(strategy, counts, 3)
    """)
    tasks["worker 0"].says("first", 20)
    unless_late(
        "worker 1 has been silent" in tasks["worker 0"].err, "worker 1 came when all was over"
    )
    tasks["worker 1"].signal(signal.SIGCONT)
    tasks["worker 1"].says("first")
    (tmp_path / "go").touch()
    all_end(tasks)
    went_well(tasks["worker 0"])
    applied: Any = tasks["worker 0"].noted("applied")
    unless_late(applied[1] > 0, applied)


@pytest.mark.parametrize(
    "missing",
    [*(pytest.param(ps, marks=pytest.mark.slow) for ps in ("ps 0", "ps 1")), "worker 0"],
)
def test_who_is_missing_is_named(cluster: Cluster, missing: str) -> None:
    tasks = cluster.all(train(epochs=1), but=missing)
    name = "the chief" if missing == "worker 0" else missing
    in_time(tasks["worker 1"].says(f"waiting for {name}"), 6)
    tasks[missing] = cluster.start(missing, train(epochs=1))
    all_end(tasks)
    went_well(tasks["worker 0"])


@pytest.mark.slow
def test_a_chief_that_does_not_come_at_all(cluster: Cluster) -> None:
    tasks = cluster.all(
        """
    try:
        count(sg.ParameterServerStrategy(patience=sg.Patience(arrive=3)), 1)
    except sg.ReplicaError as error:
        explain(error)
    """,
        but="worker 0",
    )
    assert tasks["worker 1"].ends() == 3
    assert "raised ReplicaMissing about chief" in tasks["worker 1"].out, tasks
    for task in ("ps 0", "ps 1"):
        assert tasks[task].ends() == 1
        assert "the chief has not come" in tasks[task].err, tasks


# --- who dies ------------------------------------------------------------------------------------

CAUTIOUS = """
try:
    strategy = made(in_step, answer={answer})
    count(strategy, 4000, pause=0.01, callbacks=[Tell()], clip_norm=1e9)
except sg.ReplicaError as error:
    explain(error)
"""


def test_what_a_loop_has_caught_is_not_said_again_at_the_end(cluster: Cluster) -> None:
    """A server dies in a custom loop, and the script handles the error."""
    tasks = cluster.all("""
    from torch.utils.data import DataLoader, TensorDataset
    from tests.servers.fault_support import BATCH, Counter, by_one
    strategy = made(in_step)
    model = Counter(pause=0.01)
    model, optimizer, loader = strategy.prepare(
        model, by_one(model.parameters()), DataLoader(TensorDataset(torch.arange(ROWS)), BATCH))
    try:
        for epoch in range(4000):
            for (rows,) in loader:
                model(rows).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            print("epoch", epoch, flush=True)
    except sg.ReplicaLost as error:
        print("caught", error.who, flush=True)
    """)
    tasks["worker 0"].says("epoch 0", 20)
    tasks.pop("ps 1").signal(signal.SIGKILL)
    for task in ("worker 0", "worker 1"):
        assert tasks[task].ends() == 0, tasks[task]
        assert "caught ps 1" in tasks[task].out, tasks[task]
        assert "Traceback" not in tasks[task].err and "atexit" not in tasks[task].err, tasks[task]


@pytest.mark.parametrize("which", ["ps 0", "ps 1"])
def test_a_killed_server_is_named_everywhere(cluster: Cluster, which: str) -> None:
    tasks = cluster.all(CAUTIOUS.format(answer=20))
    tasks["worker 0"].says("epoch 0", 20)
    tasks.pop(which).signal(signal.SIGKILL)
    start = time.monotonic()
    for task, script in tasks.items():
        script.says(f"{which} is gone")
        assert script.ends() == (3 if "worker" in task else 1), script
        if "worker" in task:
            assert f"raised ReplicaLost about {which}" in script.out, script
            assert "Start the job again" in script.out, script
    in_time(time.monotonic() - start, SOON)


@pytest.mark.slow
def test_a_stopped_server_is_given_up(cluster: Cluster) -> None:
    tasks = cluster.all(CAUTIOUS.format(answer=4))
    tasks["worker 0"].says("epoch 0", 20)
    stopped = tasks.pop("ps 1")
    stopped.signal(signal.SIGSTOP)
    start = time.monotonic()
    in_time(tasks["worker 0"].says("ps 1 has been silent"), 6.5)
    for task, script in tasks.items():
        assert script.ends() == (3 if "worker" in task else 1), script
    # Which of its ends a worker hears of first is chance: that ps 1 is given up, or hung up on.
    assert "about ps 1" in tasks["worker 1"].out, tasks
    in_time(time.monotonic() - start, 4 + SOON)
    stopped.signal(signal.SIGCONT)
    assert stopped.ends() == 1, stopped


@pytest.mark.slow
def test_a_worker_that_stood_too_long_is_told(cluster: Cluster) -> None:
    """Other workers have computed its batches; when it wakes it ends with the reason."""
    source = """
try:
    strategy = made(free, answer=4)
    def loss(output, target):
        print("at work", flush=True)
        return output.mean()
    counts = count(strategy, 5, pause=0.02, loss=loss)
    if me == ("worker", 0):
        report(strategy, counts, 5)
except sg.ReplicaError as error:
    explain(error)
"""
    tasks = cluster.all(source)
    chief, stopped = tasks["worker 0"], tasks.pop("worker 1")
    stopped.says("at work", 20)
    stopped.signal(signal.SIGSTOP)
    in_time(chief.says("worker 1 has been silent"), 6.5)
    all_end(tasks, 40)
    went_well(chief)
    stopped.signal(signal.SIGCONT)
    assert stopped.ends() == 3
    assert "raised ReplicaStalled about worker 1" in stopped.out, stopped
    assert "given up" in stopped.out and "Start it again" in stopped.out, stopped


def test_a_killed_chief_is_named_everywhere(cluster: Cluster) -> None:
    tasks = cluster.all(CAUTIOUS.format(answer=20))
    chief = tasks.pop("worker 0")
    chief.says("epoch 0", 20)
    chief.signal(signal.SIGKILL)
    start = time.monotonic()
    for task, script in tasks.items():
        script.says("worker 0, the chief, is gone")
        assert script.ends() == (3 if "worker" in task else 1), script
    assert "raised ReplicaLost about worker 0" in tasks["worker 1"].out, tasks
    in_time(time.monotonic() - start, SOON)


@pytest.mark.parametrize("which", [0, 1])
def test_an_exception_reaches_the_others(cluster: Cluster, which: int) -> None:
    """The other tasks get its traceback; it is uncaught where it was raised."""
    tasks = cluster.all(f"""
class Mine(Exception):
    pass

def loss(output, target):
    if me == ("worker", {which}):
        raise Mine("a bad day")
    time.sleep(0.01)
    return output.mean()

try:
    strategy = made(in_step)
    count(strategy, 4000, loss=loss)
except sg.ReplicaError as error:
    explain(error)
""")
    other = tasks[f"worker {1 - which}"]
    assert other.ends(20) == 3
    assert f"raised ReplicaFailed about worker {which}" in other.out, other
    assert 'raise Mine("a bad day")' in other.out, other
    assert tasks[f"worker {which}"].ends() == 1
    assert "Mine: a bad day" in tasks[f"worker {which}"].err
    in_time(wait_for(lambda: {tasks[ps].status for ps in ("ps 0", "ps 1")} == {1}), SOON)


def test_ctrl_c_on_a_worker_and_on_the_chief(cluster: Cluster) -> None:
    """A worker that ends is not waited for; without the chief no task goes on."""
    tasks = cluster.all(CAUTIOUS.format(answer=20))
    chief, worker = tasks["worker 0"], tasks["worker 1"]
    chief.says("epoch 0", 20)
    worker.keyboard()
    in_time(wait_for(lambda: worker.status is not None), SOON)
    assert worker.status == -signal.SIGINT, worker
    in_time(chief.says("worker 1 is gone"), SOON)
    chief.says("epoch 3", 30)
    chief.keyboard()
    in_time(wait_for(lambda: chief.status is not None), SOON)
    assert chief.status == -signal.SIGINT, chief
    for server in (tasks["ps 0"], tasks["ps 1"]):
        assert server.ends() == 1
        assert "worker 0, the chief, is gone" in server.err, server
