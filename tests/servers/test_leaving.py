"""A worker that leaves a training cleanly stays in the job; a dead or replaced worker does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.cluster.failure import failed, headline
from stratagem.servers import participants
from stratagem.servers.client import Assignment
from stratagem.servers.session import Session
from tests.clock import PATIENCE, in_time, unless_late, wait_for
from tests.replicas.scripts import family, nursery, runs
from tests.served_support import apart, digits, net
from tests.servers.fault_support import Counter, by_one
from tests.servers.server_threads import ThreadedJob

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


def test_a_worker_that_leaves_before_the_others_keeps_its_lines() -> None:
    """It ends its loop while the chief still trains, and joins the next training."""
    job = ThreadedJob(3, workers=2)
    try:
        for _ in range(2):
            chief, other = (
                job.begin(counter, by_one(counter.parameters()), worker=i)
                for i, counter in enumerate((Counter(12), Counter(12)))
            )
            other.end()
            chief.worker.snapshot()  # so every server has carried out what came before
            for server in range(3):
                assert not other.worker.lines.call(server, {"t": "settled", "after": 0}).header
            chief.end()
    finally:
        job.close()


def test_who_does_not_come_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(participants, "GATHERING", 0.1)
    monkeypatch.setattr(participants, "BUSY", 0.3)
    job = ThreadedJob(1, workers=3)
    try:
        chief, other = (
            job.begin(counter, by_one(counter.parameters()), worker=i, updates=sg.Synchronous())
            for i, counter in enumerate((Counter(12), Counter(12)))
        )
        chief.worker.deal(1, 0, [(1, 3)], True)
        for session in (other, chief):
            work = session.worker.next()
            assert isinstance(work, Assignment) and work.ticket.batch == 0
        said = [r.getMessage() for r in caplog.records if "without worker 2," in r.getMessage()]
        assert len(said) == 1
        other.end()
        chief.end()
    finally:
        job.close()


def test_who_is_busy_with_something_else_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process is alive, perhaps loading data: no other worker computes its part."""
    monkeypatch.setattr(participants, "GATHERING", 0.1)
    job = ThreadedJob(1, workers=2)

    def begin(worker: int) -> Session:
        counter = Counter(12)
        optimizer = by_one(counter.parameters())
        return job.begin(counter, optimizer, worker=worker, updates=sg.Synchronous())

    try:
        chief = begin(0)
        chief.worker.deal(1, 0, [(1, 2)], True)
        with ThreadPoolExecutor() as beside:
            first = beside.submit(chief.worker.next)
            until = time.monotonic() + 20
            while "waiting for worker 1, which lives" not in caplog.text:
                unless_late(time.monotonic() < until, "nobody was waited for")
                time.sleep(0.05)
            assert not first.done()
            other = begin(1)
            works = [first.result(PATIENCE), other.worker.next()]
        assert all(isinstance(work, Assignment) for work in works)
        assert {work.ticket.part for work in works if isinstance(work, Assignment)} == {0, 1}
        other.end()
        chief.end()
    finally:
        job.close()


def test_in_step_one_that_leaves_its_loop_after_the_chief_has_gone_on_waits_for_nobody() -> None:
    """The chief has begun the next epoch, in which it waits for this worker."""
    job = ThreadedJob(1, workers=2)
    try:
        chief, other = (
            job.begin(counter, by_one(counter.parameters()), worker=i, updates=sg.Synchronous())
            for i, counter in enumerate((Counter(12), Counter(12)))
        )

        def one_part(session: Any) -> None:
            work = session.worker.next()
            assert isinstance(work, Assignment)
            session.module(torch.arange(4)).mean().backward()
            assert session.worker.push(work.ticket, 4.0, 0.0, 4)
            session.forget_gradients()

        chief.worker.deal(1, 0, [(2, 2)], True)
        for session in (chief, other):
            session.worker.want(1)
        one_part(chief)
        one_part(other)
        chief.worker.leave_loop(1)
        chief.worker.deal(2, 0, [(1, 2)], True)
        chief.worker.want(2)
        one_part(chief)
        left = threading.Thread(target=other.worker.leave_loop, args=(1,), daemon=True)
        left.start()
        left.join(PATIENCE)
        assert not left.is_alive(), "it waits for itself"
        other.worker.want(2)
        one_part(other)
        other.end()
        chief.end()
    finally:
        job.close()


def loop(where: Any) -> Any:
    """Run a custom loop, in which worker 0 ends last."""
    x, y, _, _ = digits()
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x[:96], y[:96]), batch_size=32)
    if where is not None:
        model, optimizer, loader = where.prepare(model, optimizer, loader)
    for rows, labels in loader:
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    if where is not None and sg.current_replica().index == 0:
        time.sleep(0.2)
    return model


def test_one_loop_after_the_other() -> None:
    strategy = sg.ParameterServerStrategy(
        sg.LocalCluster(workers=2, ps=2), updates=sg.Synchronous()
    )
    try:
        alone = loop(None)
        for _ in range(4):
            for model in strategy.run(loop, strategy):
                assert apart(model, alone) < 1e-5
    finally:
        strategy.close()


SCRIPT = """
import torch
import stratagem as sg
from tests.served_support import apart, digits, net
from tests.servers.test_leaving import loop

torch.set_num_threads(1)
where = sg.ParameterServerStrategy(updates=sg.Synchronous(), devices="cpu:0")
x, y, _, _ = digits()
for _ in range(2):
    assert apart(loop(where), loop(None)) < 1e-5
    made = []
    for strategy in (where, None):
        one = sg.Model(net(), strategy)
        one.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
        one.fit(x[:96], y[:96], batch_size=32, shuffle=False, verbose=0)
        made.append(one.module)
    assert apart(*made) < 1e-5
print("as one device")
"""


def launched(where: Path, source: str) -> subprocess.CompletedProcess[str]:
    (where / "train.py").write_text(source)
    words = ["-m", "stratagem", "run", "--workers", "2", "--ps", "1", str(where / "train.py")]
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_fit_and_loop_in_turn_in_the_script_of_a_cluster(tmp_path: Path) -> None:
    done = launched(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as one device") == 2


UNCLOSED = """
import torch
import stratagem as sg

torch.set_num_threads(1)
torch.manual_seed(0)
servers = lambda rule: sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1), updates=rule)
kind, how = {kind!r}, {how!r}
strategy = (
    sg.MirroredStrategy(["cpu:0", "cpu:1"]) if kind == "mirrored"
    else sg.ParameterServerStrategy() if kind == "cluster"
    else servers(sg.Synchronous() if kind == "in step" else sg.Asynchronous())
)
if how == "loop":
    from tests.servers.test_leaving import loop
    strategy.run(loop, strategy)
else:
    model = sg.Model(torch.nn.Linear(64, 10), strategy)
    model.compile("sgd", "cross_entropy")
    model.fit(torch.randn(64, 64), torch.randint(0, 10, (64,)), batch_size=8, verbose=0)
print("trained")
"""


@pytest.mark.slow  # in `make test`: test_clients.py::test_a_client_for_each_worker
@pytest.mark.parametrize(
    ("kind", "how"), [("free", "fit"), ("in step", "loop"), ("free", "loop"), ("mirrored", "loop")]
)
def test_a_script_without_close_ends_without_a_word(kind: str, how: str, tmp_path: Path) -> None:
    """No worker is reported as gone."""
    script = nursery().start(tmp_path, UNCLOSED.format(kind=kind, how=how))
    try:
        script.says("trained")
        children = family(script.pid)
        assert script.ends() == 0, script
        assert (script.out, script.err) == ("trained\n", ""), script
        in_time(wait_for(lambda: not any(map(runs, children))), 8.0)
    finally:
        nursery().clear()


@pytest.mark.slow
def test_a_launched_script_without_close_ends_without_a_word(tmp_path: Path) -> None:
    done = launched(tmp_path, UNCLOSED.format(kind="cluster", how="fit"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gone" not in done.stderr and "died" not in done.stderr, done.stderr
    assert done.stdout.count("trained") == 2


def test_no_traceback_is_announced_where_there_is_none() -> None:
    assert "traceback" not in str(failed("worker 1", ""))
    assert headline(failed("worker 1", "Traceback: x")).endswith("the others were stopped.")
    assert "its output" in str(failed("worker 1", "  "))
    assert str(failed("worker 1", "Traceback: x")).endswith("Its traceback:\n\nTraceback: x")
