"""Three hosts of network namespaces: a cable is pulled and put back, a worker dies and joins."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.clock import wait_for
from tests.host_jobs import HostJob
from tests.hosts import Hosts

SOURCE = """
import json, sys, time
import torch
import stratagem as sg
sys.path.insert(0, %(here)r)
from reliability import data
from stratagem.frontends import replica_fit
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
strategy = sg.MultiWorkerMirroredStrategy(elastic=True)
seen, take_state = 0, replica_fit.take_state

def timed(*args):
    begun = time.monotonic()
    take_state(*args)
    print("state", begun, time.monotonic(), flush=True)

replica_fit.take_state = timed

class Say(sg.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        global seen
        seen += 1
        print("step", seen, flush=True)
        time.sleep(0.02 if strategy.num_replicas_in_sync == 3 else 0.1)

torch.manual_seed(0)
with strategy.scope(check=False):
    module = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    model = sg.Model(module)
    model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy")
x, y = data()
model.fit(x, y, batch_size=64, epochs=%(epochs)d, verbose=0, callbacks=[Say()])
print("weights =", json.dumps([p.tolist() for p in module.parameters()]), flush=True)
"""


_STEPS = 8  # an epoch
_ROOM = 200  # steps, of a tenth of a second each, in which a process may start and come


def between_hosts(
    compared: Callable[[list[torch.Tensor]], float], epochs: int, cut: float = 10.0, joins: int = 3
) -> list[str]:
    """The rows of both faults; `compared` tells how far weights are from those of one device after
    so many epochs. A worker dies and joins up to `joins` times, as long as the training lasts."""
    rows = (f"a cut link of {cut:g} s, healed, 3 hosts", "joining, 3 hosts")
    if os.geteuid() != 0:
        return [f"| {row} | left out: network namespaces need root |" for row in rows]
    source = SOURCE % {"here": str(Path(__file__).parent), "epochs": epochs}
    fault = f"cut worker 1 at step 20 for {cut:g} s"
    joinings = []
    with Hosts(3) as hosts, HostJob(hosts, source, [fault]) as job:
        begin = 60
        while not joinings or (len(joinings) < joins and begin + _ROOM < epochs * _STEPS):
            joinings.append(_join(job, begin))
            begin = len(_ends(job)) + 10
        if any(job.ends(240)):
            raise AssertionError(f"the job did not survive: {job}")
        when, ends = job.when, _ends(job)
        named = job.said(0, "worker 1 (10.77.31.2:2222) has not answered", when["cut", 1])
        lines = job.tasks[0][-1].lines
        told = next(line for _, line in lines if line.startswith("weights = "))
        transfers = _transfers(job)
    found = [torch.tensor(each, dtype=torch.float64) for each in json.loads(told[10:])]
    after = next(end for end in ends if end > when["heal", 1]) - when["heal", 1]
    both = [_still(ends, *each) for each in joinings]
    still, usual = [each[0] for each in both], statistics.median(each[1] for each in both)
    return [
        f"| {rows[0]} | survived; named after {named - when['cut', 1]:.1f} s; the next step "
        f"{after:.1f} s after it healed; largest difference of a weight {compared(found):.1e} |",
        f"| {rows[1]} | the others stand still {_several(still)}, of which the transfer of state "
        f"takes {_several(transfers)}: so much more than a step before ({usual:.2f} s) takes the "
        "one in which it joins |",
    ]


def _join(job: HostJob, begin: int) -> tuple[float, float]:
    """Kill worker 2 after so many steps, and start it again; when it died, and when it joined."""
    wait_for(lambda: len(_ends(job)) >= begin, 120, f"for step {begin}: {job}")
    job.strike("kill", 2)
    steps = len(_ends(job))
    wait_for(lambda: len(_ends(job)) >= steps + 6, 60, f"for the others to go on: {job}")
    job.strike("start", 2)
    joined = job.said(0, "worker 2 (10.77.31.3:2222) joins", job.when["start", 2], 60.0)
    return job.when["kill", 2], joined


def _ends(job: HostJob) -> list[float]:
    """When each step of the chief was done."""
    return [when for when, line in list(job.tasks[0][-1].lines) if line.startswith("step ")]


def _still(ends: list[float], killed: float, joined: float) -> tuple[float, float]:
    """What the step in which it joined took more than those of the two others before, and what
    those took."""
    alone = [b - a for a, b in pairwise(ends) if killed < a and b < joined][1:]
    usual = statistics.median(alone)
    return next(b - a for a, b in pairwise(ends) if b > joined) - usual, usual


def _transfers(job: HostJob) -> list[float]:
    """From the moment at which the chief begins to tell the state until a newcomer has it."""
    begun = [begin for begin, _ in _states(job, 0, -1)]
    arrived = [_states(job, 2, life)[0][1] for life in range(1, len(job.tasks[2]))]
    return [end - max(begin for begin in begun if begin < end) for end in arrived]


def _states(job: HostJob, worker: int, life: int) -> list[tuple[float, float]]:
    lines = [line for _, line in job.tasks[worker][life].lines if line.startswith("state ")]
    return [(float(begin), float(end)) for _, begin, end in map(str.split, lines)]


def _several(seconds: list[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.3f} s"
    return (
        f"{statistics.median(seconds):.3f} s (median of {len(seconds)}; {min(seconds):.3f} to "
        f"{max(seconds):.3f})"
    )
