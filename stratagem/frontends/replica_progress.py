"""The progress of replicas within an epoch, as a checkpoint saves it beside weights and optimizer.

The number of replicas may change between a checkpoint and the resumed training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.streams import generator_states, mixed, seed_beside_torch, seed_torch
from stratagem.frontends.apart import tell_late
from stratagem.frontends.epoch_sums import LossSum
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.steps import OneDevice, Replicated, Sliced
from stratagem.state import change_tracker
from stratagem.state.change_tracker import AttributeTracker, Change, module_attributes
from stratagem.state.optimizer_recipe import group_settings
from stratagem.state.optimizer_state import params_of, take_state
from stratagem.training import lossy_wire
from stratagem.training.lossy_wire import load_kept, rejoin
from stratagem.training.replica import Replica, alone
from stratagem.training.replica_state import own_of, own_state, set_random, take_buffers
from stratagem.wire.tree import broadcast_tree, gather_tree


def gathered(job: Fit, replica: Replica, step: OneDevice, tally: LossSum) -> dict[str, Any] | None:
    """Gather the progress of every replica, for the chief. Collective."""
    mine = {
        **own_state(replica, list(job.module.buffers())),
        "metrics": _counted(job, replica),
        "residuals": {} if step.keeper is None else step.keeper.state(),
    }
    everybody = gather_tree(replica.collective, mine) if replica.count > 1 else [mine]
    if not replica.is_chief:
        return None
    return {
        **data_progress(job, replica),
        "replicas": everybody,
        "tally": tally.state(),
        "scaler": None if step.scaler is None else step.scaler.state_dict(),
    }


def _counted(job: Fit, replica: Replica) -> dict[str, Any]:
    if job.journal is None or replica.is_chief:
        return job.recipe.metrics.progress()
    return {"classes": 0, "counted": [], "any": False}  # the chief has the counts of all replicas


def data_progress(job: Fit, replica: Replica) -> dict[str, Any]:
    """On the chief: return the state from which the data's order continues."""
    assert replica.streams is not None
    held = [] if job.validation is None else job.validation.dice()
    return {
        "seed": job.source.seed,
        "data": replica.streams.data.clone(),
        "pass": job.source.journal.begun,
        "dice": [each.get_state() for each in (*job.source.dice(), *held)],
    }


def go_on(
    job: Fit, replica: Replica, step: OneDevice, tally: LossSum, saved: dict[str, Any] | None
) -> None:
    """Continue from what `gathered` returned on the chief. Collective."""
    mine = saved and {name: value for name, value in saved.items() if name != "callbacks"}
    told = broadcast_tree(replica.collective, mine)
    if told["replicas"]:
        # if replicas may leave, each holds the counts of all
        one = replica if job.journal is None else alone(replica)
        job.recipe.metrics.go_on([each["metrics"] for each in told["replicas"]], one)
    if job.journal is not None:
        job.journal.go_on(job.recipe.metrics, replica, told)
    tally.load_state(told["tally"], replica.device)
    if step.scaler is not None and told["scaler"] is not None:
        step.scaler.load_state_dict(told["scaler"])
    if "updates" in told:  # resumed in the same processes after a failure
        if job.settings.sync is not None and job.journal is not None:
            hear = partial(job.journal.hear, job.recipe.metrics, replica)
            tell_late(lossy_wire.broken_round(), replica, tally, hear)
        rejoin(step.keeper, replica)
    load_kept(step.keeper, [each.get("residuals", {}) for each in told["replicas"]])
    own = own_of(told["replicas"], replica)
    if told["replicas"]:
        saved_buffers = [each["buffers"] for each in told["replicas"]]
        take_buffers(list(job.module.buffers()), saved_buffers, replica)
    job.callbacks.changes.mark()
    go_on_with_data(job, replica, told, own and own["random"])


def go_on_with_data(
    job: Fit, replica: Replica, told: Mapping[str, Any], random: dict[str, Any] | None
) -> None:
    """Make the next pass the rest of the saved one, in the same order."""
    source, dice = job.source, None
    if told["seed"] is not None:
        source.seed = int(told["seed"])
    if replica.is_chief:
        if replica.streams is not None:
            replica.streams.go_on(data=told["data"])
        held = [] if job.validation is None else job.validation.dice()
        dice = [*source.dice(), *held]
    then = partial(set_random, replica, random)
    begun = bool(told["batch"] or told.get("begun") or (source.once and told["step"]))
    source.journal.go_on(told, dice, then, begun=begun, persistent=source.seeds_once)


# --- what a standby takes over within a step ------------------------------------------------------


def possible(job: Fit, step: OneDevice) -> bool:
    """Return whether the chief has all state with which a standby can take over in a step."""
    arrays = job.source.in_memory and (job.validation is None or job.validation.in_memory)
    plain = type(step) in (Replicated, Sliced) and step.scaler is None
    whole = job.recipe.accumulate == 1 and not job.between_tests and job.settings.wire is None
    return job.journal is not None and arrays and plain and whole


class StepTraces:
    """Checks on the chief whether a step writes state that standbys do not receive.

    Such state is attributes of the model, state of the loss, and settings of the optimizer's
    groups. Steps 1, 2, 4, 8, ... are checked until one has written any. From then on, attributes
    are restored when a step breaks off, since it is repeated.
    """

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
        """Record the state before a step."""
        self._steps += 1
        self._before, self._kept = None, []
        if self._found or not self._steps & (self._steps - 1):
            for each in self._attributes:
                each.mark()
                self._kept.append((each.objects, each.everything()))
            self._before = self._look()

    def left(self) -> bool:
        """Return whether the finished step is the first that has written such state."""
        before, self._before, self._kept = self._before, None, []
        if before is None or self._found:
            return False
        changed = any(each.changes() for each in self._attributes)
        self._found = changed or before != self._look()
        return self._found

    def undo(self) -> None:
        """Restore the attributes after a step broke off."""
        for objects, known in self._kept:
            change_tracker.adopt(objects, known)

    def _look(self) -> list[Any]:
        return [*map(_numbers, self._groups), *(buffer._version for buffer in self._buffers)]


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, tensors (a learning rate) by value since they change in place."""
    settings = group_settings(group).items()
    return {key: v.tolist() if isinstance(v, Tensor) else v for key, v in settings}


def of(job: Fit, step: OneDevice) -> dict[str, Any]:
    """Return the chief's state, from another thread, while a step waits for the dead replica."""
    assert job.journal is not None
    shared = isinstance(step, Sliced)
    params = params_of(job.optimizer)
    return {
        "parameters": [] if shared else [p.detach() for p in job.module.parameters()],
        "buffers": job.journal.buffers_of(job.module),
        "step": job.journal.step,
        "state": [] if shared else [dict(job.optimizer.state.get(p, {})) for p in params],
    }


@torch.no_grad()
def adopt(job: Fit, step: OneDevice, told: dict[str, Any]) -> None:
    """In the standby: load the chief's state, and seed the rngs differently from all replicas."""
    seed = mixed(torch.initial_seed(), 0, 1 + told["step"])
    seed_torch(seed)
    seed_beside_torch([f"{seed:016x}"] * 2, 0)
    for buffer, value in zip(job.module.buffers(), told["buffers"], strict=True):
        buffer.copy_(value)
    if isinstance(step, Sliced):
        step.sliced.take_over()
        return
    for param, value in zip(job.module.parameters(), told["parameters"], strict=True):
        param.copy_(value)
    for owner, state in zip(params_of(job.optimizer), told["state"], strict=True):
        take_state(job.optimizer, owner, state)


# --- progress of a training with servers ----------------------------------------------------------
#
# Between two segments of an epoch every worker has reported, so the chief knows all progress. The
# other workers' random numbers (dropout) are not saved.


def gathered_from_workers(job: Fit, counted: Sequence[Any], loss: Sequence[Any]) -> dict[str, Any]:
    """Return the progress in the form of `gathered`, with each report as a replica."""
    held = [] if job.validation is None else job.validation.dice()
    tally = LossSum()
    tally.load_state({"sum": loss[0], "examples": loss[1], "losses": None, "totals": []})
    random = generator_states()
    return {
        "seed": job.source.seed,
        "data": torch.get_rng_state(),
        "pass": job.source.journal.begun,
        "dice": [each.get_state() for each in (*job.source.dice(), *held)],
        "replicas": [{"random": random, "metrics": each, "buffers": []} for each in counted],
        "tally": tally.state(),
        "scaler": None,
    }


def go_on_with_servers(job: Fit, replica: Replica, saved: dict[str, Any]) -> list[Any]:
    """As the chief: continue from a checkpoint of workers or replicas; return the loss so far."""
    chief, replicas = alone(replica), saved["replicas"]
    job.recipe.metrics.go_on([each["metrics"] for each in replicas], chief)
    take_buffers(list(job.module.buffers()), [each["buffers"] for each in replicas], chief)
    tally = LossSum()
    tally.load_state(saved["tally"])
    # the chief has one stream, for the data's order and for its own random numbers
    random = {**replicas[0]["random"], "torch": saved["data"]}
    go_on_with_data(job, chief, saved, random)
    return tally.total()
