"""Requests to the coordinator, about the training as a whole; leaving.py has two more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.cluster.failure import failed
from stratagem.errors import ReplicaLost
from stratagem.rules.tickets import Push
from stratagem.servers.coordinator import Answer, Coordinator
from stratagem.servers.leaving import nobody_works, refuse_half_done
from stratagem.servers.participants import Epoch, Participant
from stratagem.servers.requests import CHIEF, MEMBER, WORKER, Number, Peer, request, tree
from stratagem.servers.shard_requests import gradient
from stratagem.wire.tcp import Frame
from stratagem.wire.tree import TREE_LIMIT

request("abandon", MEMBER, serial=int)(Coordinator.abandon)
request("skip", MEMBER, serial=int)(Coordinator.skip)


# --- a fit ----------------------------------------------------------------------------------


@request("clear", CHIEF)
def clear(coordinator: Coordinator, peer: Peer) -> None:
    """Prepare another fit: wait until the workers of the last one have its values."""
    with coordinator.changed:
        coordinator.running = False
        if peer.participant is not None:
            coordinator.leave(peer.participant)
        coordinator.changed.notify_all()
        while coordinator.participants.awake:
            coordinator.check()
            coordinator.changed.wait(0.5)
        coordinator.check()
        if coordinator.plan is not None:
            coordinator.commands.ask(["flush"])


@request("hold", CHIEF, backups=int)
def hold(coordinator: Coordinator, peer: Peer, backups: int) -> None:
    """Have `backups` other servers hold each shard from the next fit on."""
    assert coordinator.holders is not None
    with coordinator.changed:
        coordinator.check()
        coordinator.holders.cover(backups)


@request("holders", WORKER, generation=int, lost=list)
def holders(
    coordinator: Coordinator, peer: Peer, generation: int, lost: list[int]
) -> dict[str, Any]:
    """Return which servers hold which shards, to a worker that knows those of `generation` and does
    not reach those in `lost` any more."""
    assert coordinator.holders is not None
    with coordinator.changed:
        coordinator.check()
        coordinator.holders.agreed(generation, lost)
        coordinator.check()
        found = coordinator.holders
        return {"generation": found.generation, "table": found.table(), "since": found.since}


@request("begin", CHIEF, body=tree, fit=int)
def begin(coordinator: Coordinator, peer: Peer, fit: int, body: Tensor) -> None:
    """Begin a fit; `body` is sent to the other workers."""
    coordinator.open(fit, coordinator.shard.training(), body)


@request("enter", WORKER, fit=int)
def enter(coordinator: Coordinator, peer: Peer, fit: int) -> Answer:
    """Wait for a fit to begin; return its plan."""
    with coordinator.changed:
        while coordinator.fit < fit:
            coordinator.check()
            if coordinator.closed:
                raise ReplicaLost(
                    f"the chief has ended after {coordinator.fit + 1} trainings, and this is "
                    "another; run the same script on every task.",
                    "chief",
                )
            coordinator.changed.wait(0.5)
        coordinator.check()
        if coordinator.fit > fit:
            return {"over": True}, []  # its values are gone
        assert coordinator.plan is not None
        return {"plan": coordinator.plan.to_json()}, [coordinator.beside]


@request("join", WORKER, fit=int)
def join(coordinator: Coordinator, peer: Peer, fit: int) -> Answer:
    """Take part in a fit, replacing an earlier process in this worker's place."""
    peer.participant = Participant(
        peer.worker, peer.name, peer.token, peer.offer, fit, chief=peer.chief
    )
    with coordinator.changed:
        before = coordinator.participants.here.get(peer.worker)
        answer = coordinator.join(peer.participant)
    if before is not None and before.placement != peer.token:
        coordinator.dismiss(
            before.placement,
            ReplicaLost(
                f"another process has taken the place of {peer.name}, and this one counts no "
                "more. Has it been started twice?",
                peer.name,
            ),
        )
    return answer


@request("leave", WORKER)
def leave(coordinator: Coordinator, peer: Peer) -> None:
    """Leave the fit; the process may come for the next one."""
    if peer.participant is not None:
        coordinator.leave(peer.participant)


@request("retire", MEMBER)
def retire(coordinator: Coordinator, participant: Participant) -> Answer:
    """Take no more tickets, and wait for the end of the fit."""
    with coordinator.changed:
        if (ledger := coordinator.ledger_of(participant)) is not None:
            coordinator.participants.retired.add(participant)
            ledger.leave(participant.worker)
            coordinator.settle()
            coordinator.changed.notify_all()
        while coordinator.ledger_of(participant) is not None:
            coordinator.changed.wait(0.5)
        return coordinator.final_answer(participant)


@request("finish", CHIEF, body=tree)
def finish(coordinator: Coordinator, peer: Peer | None, body: Tensor) -> None:
    """End the fit; `body` is sent to the other workers.

    In step it ends after the batch that the chief has done its part of.
    """
    chief = None if peer is None else peer.participant
    with coordinator.changed:
        while coordinator.in_step and coordinator.running and coordinator.open_ledger().states.kept:
            ledger = coordinator.open_ledger()
            refuse_half_done(ledger, idle=nobody_works(coordinator, ledger, chief))
            coordinator.changed.wait(0.5)
        if coordinator.in_step and coordinator.running:
            refuse_half_done(coordinator.open_ledger())
        coordinator.running, coordinator.told = False, body
        coordinator.changed.notify_all()


@request("failed", WORKER, text=str, refusal=str)
def fail(coordinator: Coordinator, peer: Peer, text: str, refusal: str) -> None:
    """End the job: a worker has raised an exception."""
    coordinator.end_job(failed(peer.name, text, refusal))


# --- an epoch -------------------------------------------------------------------------------


def payloads(_: Any, peer: Peer, frame: Frame) -> Sequence[Tensor]:
    """Read the tickets' examples, one block for each."""
    if not frame.size:
        return ()
    return torch.split(peer.connection.read(TREE_LIMIT), frame.header["sizes"])


@request("deal", CHIEF, body=payloads, epoch=int, first=int, runs=list, last=bool)
def deal(
    coordinator: Coordinator,
    peer: Peer | None,
    epoch: int,
    first: int,
    runs: Sequence[Sequence[int]],
    last: bool,
    body: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Deal batches from number `first` on; `runs` of (count, parts of each batch)."""
    with coordinator.changed:
        ledger, participants = coordinator.open_ledger(), coordinator.participants
        if epoch > coordinator.epoch.number:
            coordinator.epoch = Epoch(epoch)
            ledger.open_epoch()
            if coordinator.in_step:
                refuse_half_done(ledger)
                for worker in list(participants.left_loop):  # each has a part of every batch
                    participants.come_back(ledger, worker)
        blocks = iter(body)
        for count, parts in runs:
            for _ in range(count):
                serial = ledger.deal(first, parts)
                for part in range(parts if body else 0):
                    coordinator.epoch.payloads[serial + part] = next(blocks)
                first += 1
        if last:
            coordinator.epoch.dealt = True
            ledger.close_epoch()
            coordinator.settle()
        coordinator.changed.notify_all()
        return {"left": len(ledger.states.queue)}


@request("next", MEMBER, epoch=int, have=int, low=int | None, strict=bool | None)
def next_ticket(
    coordinator: Coordinator,
    participant: Participant,
    epoch: int,
    have: int,
    low: int | None,
    strict: bool | None,
) -> Answer:
    """Wait for a ticket, which comes with the newest values, or for the end of the epoch or fit.

    `epoch` is the last one that the worker has finished; `strict`: it wants work of exactly the
    next, which is answered as over if the chief has gone on.
    """
    with coordinator.changed:
        begun = coordinator.clock()
        while _gathering(coordinator, participant):
            coordinator.changed.wait(0.5)
        coordinator.participants.log_missing(coordinator.clock())
        try:
            while True:
                answer = coordinator.offer(participant, epoch, have, low, begun, bool(strict))
                if answer is not None:
                    return answer
                coordinator.waiting[participant] = begun
                coordinator.changed.wait(0.5)
        finally:
            coordinator.waiting.pop(participant, None)


def _gathering(coordinator: Coordinator, participant: Participant) -> bool:
    """Return whether a training in step has just begun and an expected worker has not come.

    Otherwise the first worker would do all parts, with several steps per update.
    """
    counts = coordinator.ledger_of(participant) is not None
    return (
        counts
        and coordinator.in_step
        and coordinator.participants.on_the_way(coordinator.clock(), coordinator.alive)
    )


@request(
    "push",
    MEMBER,
    body=gradient,
    serial=int,
    version=int,
    weight=Number,
    notes=list,
    used=list | None,
    settings=list | None,
    next=list | None,
    strict=bool | None,
    holders=int | None,
    lost=list | None,
)
def push(
    coordinator: Coordinator,
    participant: Participant,
    body: None,
    *,
    serial: int,
    version: int,
    weight: float,
    **told: Any,
) -> Answer:
    """Decide on a gradient, which has come with this request or before."""
    made = Push(participant.worker, serial, version, float(weight))
    return coordinator.push(participant, made, **told)


# --- what is known of the training ----------------------------------------------------------


@request("settings", WORKER, groups=list)
def settings(coordinator: Coordinator, peer: Peer, groups: list[dict[str, Any]]) -> None:
    """Change the settings of the servers' optimizers."""
    with coordinator.changed:
        coordinator.open_ledger()
        coordinator.commands.give(["settings", groups])


@request("snapshot", WORKER, number=int)
def snapshot(coordinator: Coordinator, peer: Peer, number: int) -> dict[str, Any]:
    """Have every server keep a snapshot; return the order to wait for."""
    with coordinator.changed:
        coordinator.check()
        coordinator.commands.give(["snapshot", number])
        return {"after": coordinator.commands.given}


@request("report", MEMBER, body=tree, epoch=int)
def report(coordinator: Coordinator, participant: Participant, epoch: int, body: Tensor) -> None:
    """Keep a worker's report on an epoch."""
    with coordinator.changed:
        counts = coordinator.ledger_of(participant) is not None
        if counts and epoch == coordinator.epoch.number:
            coordinator.epoch.reports[participant.worker] = body
            coordinator.changed.notify_all()


@request("gather", CHIEF)
def gather(coordinator: Coordinator, peer: Peer) -> Answer:
    """Return all reports of the epoch, once all workers that are heard have reported."""
    with coordinator.changed:
        reports = coordinator.epoch.reports
        while any(
            not each.silent and each.worker not in reports
            for each in coordinator.participants.working()
        ):
            coordinator.check()
            coordinator.changed.wait(0.5)
        coordinator.check()
        trees = [reports[worker] for worker in sorted(reports)]
        return {"sizes": [each.numel() for each in trees], **so_far(coordinator, peer)}, trees


@request("set means", CHIEF, body=tree, epoch=int)
def set_means(coordinator: Coordinator, peer: Peer, epoch: int, body: Tensor) -> None:
    """Keep the means that the chief has made of the reports."""
    with coordinator.changed:
        coordinator.means = epoch, body
        coordinator.changed.notify_all()


@request("means", MEMBER, epoch=int)
def means(coordinator: Coordinator, participant: Participant, epoch: int) -> Answer:
    """Wait for the means of an epoch; the answer is empty if there are none.

    Those of the last epoch stay until another fit begins: the chief may have ended this one.
    """
    with coordinator.changed:
        while True:
            counts, found = coordinator.ledger_of(participant) is not None, coordinator.means
            if found is not None and found[0] >= epoch and participant.fit == coordinator.fit:
                return {}, [found[1]]
            if not counts or coordinator.epoch.number > epoch:
                return {}, []
            coordinator.changed.wait(0.5)


@request("so far", WORKER)
def so_far(coordinator: Coordinator, peer: Peer) -> dict[str, Any]:
    """Return the summed loss of the epoch's updates, and its number of examples."""
    with coordinator.changed:
        tally = coordinator.epoch.tally
        return {"loss": tally.total, "examples": tally.examples}


@request("stats", WORKER)
def stats(coordinator: Coordinator, peer: Peer) -> dict[str, Any]:
    """Return the ledger's statistics; None before the first training."""
    with coordinator.changed:
        ledger = coordinator.ledger
        return {"stats": None if ledger is None else ledger.recorder.stats().to_json()}
