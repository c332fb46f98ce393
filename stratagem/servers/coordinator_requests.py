"""The coordinator's requests: about the training as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.cluster.failure import failed
from stratagem.errors import NotDistributable, ReplicaLost
from stratagem.rules.ledger import Ledger
from stratagem.rules.tickets import Push
from stratagem.servers.coordinator import Answer, Coordinator
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
    """Before another fit: wait until the last fit's workers have its values."""
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


@request("begin", CHIEF, body=tree, fit=int)
def begin(coordinator: Coordinator, peer: Peer, fit: int, body: Tensor) -> None:
    """Begin a fit, with what the chief has put beside the parameters."""
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
            return {"over": True}, []  # and its values are no more
        assert coordinator.plan is not None
        return {"plan": coordinator.plan.to_json()}, [coordinator.beside]


@request("join", WORKER, fit=int)
def join(coordinator: Coordinator, peer: Peer, fit: int) -> Answer:
    """Take part in a fit; an earlier process in this worker's place counts no more."""
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
    """Take part no more; the process may come for the next fit."""
    if peer.participant is not None:
        coordinator.leave(peer.participant)


@request("retire", MEMBER)
def retire(coordinator: Coordinator, participant: Participant) -> Answer:
    """Take no more tickets: wait for the end of the fit, to fetch its last values."""
    with coordinator.changed:
        if (ledger := coordinator.ledger_of(participant)) is not None:
            coordinator.participants.retired.add(participant)
            ledger.leave(participant.worker)
            coordinator.settle()
            coordinator.changed.notify_all()
        while coordinator.ledger_of(participant) is not None:
            coordinator.changed.wait(0.5)
        return coordinator.last_words(participant)


@request("finish", CHIEF, body=tree)
def finish(coordinator: Coordinator, peer: Peer | None, body: Tensor) -> None:
    """End the fit; `body` is sent to the other workers.

    In step that is after the batch which the chief has done its part of.
    """
    chief = None if peer is None else peer.participant
    with coordinator.changed:
        while coordinator.in_step and coordinator.running and coordinator.open_ledger().states.kept:
            ledger = coordinator.open_ledger()
            _refuse_torn(ledger, idle=coordinator.participants.nobody_works(ledger, chief))
            coordinator.changed.wait(0.5)
        if coordinator.in_step and coordinator.running:
            _refuse_torn(coordinator.open_ledger())
        coordinator.running, coordinator.told = False, body
        coordinator.changed.notify_all()


@request("failed", WORKER, text=str)
def fail(coordinator: Coordinator, peer: Peer, text: str) -> None:
    """End the job: a worker has raised an exception."""
    coordinator.end_job(failed(peer.name, text))


# --- an epoch -------------------------------------------------------------------------------


def payloads(_: Any, peer: Peer, frame: Frame) -> Sequence[Tensor]:
    """Read the examples that go with tickets, one block for each."""
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
    """Deal batches: `runs` of (how many, in how many parts each), from number `first` on."""
    with coordinator.changed:
        ledger, participants = coordinator.open_ledger(), coordinator.participants
        if epoch > coordinator.epoch.number:
            coordinator.epoch = Epoch(epoch)
            ledger.open_epoch()
            if coordinator.in_step:
                _refuse_torn(ledger)
                for worker in list(participants.aside):  # each has a part of every batch
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


@request("next", MEMBER, epoch=int, have=int, feeds=int | None, strict=bool | None)
def next_ticket(
    coordinator: Coordinator,
    participant: Participant,
    epoch: int,
    have: int,
    feeds: int | None,
    strict: bool | None,
) -> Answer:
    """Wait for a ticket, which comes with the newest values; or for the end of something.

    `epoch` is the last one that the worker has done with; `strict`: it wants work of the very
    next, and is told that this is over if the chief has gone on.
    """
    with coordinator.changed:
        begun = coordinator.clock()
        while _gathering(coordinator, participant):
            coordinator.changed.wait(0.5)
        coordinator.participants.say_who_is_missing(coordinator.clock())
        try:
            while True:
                answer = coordinator.offer(participant, epoch, have, feeds, begun, bool(strict))
                if answer is not None:
                    return answer
                coordinator.waiting[participant] = begun
                coordinator.changed.wait(0.5)
        finally:
            coordinator.waiting.pop(participant, None)


def _gathering(coordinator: Coordinator, participant: Participant) -> bool:
    """Whether a training in step has just begun and an expected worker has not come yet.

    Without waiting, the first worker would do the parts of all, with several steps an update.
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
    """Decide on a gradient; it has come with this request, or before."""
    made = Push(participant.worker, serial, version, float(weight))
    return coordinator.push(participant, made, **told)


@request("aside", MEMBER, epoch=int)
def stand_aside(coordinator: Coordinator, participant: Participant, epoch: int) -> dict[str, Any]:
    """A worker's loop over an epoch was left: nobody waits for it until it comes for another.

    In step the chief's leaving ends the epoch for all; and the batch that the worker has done
    its part of is waited for, since it will look at what came of it.
    """
    with coordinator.changed:
        ledger, worker = coordinator.ledger_of(participant), participant.worker
        if ledger is None:
            return {"after": 0}
        turn = ledger.turn
        ledger.leave(worker)
        if epoch < coordinator.epoch.number:  # the chief has gone on already
            ledger.join(worker)
        else:
            coordinator.participants.aside.add(worker)
            if participant.chief and coordinator.in_step:
                _end_epoch(coordinator, ledger, worker)
        coordinator.settle()
        coordinator.wake(ledger, turn)
        while (
            coordinator.in_step
            and coordinator.ledger_of(participant) is ledger
            and ledger.states.kept
        ):
            idle = coordinator.participants.nobody_works(ledger, None)
            if coordinator.epoch.number > epoch or idle:
                break  # what is begun waits for this worker; or who comes next is told
            coordinator.changed.wait(0.5)
        return {"after": coordinator.last_words(participant)[0]["after"]}


@request("enough", MEMBER)
def end_early(coordinator: Coordinator, chief: Participant) -> None:
    """The chief wants no more batches in this epoch: what is in hand is finished."""
    with coordinator.changed:
        _end_epoch(coordinator, coordinator.open_ledger(), chief.worker)
        coordinator.settle()
        coordinator.changed.notify_all()


def _end_epoch(coordinator: Coordinator, ledger: Ledger, chief: int) -> None:
    epoch = coordinator.epoch
    epoch.dealt = True
    dropped = ledger.end_early(coordinator.done.get(chief, -1) if coordinator.in_step else None)
    if dropped:  # others were a batch ahead of the chief
        coordinator.commands.give(["forget"])
        epoch.tally.waiting = []
        epoch.void |= {push.worker for push in dropped}


def _refuse_torn(ledger: Ledger, *, idle: bool = False) -> None:
    if ledger.torn or idle:
        raise NotDistributable(
            "the loop was left when a batch was half done: in step a batch is done when all "
            "its parts are, and not all workers were here to do theirs. Start them all, or "
            "leave the loop when the epoch is over."
        )


# --- what is known of the training ----------------------------------------------------------


@request("settings", WORKER, groups=list)
def settings(coordinator: Coordinator, peer: Peer, groups: list[dict[str, Any]]) -> None:
    """Give the servers' optimizers other settings."""
    with coordinator.changed:
        coordinator.open_ledger()
        coordinator.commands.give(["settings", groups])


@request("snapshot", WORKER, number=int)
def snapshot(coordinator: Coordinator, peer: Peer, number: int) -> dict[str, Any]:
    """Have every server keep its state as of now; return how far to wait for it."""
    with coordinator.changed:
        coordinator.check()
        coordinator.commands.give(["snapshot", number])
        return {"after": coordinator.commands.given}


@request("report", MEMBER, body=tree, epoch=int)
def report(coordinator: Coordinator, participant: Participant, epoch: int, body: Tensor) -> None:
    """Keep what a worker has counted in an epoch."""
    with coordinator.changed:
        counts = coordinator.ledger_of(participant) is not None
        if counts and epoch == coordinator.epoch.number:
            coordinator.epoch.reports[participant.worker] = body
            coordinator.changed.notify_all()


@request("gather", CHIEF)
def gather(coordinator: Coordinator, peer: Peer) -> Answer:
    """Return all reports of the epoch, once everybody who is awake has reported."""
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
    """Keep the means that the chief has made of what was reported."""
    with coordinator.changed:
        coordinator.means = epoch, body
        coordinator.changed.notify_all()


@request("means", MEMBER, epoch=int)
def means(coordinator: Coordinator, participant: Participant, epoch: int) -> Answer:
    """Wait for the means of an epoch; none if there are none.

    Those of the last one stay until another fit begins: the chief may have ended this one.
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
    """The loss of the epoch's updates added up, and over how many examples."""
    with coordinator.changed:
        tally = coordinator.epoch.tally
        return {"loss": tally.total, "examples": tally.examples}


@request("stats", WORKER)
def stats(coordinator: Coordinator, peer: Peer) -> dict[str, Any]:
    """What the ledger has counted; nothing before the first training."""
    with coordinator.changed:
        ledger = coordinator.ledger
        return {"stats": None if ledger is None else ledger.recorder.stats().to_json()}
