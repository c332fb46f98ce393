"""What a standby takes over from the chief in the midst of a step, beside its place in the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.streams import mixed, seed_torch, throw_beside_torch
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.steps import Replicated, Sliced, Step
from stratagem.state import change_tracker
from stratagem.state.change_tracker import AttributeTracker, Change, module_attributes
from stratagem.state.optimizer_recipe import group_settings


def possible(job: Fit, step: Step) -> bool:
    """Whether a replica that dies leaves nothing behind in a step but what the chief has, too."""
    arrays = job.source.in_memory and (job.validation is None or job.validation.in_memory)
    plain = type(step) in (Replicated, Sliced) and step.scaler is None
    whole = job.recipe.accumulate == 1 and not job.between_tests and job.settings.wire is None
    return job.journal is not None and arrays and plain and whole


class StepTraces:
    """On the chief, around steps 1, 2, 4, 8, ...: whether they write what no standby is told, which
    are attributes of the model, what a loss keeps, and settings of the optimizer's groups. Once one
    has, numbers among the attributes are put back when a step breaks off: it is done again."""

    def __init__(self, job: Fit) -> None:
        self._groups, self._steps = job.optimizer.param_groups, 0
        loss: Any = getattr(job.recipe.loss, "function", None)
        of_loss = isinstance(loss, nn.Module)
        self._buffers = list(loss.buffers()) if of_loss else []
        plain = [] if of_loss or not hasattr(loss, "__dict__") else [loss]
        trackers = [module_attributes(job.module), AttributeTracker(plain, nested=True)]
        self._attributes = [*trackers, *([module_attributes(loss)] if of_loss else [])]
        self._before: list[Any] | None = None
        self._kept: list[tuple[Sequence[Any], list[Change]]] = []
        self._found = False

    def before(self) -> None:
        """A step begins."""
        self._steps += 1
        self._before, self._kept = None, []
        if self._found or not self._steps & (self._steps - 1):
            for each in self._attributes:
                each.mark()
                self._kept.append((each.objects, each.everything()))
            self._before = self._look()

    def left(self) -> bool:
        """Whether the step, which is over, is the first that has written such things."""
        before, self._before, self._kept = self._before, None, []
        if before is None or self._found:
            return False
        changed = any(each.changes() for each in self._attributes)
        self._found = changed or before != self._look()
        return self._found

    def undo(self) -> None:
        """The step under way, if there is one, breaks off."""
        for objects, known in self._kept:
            change_tracker.adopt(objects, known)

    def _look(self) -> list[Any]:
        return [*map(_numbers, self._groups), *(buffer._version for buffer in self._buffers)]


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Tensors (a learning rate) by their values: they are written in place."""
    settings = group_settings(group).items()
    return {key: v.tolist() if isinstance(v, Tensor) else v for key, v in settings}


def of(job: Fit, step: Step) -> dict[str, Any]:
    """On the chief, from another thread, while a step waits for the one that has died."""
    assert job.journal is not None
    shared = isinstance(step, Sliced)
    params = [p for group in job.optimizer.param_groups for p in group["params"]]
    return {
        "parameters": [] if shared else [p.detach() for p in job.module.parameters()],
        "buffers": job.journal.buffers_of(job.module),
        "step": job.journal.step,
        "state": [] if shared else [dict(job.optimizer.state.get(p, {})) for p in params],
    }


@torch.no_grad()
def adopt(job: Fit, step: Step, told: dict[str, Any]) -> None:
    """In the standby: have what the chief has, and random numbers that nobody has drawn."""
    seed = mixed(torch.initial_seed(), 0, 1 + told["step"])
    seed_torch(seed)
    throw_beside_torch([f"{seed:016x}"] * 2, 0)
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
