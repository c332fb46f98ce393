"""Processes of a local cluster are killed, stopped or raise: the others go on, or say why not.

The processes are real. A model counts how often each row was applied, so that a lost or doubled
gradient shows under every rule.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import stratagem as sg
from stratagem.replicas import pipe_frames
from stratagem.replicas.zygote import ZygoteProcess
from stratagem.servers import local_cluster, server
from stratagem.servers.client import Assignment
from stratagem.servers.connections import Connections
from stratagem.servers.session import Session
from stratagem.training.settings import Served
from tests.clock import PATIENCE, in_time, unless_late
from tests.replicas.scripts import Nursery, family, nursery, runs, wait_for
from tests.servers.fault_support import (
    BATCH,
    ROWS,
    Counter,
    Killer,
    balanced,
    beside,
    by_one,
    count,
    local,
    ps_pids,
    shoot,
    worker_group_of,
    worker_pids,
)
from tests.servers.server_threads import ThreadedJob
from tests.support import by_hand, data, distance, mlp

pytestmark = pytest.mark.timeout(120)

PROMISED = 2.0  # seconds until a dead process is named
SOON = 5.0  # the same, with room for a busy machine
NAMED = 6.5  # seconds until a stopped process is named; the promise is 4
STEPS = ROWS // BATCH

RULES = {
    "in step": sg.Synchronous(),
    "with a spare": sg.Synchronous(spares=1),
    "free": sg.Asynchronous(),
}


@pytest.fixture
def made() -> Iterator[Callable[..., sg.ParameterServerStrategy]]:
    """Make local clusters that are closed with the test."""
    several: list[sg.ParameterServerStrategy] = []

    def make(**options: Any) -> sg.ParameterServerStrategy:
        several.append(local(**options))
        return several[-1]

    yield make
    for strategy in several:
        for pid in [*worker_pids(strategy), *ps_pids(strategy)]:
            shoot(pid, signal.SIGCONT)
        strategy.close()


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if re.search(words, record.getMessage())]


def works(strategy: sg.Strategy) -> bool:
    return bool((count(strategy, epochs=1) == 1).all())


class Until(sg.callbacks.Callback):
    """A callback that ends the training after an epoch once `stop` is set."""

    stop = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = self.stop


def applied(strategy: sg.ParameterServerStrategy) -> int:
    """Return how many gradients of worker 1 have been applied."""
    return strategy.stats().by_worker.get(1, {}).get("applied", 0)


# --- killed workers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "shared"),
    [
        ("in step", "1"),
        pytest.param("with a spare", "1", marks=pytest.mark.slow),
        pytest.param("free", "1", marks=pytest.mark.slow),
        ("free", "0"),
    ],
)
def test_workers_are_killed_at_any_moment(
    made: Any, rule: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of every epoch counts once, and statistics are consistent; over sockets, too."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    strategy = made(updates=RULES[rule])
    killer = Killer(strategy, seed=len(rule), least=0.0, most=0.4)
    with beside(killer):
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            counts = count(strategy, epochs=2, pause=0.002)
            assert torch.allclose(counts, torch.full_like(counts, 2.0), atol=1e-4), counts.unique()
            stats = strategy.stats()
            assert balanced(stats) and stats.buffered == 0, stats
            assert stats.updates == 2 * STEPS, stats
    unless_late(killer.kills >= 3, killer.kills)
    assert works(strategy)
    assert set(strategy.stats().by_worker) <= {0, 1, 2}


def test_in_step_the_answer_is_that_of_one_device(made: Any) -> None:
    """Kills change neither the updates nor their order."""
    strategy = made(updates=sg.Synchronous())
    x, y = data(300)

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01)

    with strategy.scope():
        model = sg.Model(mlp())
        model.compile(optimizer=adam, loss="cross_entropy", metrics=["accuracy"])
    killer = Killer(strategy, seed=5, least=0.05, most=0.3, limit=20)
    with beside(killer):
        history = model.fit(x, y, batch_size=30, epochs=20, shuffle=False, verbose=0).history
    unless_late(killer.kills >= 2, killer.kills)
    expected = by_hand(mlp(), adam, F.cross_entropy, x, y, batch=30, epochs=20)
    assert distance(model.module, expected) < 1e-5
    assert history["updates"] == [10.0] * 20


def test_one_that_was_killed_is_replaced_and_takes_part(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, over = made(workers=2, updates=sg.Asynchronous()), Until()
    assert works(strategy)
    (before,) = worker_pids(strategy)

    def kill(stop: threading.Event) -> None:
        wait_for(lambda: applied(strategy) > 3)
        shoot(before)
        in_time(wait_for(lambda: said(caplog, "worker 1 .*another takes its place")), SOON)
        known = applied(strategy)
        wait_for(lambda: applied(strategy) > known + 3)
        over.stop = True

    with beside(kill):
        counts = count(strategy, epochs=1000, pause=0.01, callbacks=[over])
    assert len(counts.unique()) == 1 and balanced(strategy.stats())
    assert said(caplog, "worker 1 is gone .*the others go on without it")
    assert worker_pids(strategy) != [before] and not runs(before)


def test_one_that_is_killed_between_two_trainings(made: Any) -> None:
    strategy = made(updates=sg.Synchronous())
    assert works(strategy)
    for pid in worker_pids(strategy):
        shoot(pid)
    assert works(strategy)
    assert strategy.run(lambda: sg.current_replica().index) == [0, 1, 2]


def test_one_that_ends_again_and_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced only a few times."""
    monkeypatch.setattr(local_cluster, "_IN_VAIN", 2)
    strategy = made(workers=2, ps=1)

    with pytest.raises(sg.ReplicaLost, match="worker 1 ended again and again") as caught:
        count(strategy, epochs=1000, loss=lambda output, target: end_on(1, output))
    assert caught.value.who == "worker 1"
    assert works(strategy)


def end_on(worker: int, output: Tensor) -> Tensor:
    if sg.current_replica().index == worker:
        os._exit(3)
    time.sleep(0.1)
    return output.mean()


@pytest.fixture
def job() -> Iterator[ThreadedJob]:
    made = ThreadedJob(2, workers=0)
    yield made
    made.close()


def take_part(job: ThreadedJob, index: int, rows: int = ROWS, spares: int = 0) -> Session:
    """Begin the session of a worker whose model counts rows."""
    counter = Counter(rows)
    served = Served(sg.Synchronous(spares), sg.FixedShards(2), workers=2, servers=2)
    return Session(job.client(index), counter, by_one(counter.parameters()), served)


def hand_in(session: Session, rows: Tensor) -> bool:
    work = session.worker.next()
    assert isinstance(work, Assignment)
    half = rows[work.ticket.part :: 2]
    session.module(half).mean().backward()
    return session.worker.push(work.ticket, float(len(half)), 0.0, len(half))


def test_a_worker_that_stays_longer_is_told_that_the_job_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server is called dead: they waited for the worker, and have ended."""
    monkeypatch.setattr(server, "LINGER", 0.2)
    job = ThreadedJob(2, workers=2)
    for each in job.servers:
        each.patience = sg.Patience(answer=0.2)
    chief, other = job.workers
    chief.close()
    for thread in job.threads:
        thread.join(PATIENCE)
    with pytest.raises(sg.ReplicaLost, match="the job is done"):
        other.stats()
    other.close(goodbye=False)
    assert not said(caplog, "is gone")


def test_a_worker_that_connects_while_the_job_ends_is_told(
    job: ThreadedJob, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chief, connect = job.client(0), Connections._call_on_coordinator

    def slowly(*args: Any) -> Any:
        chief.close()
        return connect(*args)

    monkeypatch.setattr(Connections, "_call_on_coordinator", slowly)
    late = job.client(1)
    assert late.stats() is None
    with pytest.raises(sg.ReplicaLost, match="the chief has ended after 0 trainings"):
        late.enter(0)
    late.close()
    assert not said(caplog, "is gone")


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_gradient_outlives_its_worker(
    job: ThreadedJob, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts on every server, though its worker died before all servers had read it.

    Another process has the worker's number by then, and its own gradient in shared memory.
    """
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    carry_out, slow = job.servers[1].shard.obey, threading.Event()

    def obey(order: Any) -> Any:
        if order[0] == "add":
            slow.wait(PATIENCE)
        return carry_out(order)

    monkeypatch.setattr(job.servers[1].shard, "obey", obey)
    chief, first = take_part(job, 0), take_part(job, 1)
    chief.worker.deal(1, 0, [(1, 2)], True)
    rows = torch.arange(BATCH)
    assert hand_in(first, rows)
    first.worker.close(goodbye=False)
    second = take_part(job, 1)
    second.module(torch.arange(ROWS)).sum().mul(7).backward()
    time.sleep(0.3)
    slow.set()
    assert hand_in(chief, rows)
    chief.end()
    counts = -chief.module.get_parameter("weight").detach()
    assert (counts[:BATCH] == 1).all() and (counts[BATCH:] == 0).all()
    for session in (second, chief):
        session.worker.close()


def test_one_that_does_not_read_holds_nobody_up(
    job: ThreadedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while values are sent to it; the servers do not wait for it."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    chief = take_part(job, 0, rows=500_000, spares=1)
    deaf = take_part(job, 1, rows=500_000, spares=1)
    chief.worker.deal(1, 0, [(4, 1)], True)
    deaf.worker.lines.write(0, {"t": "next", "epoch": 0, "have": -1, "low": None})
    wait_for(lambda: not job.servers[0].coordinator or job.servers[0].coordinator.ledger.holds(1))
    kept: list[bool] = []
    rest = threading.Thread(
        target=lambda: kept.extend(hand_in(chief, torch.arange(BATCH)) for _ in range(4)),
        daemon=True,
    )
    rest.start()
    rest.join(PATIENCE)
    deaf.worker.close(goodbye=False)
    assert kept == [True] * 4
    chief.end()
    chief.worker.close()


# --- stopped workers -----------------------------------------------------------------------------


class Stop:
    """A loss function in which one worker stops its own process once, and notes the time."""

    def __init__(self, note: Path, worker: int = 1) -> None:
        self.note, self.worker, self.step = note, worker, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        if sg.current_replica().index == self.worker and not self.note.exists() and self.step > 2:
            self.note.write_text(f"{os.getpid()} {time.time()}")
            os.kill(os.getpid(), signal.SIGSTOP)
        return output.mean()

    @property
    def when(self) -> float:
        return float(self.note.read_text().split()[1])

    @property
    def pid(self) -> int:
        return int(self.note.read_text().split()[0])


def test_a_stopped_worker_holds_nobody_up_who_has_a_spare(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training ends while it is still stopped; after many versions no buffer is full."""
    strategy = made(updates=sg.Synchronous(spares=1))
    stop = Stop(tmp_path / "note")
    counts = count(strategy, epochs=25, loss=stop)
    assert (counts == 25).all()
    unless_late(stop.note.exists(), "worker 1 came when all was over")
    assert balanced(strategy.stats()) and strategy.stats().updates == 25 * STEPS
    named = said(caplog, "worker 1 has been silent .*stopped")
    assert named
    in_time(named[0].created - stop.when, NAMED)
    in_time(time.time() - stop.when, 30)
    assert not runs(stop.pid), "it would have kept its place for ever"
    assert works(strategy)


@pytest.mark.slow
def test_without_a_spare_a_stopped_worker_is_waited_for(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = made(updates=sg.Synchronous())
    stop = Stop(tmp_path / "note")

    def wake(over: threading.Event) -> None:
        wait_for(lambda: said(caplog, "worker 1 has been silent"), 20)
        updates = strategy.stats().updates
        time.sleep(0.5)
        assert strategy.stats().updates == updates, "somebody went on"
        shoot(stop.pid, signal.SIGCONT)

    with beside(wake):
        counts = count(strategy, pause=0.02, loss=stop)  # slow enough that it gets its turn
    assert (counts == 2).all()
    in_time(said(caplog, "worker 1 has been silent")[0].created - stop.when, NAMED)
    assert not said(caplog, "another takes its place")
    assert strategy.stats().requeued == 0


def test_a_worker_that_stands_too_long_is_given_up(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other workers compute its batches, and a new process takes its place."""
    strategy = made(updates=sg.Asynchronous(), patience=sg.Patience(answer=4))
    stop = Stop(tmp_path / "note")
    counts = count(strategy, pause=0.02, loss=stop)  # slow enough that it gets its turn
    assert (counts == 2).all() and balanced(strategy.stats())
    unless_late(stop.note.exists(), "worker 1 came when all was over")
    given_up = said(caplog, "worker 1 has been silent for \\d+ s and is given up")
    assert given_up
    in_time(given_up[0].created - stop.when, 4 + SOON, least=3.5)
    assert said(caplog, "worker 1 does not answer any more; another takes its place")
    assert not runs(stop.pid)
    assert works(strategy)


# --- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_server_ends_the_training(made: Any, which: int) -> None:
    """The error names the server; the same strategy trains again with new processes."""
    strategy = made(updates=sg.Synchronous())
    fell: list[float] = []

    def kill(stop: threading.Event) -> None:
        wait_for(lambda: strategy.stats().updates > 5)
        fell.append(time.monotonic())
        shoot(ps_pids(strategy)[which])

    def named_after() -> float:
        assert works(strategy)
        everybody = [*worker_pids(strategy), *ps_pids(strategy)]
        words = f"ps {which} is gone.*Start the job again: .*resume=True"
        with pytest.raises(sg.ReplicaLost, match=words) as caught, beside(kill):
            count(strategy, epochs=1000, pause=0.01)
        seconds = time.monotonic() - fell[-1]
        assert caught.value.who == f"ps {which}"
        wait_for(lambda: not any(runs(pid) for pid in everybody))
        with pytest.raises(sg.UsageError, match=r"in a callback: .*\(ReplicaLost\)"):
            strategy.stats()  # no number: what there was went with the servers
        return seconds

    in_time(named_after(), PROMISED)
    assert works(strategy)


@pytest.mark.parametrize("rule", ["in step", pytest.param("free", marks=pytest.mark.slow)])
def test_the_death_of_the_helper_that_starts_the_others(made: Any, rule: str) -> None:
    """All servers and workers end at once, without replacement, and the zygote is named."""
    strategy = made(updates=RULES[rule])
    assert works(strategy)
    helper, fell = ZygoteProcess.get().pid, list[float]()

    def kill(stop: threading.Event) -> None:
        wait_for(lambda: strategy.stats().updates > 5)
        fell.append(time.monotonic())
        os.kill(helper, signal.SIGKILL)

    words = rf"^ps 0 ended because the helper process \(pid {helper}\).*killed by SIGKILL"
    with pytest.raises(sg.ReplicaLost, match=words) as caught, beside(kill):
        count(strategy, epochs=1000, pause=0.01)
    in_time(time.monotonic() - fell[0], PROMISED)
    assert caught.value.who == "ps 0"
    assert works(strategy)


def test_a_strategy_that_is_dropped_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """When the strategy is garbage collected, its processes end, and no death is logged."""
    strategy = local()
    assert works(strategy)
    everybody = [*worker_pids(strategy), *ps_pids(strategy)]
    assert len(everybody) > 2 and all(map(runs, everybody))
    del strategy
    gc.collect()
    in_time(wait_for(lambda: not any(map(runs, everybody))), 8.0)
    assert not said(caplog, "was killed|ended with|Traceback"), caplog.text
    unless_late(not said(caplog, "."), caplog.text)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_server_is_named_then_given_up(
    made: Any, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a thread that waits for the server holds the lock (clipping asks all servers)."""
    strategy = made(updates=sg.Synchronous(), patience=sg.Patience(answer=4.5))
    assert works(strategy)
    stopped: list[float] = []

    def halt(stop: threading.Event) -> None:
        wait_for(lambda: strategy.stats().updates > 5)
        stopped.append(time.time())
        shoot(ps_pids(strategy)[which], signal.SIGSTOP)

    with pytest.raises(sg.ReplicaStalled, match=f"ps {which} has") as caught, beside(halt):
        with strategy.scope():
            model = sg.Model(mlp())
            model.compile(optimizer="sgd", loss=slow_loss, clip_norm=0.1)
        x, y = data(600)
        model.fit(x, y, batch_size=6, epochs=1000, verbose=0)
    assert caught.value.who == f"ps {which}"
    in_time(time.time() - stopped[0], 4.5 + SOON)
    in_time(said(caplog, f"ps {which} has been silent")[0].created - stopped[0], NAMED)
    assert works(strategy)


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(0.005)
    return F.cross_entropy(output, target)


@pytest.mark.slow
def test_a_stopped_server_goes_on(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    strategy = made(updates=sg.Synchronous())
    assert works(strategy)

    def halt(stop: threading.Event) -> None:
        wait_for(lambda: strategy.stats().updates > 5)
        pid = ps_pids(strategy)[1]
        shoot(pid, signal.SIGSTOP)
        wait_for(lambda: said(caplog, "ps 1 has been silent"), 20)
        shoot(pid, signal.SIGCONT)

    with beside(halt):
        counts = count(strategy, epochs=6, pause=0.01)
    assert (counts == 6).all()


@pytest.mark.parametrize(
    ("which", "mistake", "where"),
    [
        (0, {"t": "deal", "epoch": 0, "first": 0, "runs": [7], "last": False}, "in deal"),
        (1, {"t": "snapshot taken", "number": 7, "after": 0}, "in snapshot"),
    ],
)
def test_a_mistake_of_a_server_ends_the_job_with_its_traceback(
    made: Any, monkeypatch: pytest.MonkeyPatch, which: int, mistake: dict[str, Any], where: str
) -> None:
    """No worker waits for an answer that never comes."""
    strategy = made()
    assert works(strategy)
    worker = worker_group_of(strategy).worker
    assert worker is not None
    whole = worker.next

    def ask(*args: Any, **options: Any) -> Any:
        worker.lines.call(which, mistake)
        return whole(*args, **options)

    monkeypatch.setattr(worker, "next", ask)
    with pytest.raises(sg.ReplicaFailed, match=f"ps {which} raised an exception") as caught:
        count(strategy)
    assert "Traceback" in str(caught.value) and where in str(caught.value)
    monkeypatch.undo()
    assert works(strategy)


# --- exceptions ----------------------------------------------------------------------------------


class Mine(Exception):
    """An exception that the user's code raises."""


def raise_on(worker: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if sg.current_replica().index == worker:
            raise Mine("a bad day", 7)
        time.sleep(0.01)
        return output.mean()

    return loss


@pytest.mark.parametrize("rule", RULES)
def test_an_exception_on_a_worker(made: Any, rule: str) -> None:
    strategy = made(ps=1, updates=RULES[rule])
    with pytest.raises(sg.ReplicaFailed, match=r"^worker 2 raised an exception") as caught:
        count(strategy, epochs=1000, loss=raise_on(2))
    assert caught.value.who == "worker 2"
    assert "raise Mine" in str(caught.value), "its own traceback is missing"
    assert works(strategy)


def test_an_exception_on_the_chief_is_its_own(made: Any) -> None:
    strategy = made()
    assert works(strategy)
    everybody = [*worker_pids(strategy), *ps_pids(strategy)]
    with pytest.raises(Mine, match="a bad day"):
        count(strategy, loss=raise_on(0))
    assert not any(runs(pid) for pid in everybody)
    assert works(strategy)


def test_a_forked_child_leaves_its_parents_workers_alone(made: Any) -> None:
    strategy = made()
    workers = strategy.run(os.getpid)

    def child() -> None:
        with pytest.raises(sg.UsageError, match=r"forked.*make a strategy in the child"):
            strategy.run(os.getpid)

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(PATIENCE)
    assert forked.exitcode == 0
    assert strategy.run(os.getpid) == workers


def test_each_worker_has_its_own_dice(made: Any) -> None:
    strategy = made()

    def seeded() -> list[float]:
        torch.manual_seed(7)
        return [float(each) for each in strategy.run(partial(torch.rand, ()))]

    first = seeded()
    assert len(set(first)) == 3 and seeded() == first
    torch.manual_seed(7)
    assert first[0] == float(torch.rand(()))


def test_the_model_is_the_users_own_after_a_failure(made: Any) -> None:
    """The model has no hook and no shared memory: any strategy can train it."""
    strategy = made(updates=sg.Synchronous(spares=1))
    with strategy.scope():
        model = sg.Model(mlp())
        model.compile(optimizer="sgd", loss=F.cross_entropy)
    x, y = data(64)

    class Fail(sg.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise Mine("a bad day")

    with pytest.raises(Mine):  # so many epochs that the chief is not always the last one
        model.fit(x, y, batch_size=8, epochs=50, verbose=0, callbacks=[Fail()])
    assert not any(p._post_accumulate_grad_hooks for p in model.module.parameters())
    F.cross_entropy(model.module(x), y).backward()
    model.fit(x, y, batch_size=8, verbose=0)
    assert balanced(strategy.stats())


# --- the script ----------------------------------------------------------------------------------

LONG = """
import os, time
import torch
import stratagem as sg
from tests.servers.fault_support import count, local

class Show(sg.callbacks.Callback):
    def __init__(self, round):
        self.round = round
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            print("in mid-fit", self.round, flush=True)

def fit(epochs, round):
    count(made, epochs, pause=0.01, callbacks=[Show(round)])

made = local(updates=sg.Synchronous())
"""


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


@pytest.mark.slow
def test_ctrl_c(scripts: Nursery, tmp_path: Path) -> None:
    """Caught, it leaves the strategy usable; uncaught, it ends all processes at once."""
    script = scripts.start(
        tmp_path,
        LONG
        + """
try:
    fit(4000, "one")
except KeyboardInterrupt:
    print("interrupted", flush=True)
fit(4000, "two")
""",
    )
    script.says("in mid-fit one", 40)
    before = family(script.pid)
    script.keyboard()
    in_time(script.says("interrupted"), SOON)
    script.says("in mid-fit two", 40)
    assert "Traceback" not in script.err and "gone" not in script.err, script
    everybody = family(script.pid)
    assert len(everybody) == 5, "a zygote, two workers, two servers"
    assert not set(before[1:]) & set(everybody), "one of the interrupted lives on"
    script.keyboard()
    in_time(wait_for(lambda: script.status is not None), SOON)
    assert script.status == -signal.SIGINT
    wait_for(lambda: not any(runs(pid) for pid in everybody), what="for the others to end")
    assert script.err.count("Interrupted in") == 1 and "Traceback" not in script.err, script


def test_a_question_to_the_zygote_that_was_cut_short(made: Any) -> None:
    """After Ctrl-C during the start of a child, the late answer is ignored."""
    strategy = made(workers=2, ps=1)
    request = json.dumps({"end": [], "number": 0}).encode()
    pipe_frames.send_with_fds(ZygoteProcess.get()._channel, request, [])
    assert works(strategy)


@pytest.mark.slow
def test_the_script_is_terminated_or_killed(scripts: Nursery, tmp_path: Path) -> None:
    numbers = signal.SIGTERM, signal.SIGKILL
    both = [scripts.start(tmp_path, LONG + "fit(4000, 'one')", str(int(n))) for n in numbers]
    for number, script in zip(numbers, both, strict=True):
        script.says("in mid-fit one", 40)
        everybody = family(script.pid)
        assert len(everybody) == 5
        script.signal(number)
        in_time(wait_for(lambda: script.status is not None), SOON)  # noqa: B023
        assert script.status == -number
        wait_for(lambda: not any(map(runs, everybody)), what="for the others to end")  # noqa: B023
        assert "Traceback" not in script.err, script


# --- nothing leaks -------------------------------------------------------------------------------


def trace(pid: int | str = "self") -> tuple[int, int, int]:
    """Count the open descriptors, threads and mapped segments of a process."""
    folder = Path(f"/proc/{pid}")
    segments = (folder / "maps").read_text().count("/memfd:")
    return len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")), segments


@pytest.mark.slow
def test_twenty_trainings_and_twenty_deaths_leave_nothing(made: Any) -> None:
    """Workers die between trainings and within one."""
    strategy, over = made(workers=2, updates=sg.Asynchronous()), Until()
    for _ in range(2):
        assert works(strategy)

    def traces() -> dict[str, tuple[int, int, int]]:
        gc.collect()
        servers = ps_pids(strategy)
        return {"chief": trace(), **{f"ps {i}": trace(pid) for i, pid in enumerate(servers)}}

    def kill(stop: threading.Event) -> None:
        wait_for(lambda: applied(strategy))
        for _ in range(6):
            known = applied(strategy)
            shoot(*worker_pids(strategy))
            wait_for(lambda: applied(strategy) > known)  # noqa: B023
        seen.append(traces())
        over.stop = True

    seen = [traces()]
    for _ in range(20):
        shoot(*worker_pids(strategy))
        count(strategy, epochs=1)
    time.sleep(0.3)
    seen.append(traces())
    with beside(kill):
        count(strategy, epochs=1000, pause=0.01, callbacks=[over])
    grown = [
        (after, name)
        for after in seen[1:]
        for name, before in seen[0].items()
        if any(b > a + 4 for a, b in zip(before, after[name], strict=True))
    ]
    unless_late(not grown, f"descriptors, threads and segments: {grown}; before: {seen[0]}")


def test_two_strategies_in_one_process(made: Any) -> None:
    """Each has its own servers; one trains while the other is idle, and while it trains."""
    one, two = made(workers=2, ps=1), made(workers=2, ps=1, updates=sg.Synchronous())
    assert works(one) and works(two) and works(one)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(works(two)))
    with one.scope():
        model = sg.Model(mlp())
        model.compile(optimizer="sgd", loss="cross_entropy")
    thread.start()
    thread.join()
    assert done == [True]
    two.close()
    assert works(one)
