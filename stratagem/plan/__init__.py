"""The planner. `sg.plan(model, batch)` measures a model here, and predicts every strategy:

    plan(model, batch, *, loss=None, optimizer=None, link="10Gbit", latency="50us", hosts=8,
         gpus_per_host=None, most=None, memory=None, lossy=False)

    model             a compiled sg.Model or Keras model; or an nn.Module, with
    loss, optimizer   as sg.Model.compile takes them
    batch             (x, y), as many examples as one replica computes at once
    link, latency     between hosts, as "10Gbit" and "50us"
    hosts             how many there could be, of
    gpus_per_host     devices each (default: as many as this machine has)
    most              the largest number of replicas to look at
    memory            of each device, as "16GB" (default: what this machine has)
    lossy             also predict gradient compression, and say whether it pays

The result displays itself in a notebook; it has a `sentence`, `code` to paste, the `recommendation`
with its predicted numbers, and `save("plan.html")` or .json.

The package has the name of its main function, so the package is callable: `sg.plan(...)` works
whether `sg.plan` is the package or the function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from stratagem.plan.notebook import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _Package
