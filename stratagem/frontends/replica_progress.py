"""How far replicas have come in an epoch, beside weights and optimizer: what a checkpoint has of
each of them, and how replicas go on from it, as many or others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from stratagem.frontends.apart import tell_late
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.loss_sum import LossSum
from stratagem.frontends.steps import Step
from stratagem.training import lossy_wire
from stratagem.training.lossy_wire import load_kept, rejoin
from stratagem.training.replica import Replica, alone
from stratagem.training.replica_state import own_of, own_state, set_random, take_buffers
from stratagem.wire.tree import broadcast_tree, gather_tree


def gathered(job: Fit, replica: Replica, step: Step, tally: LossSum) -> dict[str, Any] | None:
    """On the chief: what every replica has. Collective."""
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
    return {"classes": 0, "counted": [], "any": False}  # the chief has the counts of all


def data_progress(job: Fit, replica: Replica) -> dict[str, Any]:
    """On the chief: what the data's order goes on from."""
    assert replica.streams is not None
    held = [] if job.validation is None else job.validation.dice()
    return {
        "seed": job.source.seed,
        "data": replica.streams.data.clone(),
        "pass": job.source.journal.begun,
        "dice": [each.get_state() for each in (*job.source.dice(), *held)],
    }


def go_on(
    job: Fit, replica: Replica, step: Step, tally: LossSum, saved: dict[str, Any] | None
) -> None:
    """Go on from what `gathered` returned on the chief. Collective."""
    mine = saved and {name: value for name, value in saved.items() if name != "callbacks"}
    told = broadcast_tree(replica.collective, mine)
    if told["replicas"]:
        # where replicas may leave, each has the counts of all
        one = replica if job.journal is None else alone(replica)
        job.recipe.metrics.go_on([each["metrics"] for each in told["replicas"]], one)
    if job.journal is not None:
        job.journal.go_on(job.recipe.metrics, replica, told)
    tally.load_state(told["tally"], replica.device)
    if step.scaler is not None and told["scaler"] is not None:
        step.scaler.load_state_dict(told["scaler"])
    if "updates" in told:  # in the processes that it broke off in
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
    """Have the next pass be the rest of the one that was saved, in the same order."""
    source, batch = job.source, int(told["batch"])
    if told["seed"] is not None:
        source.seed = int(told["seed"])
    if replica.is_chief:
        if replica.streams is not None:
            replica.streams.go_on(data=told["data"])
        held = [] if job.validation is None else job.validation.dice()
        for dice, state in zip((*source.dice(), *held), told["dice"], strict=True):
            dice.set_state(state)
    then = partial(set_random, replica, random)
    begun = bool(batch) or bool(told.get("begun")) or (source.once and bool(told["step"]))
    source.journal.go_on(
        batch,
        told["pass"] if begun else None,
        then,
        earlier=int(told["step"]) - batch,
        seeded=source.seeds_once and not begun and bool(told["step"]),
    )
    if not begun:
        source.journal.then()  # callbacks may draw before the next epoch
