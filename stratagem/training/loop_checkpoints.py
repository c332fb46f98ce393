"""Checkpoints of a custom loop: its prepared loader counts batches, saves, and resumes.

    for epoch in loader.epochs(10):        the epochs that are left
        for batch in loader:               of the first of them, the batches that are left
            ...                            saved before the next batch is asked for

`epochs` restores what was saved when it begins, since making a scheduler writes to the optimizer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from stratagem.capabilities import sentence
from stratagem.data.loader import LoaderWrapper
from stratagem.data.passes import PassJournal, batch_size_of, dice_of
from stratagem.data.streams import generator_states
from stratagem.errors import UsageError
from stratagem.state import checkpoint
from stratagem.state.checkpoint_folder import (
    CheckpointFolder,
    Checkpoints,
    CheckpointWriter,
    load_newest,
)
from stratagem.state.optimizer_recipe import group_settings
from stratagem.training import meetings, setup
from stratagem.training.broken_round import rejoin_loop
from stratagem.training.checkpoint_agreement import CheckpointAgreement
from stratagem.training.elastic import LoopJournal, journal_of
from stratagem.training.lossy_wire import load_kept
from stratagem.training.prepare import Prepared, committer_of, loaderless
from stratagem.training.replica import Replica
from stratagem.training.replica_state import (
    own_of,
    own_state,
    plain_state,
    refuse_forgotten,
    set_random,
    state_of,
    take_buffers,
)
from stratagem.training.termination import EXIT_CODE
from stratagem.wire.tree import broadcast_tree, gather_tree

log = logging.getLogger("stratagem")


def resumable(
    prepared: Prepared,
    loader: Any,
    replica: Replica,
    plan: Checkpoints | None,
    *,
    elastic: bool = False,
) -> Prepared:
    """Have a prepared loop keep checkpoints and resume from them, or, if it is elastic, from the
    chief's memory; with neither a plan nor `elastic`, only the methods are there."""
    check_loader(loader)
    model, optimizer, shares = prepared
    progress = None
    if plan is not None or elastic:
        progress = LoopCheckpoints(prepared, loader, replica, plan, elastic=elastic)
    return Prepared(model, optimizer, ResumableLoader(shares, progress))


def check_loader(loader: Any) -> None:
    """Refuse a resumable loop without a DataLoader, which counts the batches."""
    if not isinstance(loader, DataLoader):
        raise UsageError(sentence("elastic", "a model without a loader"))


class ResumableLoader(LoaderWrapper):
    """The loader of a resumable loop; `epochs` yields the epochs that are left."""

    def __init__(self, loader: Any, progress: LoopCheckpoints | None) -> None:
        super().__init__(loader)
        self._progress = progress

    @property
    def seen(self) -> int:
        """How many batches of this epoch were seen: `enumerate(loader, loader.seen)`."""
        return 0 if self._progress is None else self._progress.batch

    def remember(self, **things: Any) -> None:
        """Save these, too, and have them go on: a scheduler, a gradient scaler, a model's average.

        Each has `state_dict` and `load_state_dict`, or is a list or a dict of plain values; the
        chief's are saved. Call it before `epochs`.
        """
        for name, thing in things.items():
            plain = type(thing) in (list, dict)
            if not plain and not (
                hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
            ):
                raise UsageError(
                    f"{name} is a {type(thing).__name__}, which has no state_dict and "
                    "load_state_dict, so it cannot be saved; give it both methods, or a list or a "
                    "dict."
                )
            plain_state(name, state_of(thing))
        if self._progress is not None:
            self._progress.things |= things

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `count`; each is one pass over the
        loader. Collective."""
        if self._progress is None:
            yield from range(count)
            return
        yield from self._progress.epochs(count)

    def __iter__(self) -> Iterator[Any]:
        if self._progress is None:
            yield from self.loader
            return
        self._progress.begin_pass()
        for batch in self.loader:
            self._progress.give()
            yield batch
            self._progress.after_batch()


class LoopCheckpoints:
    """The checkpoints of one custom loop, on every replica."""

    def __init__(
        self,
        prepared: Prepared,
        loader: DataLoader[Any],
        replica: Replica,
        plan: Checkpoints | None,
        *,
        elastic: bool,
    ) -> None:
        self.model, self.optimizer, shares = prepared
        self.replica, self.plan, self.elastic = replica, plan, elastic
        #: on the chief of an elastic job: keeps the state from which the loop goes on
        self._memory: LoopJournal | None = journal_of(replica) if replica.is_chief else None
        #: whether any task may become the chief; then all know the order of the chief's data
        self._inherits, self._fresh = False, False
        self._chiefs_order: dict[str, Any] | None = None
        self.things: dict[str, Any] = {}
        self.epoch = self.batch = self.step = 0
        self._loader, self._journal = loader, shares.journal
        assert isinstance(self._journal, PassJournal)
        if plan is not None:
            self._writer = CheckpointWriter(CheckpointFolder(plan.path, plan.keep))
        self._agreement: CheckpointAgreement | None = None
        self._loaded = self._open = self._passed = False
        #: whether gradients of a batch wait for the optimizer's step, and whether a checkpoint was
        #: due then; updates since the state was last kept
        self._waiting, self._owed, self._made = False, False, 0
        self.optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._waiting, self._made = False, self._made + 1

    # --- epochs -------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        if not self._loaded:
            self._go_on()
        self._begin()
        if self.plan is not None and self.replica.is_chief:
            self._writer.open(successor=self.elastic)
        saved, self._open = True, True
        try:
            with self._terminable():
                while self.epoch < count:
                    self._passed = False
                    yield self.epoch
                    self.epoch, self.batch = self.epoch + 1, 0
                    self._hand_over()
                    saved = self._look(end_of_epoch=True)
                if not saved:
                    self._save()
        finally:  # also where the loop is left early
            self._open = False
            if self.plan is not None:
                self._writer.close()

    def _begin(self) -> None:
        """Begin the epochs that are left."""
        refuse_forgotten(self.optimizer, loaderless(self.replica), self.things)
        self._keep()
        self._agreement = None
        if self.plan is None:
            return
        memory = journal_of(self.replica)
        plan = self.plan if self.replica.is_chief else None
        agree = partial(gather_tree, self.replica.collective)
        ends = None if memory is None else memory.termination
        self._agreement = CheckpointAgreement(plan, self.step, agree, ends)
        last = None if self._memory is None else self._memory.last_saved
        if self._agreement.schedule is not None and last is not None:
            self._agreement.schedule.saved(*last)

    def _terminable(self) -> AbstractContextManager[Any]:
        """Catch SIGTERM; if the loop may be begun again, until its call ends."""
        memory = journal_of(self.replica)
        if self._agreement is None:
            return nullcontext()
        if memory is None:
            return self._agreement.termination
        memory.termination.open()
        return nullcontext()

    def begin_pass(self) -> None:
        """Begin a pass over the loader, one for each epoch."""
        if not self._open or self._passed:
            raise UsageError(sentence("elastic", "a loader broken off"))
        self._passed = self._fresh = True

    def give(self) -> None:
        """Note that the loop has a batch."""
        if self._fresh:
            self._hand_over()
        self._waiting = True

    def after_batch(self) -> None:
        """Count a batch that the loop is done with."""
        self.batch, self.step = self.batch + 1, self.step + 1
        if (journal := journal_of(self.replica)) is not None:
            journal.steps = self.step
        self._keep()
        if self._agreement is not None and (self.step >= self._agreement.next or self._owed):
            self._look()
        committer = committer_of(self.model)
        if committer is None or not committer.apart:  # else at the next meeting
            self.replica.membership.raise_if_trouble()  # a lone replica waits for no peer

    def _hand_over(self) -> None:
        """Broadcast the state of the data's order, if another task may be the chief. Collective."""
        self._fresh = False
        if self._inherits and self.replica.count > 1:
            random = generator_states(self.replica.device)
            mine = {**self._order(), "pass": self._journal.begun, "random": random}
            order = broadcast_tree(self.replica.collective, mine if self.replica.is_chief else None)
            self._chiefs_order = None if self.replica.is_chief else order

    # --- saving -------------------------------------------------------------------------------

    def _look(self, *, end_of_epoch: bool = False) -> bool:
        """Save if a checkpoint is due, end after SIGTERM; return whether it saved. Collective."""
        agreement = self._agreement
        if agreement is None:
            self._keep()
            return True
        self._owed = agreement.due(self.step, end_of_epoch=end_of_epoch) or self._owed
        if self._waiting:
            self._owed = self._owed or agreement.terminated
            return False
        self._keep()
        saves = self._owed or agreement.terminated
        if saves:
            self._save()
        self._owed = False
        if agreement.terminated:
            self._writer.wait()
            if self.replica.is_chief:
                log.warning("SIGTERM: the training is saved, and goes on when it is started again")
            raise SystemExit(EXIT_CODE)
        return saves

    def _save(self) -> None:
        """Copy the state, and have a thread write it. Collective."""
        replica, model = self.replica, self.model
        meetings.meet(replica)
        mine = own_state(replica, list(model.buffers()))
        committer = committer_of(model)
        mine["residuals"] = {} if committer is None else committer.state()
        everybody = gather_tree(replica.collective, mine)
        if not replica.is_chief:
            return
        position = {"epoch": self.epoch, "batch": self.batch, "step": self.step}
        things = {name: plain_state(name, state_of(each)) for name, each in self.things.items()}
        progress = {"made_by": "loop", **self._progress(everybody), "things": things}
        taken = checkpoint.snapshot(model, self.optimizer, {"resume": progress}, copy=True)
        self._writer.save(taken, position)
        if self._memory is not None:
            self._memory.last_saved = (self.step, time.monotonic())

    def _progress(self, replicas: list[Any]) -> dict[str, Any]:
        """On the chief: return the loop's position, and the order of its data."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            **self._order(),
            "replicas": replicas,
        }

    def _order(self) -> dict[str, Any]:
        if (order := self._chiefs_order) is not None:
            return {"pass": order["pass"], "dice": order["dice"]}
        dice = [each.get_state() for each in dice_of(self._loader)]
        known = {"pass": self._journal.noted(self.batch), "dice": dice}
        return known | {"batch_size": batch_size_of(self._loader)}

    def _keep(self) -> None:
        """In an elastic job: keep the state to go on from when replicas leave or join."""
        if self._waiting:
            return
        if (journal := journal_of(self.replica)) is not None:
            journal.rounds.keep(committer_of(self.model), self._made)
        self._made = 0
        if self._memory is not None:
            known = self._chiefs_order or {"random": generator_states(self.replica.device)}
            mine = {"random": known["random"], "buffers": []}
            things = {name: state_of(each) for name, each in self.things.items()}
            progress = {**self._progress([mine]), "things": things}
            self._memory.keep(self.model, self.optimizer, progress)

    # --- going on -----------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Restore what was saved last, if anything was. Collective."""
        self._loaded = True
        replica, saved = self.replica, None
        if self._memory is not None:
            saved = self._memory.put_back(self.model, self.optimizer)
        if replica.is_chief:
            if saved is None and self.plan is not None:
                size = batch_size_of(self._loader)
                saved = load_newest(self.plan, self.model, self.optimizer, "loop", size)
            saved = saved and {
                **saved,
                "groups": [group_settings(group) for group in self.optimizer.param_groups],
            }
        inherited = self._memory is not None and self._memory.again.inherited
        self._inherits, saved = broadcast_tree(replica.collective, [inherited, saved])
        if self._inherits:
            self._memory = journal_of(replica)
        if saved is None:
            return
        self.epoch, self.batch, self.step = (int(saved[n]) for n in ("epoch", "batch", "step"))
        setup.align(self.model, replica)
        setup.align_state(self.optimizer, replica)
        if saved.get("restarts"):  # else replicas would repeat their first random numbers
            setup.roll_own_dice(replica, saved["restarts"])
        for group, settings in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(settings)
        buffers = [each["buffers"] for each in saved["replicas"]]
        take_buffers(list(self.model.buffers()), buffers, replica)
        residuals = [each.get("residuals", {}) for each in saved["replicas"]]
        load_kept(committer_of(self.model), residuals)
        if "restarts" in saved:
            journal = journal_of(replica)
            rounds = None if journal is None else journal.rounds
            rejoin_loop(rounds, committer_of(self.model), replica)
        self._load_things(saved["things"])
        self._go_on_with_data(saved)

    def _load_things(self, saved: dict[str, Any]) -> None:
        if saved.keys() != self.things.keys():
            where = "the loop" if self.plan is None else self.plan.path
            raise UsageError(
                f"{where} has saved {sorted(saved) or 'nothing'} besides model and "
                f"optimizer, and this loop remembers {sorted(self.things) or 'nothing'}; call "
                "loader.remember(...) with the same before loader.epochs(...)."
            )
        for name, thing in self.things.items():
            state = saved[name]
            if isinstance(thing, list):
                thing[:] = state
            elif isinstance(thing, dict):
                thing.clear()
                thing.update(state)
            else:
                thing.load_state_dict(state)

    def _go_on_with_data(self, saved: dict[str, Any]) -> None:
        replica, loader = self.replica, self._loader
        own = own_of(saved["replicas"], replica)
        self._journal.go_on(
            saved,
            dice_of(loader) if replica.is_chief else None,
            partial(set_random, replica, own and own["random"]),
            begun=self.batch > 0,
            persistent=loader.persistent_workers,
        )
