"""Three hosts of network namespaces: a cable is pulled and put back, a worker dies and joins."""

from __future__ import annotations

import json
import os
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.host_jobs import HostJob
from tests.hosts import Hosts

SOURCE = """
import json, sys, time
import torch
import stratagem as sg
sys.path.insert(0, %(here)r)
from reliability import data
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
strategy = sg.MultiWorkerMirroredStrategy(elastic=True)
seen = 0

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


def between_hosts(expected: list[torch.Tensor], epochs: int, cut: float = 10.0) -> list[str]:
    """The rows of both faults; `expected` are the weights of one device after so many epochs."""
    rows = (f"a cut link of {cut:g} s, healed, 3 hosts", "joining, 3 hosts")
    if os.geteuid() != 0:
        return [f"| {row} | left out: network namespaces need root |" for row in rows]
    faults = [f"cut worker 1 at step 20 for {cut:g} s", "kill worker 2 at step 60"]
    faults.append("start worker 2 at step 61")
    source = SOURCE % {"here": str(Path(__file__).parent), "epochs": epochs}
    with Hosts(3) as hosts, HostJob(hosts, source, faults) as job:
        if any(job.ends(240)):
            raise AssertionError(f"the job did not survive: {job}")
        when = job.when
        named = job.said(0, "worker 1 (10.77.31.2:2222) has not answered", when["cut", 1])
        joined = job.said(0, "worker 2 (10.77.31.3:2222) joins", when["start", 2])
        lines = job.tasks[0][-1].lines
        ends = [moment for moment, line in lines if line.startswith("step ")]
        told = next(line for _, line in lines if line.startswith("weights = "))
    found = [torch.tensor(each, dtype=torch.float64) for each in json.loads(told[10:])]
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    after = next(end for end in ends if end > when["heal", 1]) - when["heal", 1]
    # what the step in which it joined took more than those of the two others before
    alone = [b - a for a, b in pairwise(ends) if when["kill", 2] < a and b < joined][1:]
    usual = statistics.median(alone)
    still = next(b - a for a, b in pairwise(ends) if b > joined) - usual
    return [
        f"| {rows[0]} | survived; named after {named - when['cut', 1]:.1f} s; the next step "
        f"{after:.1f} s after it healed; largest difference of a weight {worst:.1e} |",
        f"| {rows[1]} | the others stand still {still:.3f} s: so much more than a step before "
        f"({usual:.2f} s) takes the one in which it joins |",
    ]
