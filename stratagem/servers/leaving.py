"""Workers that leave their loop over an epoch's batches early (`break`), and what follows.

    in the loop  -- request "leave loop" -->  outside  -- asks for another epoch -->  in the loop

No worker waits for one that is outside. With asynchronous updates that is all. In step
(`Coordinator.in_step`) every worker has a part of every batch, so leaving concerns all of them:

    the chief leaves         The epoch ends with the last batch that the chief did a part of. Parts
                             of the next batch are dropped again; workers whose last part that was
                             learn it with the end of the epoch ("void").
    another worker leaves    All workers must leave at the same batch: a gradient of a batch that
                             the worker did no part of is refused (`Participants.refuse_alone`).
    either                   waits for the batch that it did its part of. If the batch cannot be
                             completed, the job fails (`refuse_half_done`).

The state of this lies where it is used:

    Participants.left_loop   the workers that are outside
    Coordinator.done         by worker, the batch that it last did a part of
    Epoch.void               the workers whose last part was dropped again
    Ledger.half_done         whether a batch was given up half done
"""

from __future__ import annotations

from typing import Any

from stratagem.errors import NotDistributable
from stratagem.rules.ledger import Ledger
from stratagem.servers.coordinator import Coordinator
from stratagem.servers.participants import Participant
from stratagem.servers.requests import MEMBER, request


@request("leave loop", MEMBER, epoch=int)
def leave_loop(coordinator: Coordinator, participant: Participant, epoch: int) -> dict[str, Any]:
    """Note that a worker has left; in step, wait until the batch of its last part is applied."""
    with coordinator.changed:
        ledger, worker = coordinator.ledger_of(participant), participant.worker
        if ledger is None:
            return {"after": 0}
        turn = ledger.turn
        ledger.leave(worker)
        if epoch < coordinator.epoch.number:  # the chief has gone on already
            ledger.join(worker)
        else:
            coordinator.participants.left_loop.add(worker)
            if participant.chief and coordinator.in_step:
                _end_epoch(coordinator, ledger, worker)
        coordinator.settle()
        coordinator.wake(ledger, turn)
        while (
            coordinator.in_step
            and coordinator.ledger_of(participant) is ledger
            and ledger.states.kept
        ):
            if coordinator.epoch.number > epoch or nobody_works(coordinator, ledger, None):
                break  # the next epoch waits for this worker; or the next request is refused
            coordinator.changed.wait(0.5)
        return {"after": coordinator.final_answer(participant)[0]["after"]}


@request("enough", MEMBER)
def end_early(coordinator: Coordinator, chief: Participant) -> None:
    """End the epoch after the batches that workers hold; the chief wants no more."""
    with coordinator.changed:
        _end_epoch(coordinator, coordinator.open_ledger(), chief.worker)
        coordinator.settle()
        coordinator.changed.notify_all()


def _end_epoch(coordinator: Coordinator, ledger: Ledger, chief: int) -> None:
    epoch = coordinator.epoch
    epoch.dealt = True
    dropped = ledger.end_early(coordinator.done.get(chief, -1) if coordinator.in_step else None)
    if dropped:  # other workers were a batch ahead of the chief
        coordinator.commands.give(["forget"])
        epoch.tally.waiting = []
        epoch.void |= {push.worker for push in dropped}


def nobody_works(coordinator: Coordinator, ledger: Ledger, chief: Participant | None) -> bool:
    """Return whether all workers but the chief have left their loops, and none holds a ticket."""
    working = [each for each in coordinator.participants.working() if each is not chief]
    return not working and not ledger.states.held


def refuse_half_done(ledger: Ledger, *, idle: bool = False) -> None:
    """Raise if a batch was given up half done, or if no worker is left to complete it (`idle`)."""
    if ledger.half_done or idle:
        raise NotDistributable(
            "the loop was left when a batch was half done: in step a batch is done when all "
            "its parts are, and not all workers were here to do theirs. Start them all, or "
            "leave the loop when the epoch is over."
        )
