"""Workers on hosts are cut off, stopped, killed and restarted during `fit`."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.clock import in_time
from tests.host_jobs import HostJob
from tests.hosts import Hosts, needs_hosts
from tests.strategies.test_elastic import net, rows

pytestmark = pytest.mark.timeout(240)

EPOCHS, STEPS = 25, 10
SOURCE = """
import json, time
import torch
import stratagem as sg
from tests.strategies.test_elastic import net, rows
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
strategy = sg.MultiWorkerMirroredStrategy(
    elastic=True, patience=sg.Patience(arrive=30, answer=%(answer)s))
x, y = rows()

class Say(sg.callbacks.Callback):
    epoch = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_batch_end(self, batch, logs=None):  # on the chief
        size = strategy.num_replicas_in_sync
        print(f"step {self.epoch * %(steps)d + batch + 1} of {size}", flush=True)
        time.sleep(0.01 if size == 3 else 0.15)  # those who are not here have time to come

def made(params):
    params = list(params)
    optimizer = torch.optim.Adam(params, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: print(
        "update", sum(float(p.detach().abs().sum()) for p in params), flush=True))
    return optimizer

torch.manual_seed(5)
with strategy.scope():
    model = sg.Model(net())
    model.compile(made, "cross_entropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=%(epochs)d, verbose=0, callbacks=[Say()])
print("weights =", json.dumps([p.tolist() for p in model.module.parameters()]))
print("history =", json.dumps({k: history.history[k] for k in ("loss", "accuracy")}), flush=True)
"""


def source(answer: float) -> str:
    return SOURCE % {"answer": answer, "steps": STEPS, "epochs": EPOCHS}


@pytest.fixture(scope="module")
def expected() -> tuple[list[torch.Tensor], dict[str, Any], list[float]]:
    """The reference: one device without a fault."""
    totals: list[float] = []

    class Say(sg.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            parameters = model.module.parameters()
            totals.append(sum(float(p.detach().abs().sum()) for p in parameters))

    torch.set_default_dtype(torch.float64)
    try:
        with closing(sg.MirroredStrategy(["cpu:0"])) as one:
            torch.manual_seed(5)
            x, y = rows()
            with one.scope():
                model = sg.Model(net())
                model.compile(
                    lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"]
                )
            told = model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[Say()])
    finally:
        torch.set_default_dtype(torch.float32)
    return [p.detach() for p in model.module.parameters()], told.history, totals


def noted(job: HostJob, worker: int, name: str) -> Any:
    lines = [line for _, line in job.tasks[worker][-1].lines if line.startswith(f"{name} = ")]
    assert lines, f"no {name} of worker {worker}: {job}"
    return json.loads(lines[-1].partition(" = ")[2])


def check(job: HostJob, expected: Any) -> None:
    """Check that every worker has the weights and the history of one device.

    Every step of every worker led to weights of that training, so no worker trained alone.
    """
    weights, history, totals = expected
    for worker in job.tasks:
        for mine, theirs in zip(noted(job, worker, "weights"), weights, strict=True):
            assert torch.allclose(
                torch.tensor(mine, dtype=theirs.dtype), theirs, rtol=0, atol=1e-12
            )
        for task in job.tasks[worker]:
            lines = [line for _, line in task.lines if line.startswith("update ")]
            assert lines, str(job)
            for total in (float(line.split()[1]) for line in lines):
                nearest = min(totals, key=lambda each: abs(each - total))
                assert total == pytest.approx(nearest, rel=1e-10), (worker, total)
    for name, values in noted(job, 0, "history").items():
        assert values == pytest.approx(history[name], abs=1e-12), name


def sizes(job: HostJob, since: float, until: float) -> set[str]:
    """Return the numbers of replicas with which the chief finished steps."""
    lines = [line for when, line in job.tasks[0][-1].lines if since < when < until]
    return {line.rpartition(" ")[2] for line in lines if line.startswith("step")}


@needs_hosts
def test_cut_off_and_back_then_killed_and_started_again(expected: Any) -> None:
    faults = [
        "cut worker 1 at step 20 for 7 s",
        "kill worker 2 at step 100",
        "start worker 2 at step 101",
    ]
    with Hosts(3) as hosts, HostJob(hosts, source(answer=4), faults) as job:
        assert job.ends(180) == [0, 0, 0], str(job)
        cut, healed = job.when["cut", 1], job.when["heal", 1]
        in_time(job.said(0, "worker 1 (10.77.31.2:2222) has not answered", cut) - cut, 4.0)
        joined = job.said(0, "worker 1 (10.77.31.2:2222) joins the job", healed)
        in_time(joined - healed, 5.0)
        assert sizes(job, cut + 5, joined) == {"2"}, "the others go on"
        alone = [w for w, line in job.tasks[1][-1].lines if line.startswith("update")]
        assert not [w for w in alone if cut + 0.5 < w < joined], "who is cut off does not train"
        killed = job.when["kill", 2]
        assert sizes(job, killed + 2, job.when["start", 2] + 3) == {"2"}
        back = job.said(0, "worker 2 (10.77.31.3:2222) joins the job", killed)
        assert sizes(job, back + 2, back + 3) <= {"3"}
        check(job, expected)


SCRIPTS = {
    "the chief's own host": ["cut worker 0 at step 20 for 7 s"],
    "two at once": ["cut worker 1 at step 20 for 7 s", "cut worker 2 at step 20 for 7 s"],
    "stopped": ["stop worker 1 at step 20 for 7 s", "stop worker 2 at step 40 for 2 s"],
    "killed while another is cut off": [
        "cut worker 1 at step 20 for 7 s",
        "kill worker 2 at step 20",
        "start worker 2 at step 22",
    ],
}


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_other_bad_days(script: str, expected: Any) -> None:
    with Hosts(3) as hosts, HostJob(hosts, source(answer=4), SCRIPTS[script]) as job:
        assert job.ends(180) == [0, 0, 0], str(job)
        check(job, expected)


@needs_hosts
@pytest.mark.slow
def test_who_is_cut_off_for_good_ends_and_names_the_chief(expected: Any) -> None:
    """It is restarted when the link is back."""
    faults = ["cut worker 1 at step 20 for 24 s", "start worker 1 at step 120"]
    with Hosts(3) as hosts, HostJob(hosts, source(answer=4), faults) as job:
        assert job.ends(180) == [0, 0, 0], str(job)
        lost = job.tasks[1][0]
        assert lost.process.wait(10) == 1, str(job)
        assert any("ReplicaStalled: worker 0 (10.77.31.1:2222)" in line for _, line in lost.lines)
        check(job, expected)


@needs_hosts
@pytest.mark.slow
def test_a_cut_shorter_than_patience_costs_nobody_a_place(expected: Any) -> None:
    """The worker is named within 3 s; when the link is back, the same step goes on."""
    faults = ["cut worker 1 at step 20 for 5 s", "stop worker 2 at step 60 for 5 s"]
    with Hosts(3) as hosts, HostJob(hosts, source(answer=60), faults) as job:
        assert job.ends(180) == [0, 0, 0], str(job)
        for verb, worker in (("cut", 1), ("stop", 2)):
            when = job.when[verb, worker]
            in_time(job.said(0, f"worker {worker} (10.77.31.{worker + 1}", when) - when, 4.0)
        assert sizes(job, 0.0, float("inf")) == {"3"}
        check(job, expected)
