"""What a standby takes over from the chief in the midst of a step, beside its place in the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem.frontends.fit_job import Fit
from stratagem.frontends.steps import Replicated, Sliced, Step


def possible(job: Fit, step: Step) -> bool:
    """Whether a replica that dies leaves nothing behind in a step but what the chief has, too."""
    arrays = job.source.in_memory and (job.validation is None or job.validation.in_memory)
    plain = type(step) in (Replicated, Sliced) and step.scaler is None
    whole = job.recipe.accumulate == 1 and not job.between_tests and job.settings.wire is None
    return job.journal is not None and arrays and plain and whole


def of(job: Fit, step: Step) -> dict[str, Any]:
    """On the chief, from another thread, while a step waits for the one that has died."""
    assert job.journal is not None
    shared = isinstance(step, Sliced)
    params = [p for group in job.optimizer.param_groups for p in group["params"]]
    return {
        "parameters": [] if shared else [p.detach() for p in job.module.parameters()],
        "buffers": job.journal.buffers_of(job.module),
        "state": [] if shared else [dict(job.optimizer.state.get(p, {})) for p in params],
    }


@torch.no_grad()
def adopt(job: Fit, step: Step, told: dict[str, Any]) -> None:
    """In the standby: have what the chief has."""
    for buffer, value in zip(job.module.buffers(), told["buffers"], strict=True):
        buffer.copy_(value)
    if isinstance(step, Sliced):
        step.sliced.take_over()
        return
    for param, value in zip(job.module.parameters(), told["parameters"], strict=True):
        param.copy_(value)
    params = [p for group in job.optimizer.param_groups for p in group["params"]]
    for param, state in zip(params, told["state"], strict=True):
        job.optimizer.state[param] = {
            name: value.to(param.device) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
