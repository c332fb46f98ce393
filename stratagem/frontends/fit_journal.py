"""The journal of an elastic training, which is begun again when replicas leave or join.

Nothing is done twice: all replicas take the chief's weights, the present replicas repeat the batch
that broke off, and each callback is called once per event. The chief's number of updates counts;
other replicas may be one update ahead, and take its weights.

A replica that dies would take its metric counts along. So before each update the replicas gather
what they have counted for it (`gather`), and after the update each adds the counts of all
(`updated`): in this order, an update that breaks off is counted by no replica.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.epoch_sums import LossSum
from stratagem.frontends.metrics import MetricSet, refuse_means_of
from stratagem.training.replica import Replica, alone
from stratagem.training.termination import Termination
from stratagem.wire.tree import broadcast_tree, gather_tree


class FitJournal:
    """How far this process has come in one training, and how to undo an unfinished update."""

    def __init__(self, restarts: int = 0) -> None:
        #: how often the training was restarted
        self.restarts = restarts
        #: whether the last restart was for a replica that joined, and has no state yet
        self.grown = False
        #: one for all tries: SIGTERM may come between two of them
        self.termination = Termination()
        #: number of updates
        self.updates = 0
        #: the epoch under way, how many of its batches are done, and of all epochs
        self.epoch, self.batch, self.step = -1, 0, 0
        #: of the epoch under way, once all its batches are done
        self.logs: dict[str, Any] | None = None
        self._called: set[tuple[str, int, int]] = set()
        #: the last calls of callbacks: all that may come again for another chief
        self.recent: deque[tuple[str, int, int]] = deque(maxlen=8)
        #: whether a callback has ended the training
        self.stopped = False
        #: metrics of the update under way: this replica's, and the gathered counts of all
        self._here: MetricSet | None = None
        self._told: list[dict[str, Any]] = []
        self._under_way = 0
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._tally: dict[str, Any] | None = None
        self._earlier_pass: Any = None

    def once(self, call: str, epoch: int = -1, batch: int = -1) -> bool:
        """Whether this call of callbacks has not been made yet."""
        if (call, epoch, batch) in self._called:
            return False
        self._called.add((call, epoch, batch))
        self.recent.append((call, epoch, batch))
        return True

    def take_over(self, called: Iterable[tuple[str, int, int]]) -> None:
        """Take these calls as made, for callbacks that were just created on a new chief."""
        self._called = set(called)
        self.recent = deque(self._called, maxlen=8)

    # --- going forward ------------------------------------------------------------------------

    def enter(self, epoch: int, batch: int, earlier_pass: Any) -> None:
        """Begin or continue an epoch at this batch; `earlier_pass` is the data's last pass."""
        self.epoch, self.batch = epoch, batch
        self._earlier_pass = earlier_pass

    def leave(self) -> None:
        """End the epoch and forget its batches, logs and calls."""
        self.epoch, self.batch, self.logs = self.epoch + 1, 0, None
        self._called = {call for call in self._called if call[1] < 0}

    def watch(self, metrics: MetricSet) -> Callable[..., None]:
        """Return the function that counts outputs and targets of the update under way."""
        self._here = copy.deepcopy(metrics)
        refuse_means_of(self._here)
        self._here.reset()
        return self._here.update

    def gather(self, replica: Replica) -> None:
        """Gather what every replica has counted for the update under way. Collective."""
        if self._here:
            self._told = gather_tree(replica.collective, self._here.progress())
            self._here.reset()

    def counts(self) -> dict[str, Any] | None:
        """This replica's counts since the last meeting, where replicas meet now and then."""
        return self._here.progress() if self._here else None

    def hear(self, metrics: MetricSet, replica: Replica, told: Sequence[Any]) -> None:
        """Add the counts of all replicas to the metrics."""
        counted = [each for each in told if each]
        if counted and self._here is not None:
            metrics.go_on([metrics.progress(copied=False), *counted], alone(replica))
            self._here.reset()

    def before_update(self, module: nn.Module, tally: LossSum | None) -> None:
        """Keep what the update will overwrite: buffers, and the loss sum if accumulation adds to it
        before the update."""
        self._buffers = [(b, b.detach().clone()) for b in module.buffers()]
        self._tally = None if tally is None else tally.state()
        self._under_way = 0

    def buffers_of(self, module: nn.Module) -> list[Tensor]:
        """The values of the buffers before the update under way."""
        kept = {id(buffer): value for buffer, value in self._buffers}
        return [kept.get(id(buffer), buffer.detach()) for buffer in module.buffers()]

    def before_batch(self) -> None:
        """Count a batch of the update under way."""
        self._under_way += 1

    def updated(self, metrics: MetricSet, replica: Replica) -> None:
        """Commit the update: count it, and let go of what could undo it."""
        self.hear(metrics, replica, self._told)
        self.step, self.batch = self.step + self._under_way, self.batch + self._under_way
        self.updates, self._under_way = self.updates + 1, 0
        self._buffers, self._tally = [], None
        self._told = []

    # --- breaking off and going on ------------------------------------------------------------

    @torch.no_grad()
    def interrupt(self, metrics: MetricSet, tally: LossSum, begun: Any) -> dict[str, Any] | None:
        """Undo what the unfinished update has changed.

        Returns the state from which the chief goes on, None if no epoch has begun. `begun` is the
        pass over the data that is under way.
        """
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._buffers, self._told = [], []
        self.restarts += 1
        if self.epoch < 0:
            return None
        added = LossSum().state() if not self.batch else self._tally or tally.state()
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "stopped": self.stopped,
            "updates": self.updates,
            "begun": begun is not self._earlier_pass,
            "ended": self.logs is not None,
            "tally": added,
            "counted": metrics.progress() if self.batch and self.logs is None else None,
            "replicas": [],
            "callbacks": None,
        }

    def go_on(self, metrics: MetricSet, replica: Replica, told: Mapping[str, Any]) -> None:
        """Take over the chief's counters."""
        self.updates, self.step = int(told.get("updates", 0)), int(told["step"])
        self.logs = (self.logs or {}) if told.get("ended") else None
        if told.get("counted") is not None:
            metrics.go_on([told["counted"]], alone(replica))


# --- succession: what makes another task the chief ------------------------------------------------
#
# All replicas have weights, optimizer, metrics and the position in the data. Only the chief runs
# callbacks and orders the data; it broadcasts the state of both at every `listen`. The new chief
# starts its own callbacks as after a checkpoint: `on_train_begin` and, in mid-epoch,
# `on_epoch_begin` once more, then it loads the last chief's callback state into them.


class Succession:
    """What a replica needs to become the chief of one training; followers keep one, too."""

    def __init__(
        self,
        invite: Callable[[], CallbackList] = CallbackList.none,
        load: Callable[[], dict[str, Any] | None] = lambda: None,
        *,
        leads: bool = False,
    ) -> None:
        """`invite` makes the chief's callbacks, `load` reads the checkpoint to begin with."""
        self._invite, self._load, self._leads = invite, load, leads
        #: where random numbers stood as the call began, on all processes alike
        self._dice = generator_states()
        #: whether this process has taken over, and hooks of its last batch may be still to come
        self.owes = False
        self._called: list[tuple[str, int, int]] = []
        self._states: dict[int, dict[str, Any]] = {}
        self._data: dict[str, Any] = {}

    # --- handing over ---------------------------------------------------------------------------

    def will(self, job: Any, data: dict[str, Any] | None) -> dict[str, Any]:
        """On the chief: the state to broadcast; without `data` it is between two batches, and only
        callbacks that act there can have changed."""
        states = job.callback_states
        which = job.callbacks.at_batches if data is None else None
        return {
            "called": [list(each) for each in job.journal.recent] if job.journal else [],
            "states": {} if states is None else states.by_number(which),
            "data": data,
        }

    def hear(self, told: Mapping[str, Any]) -> None:
        """On the other replicas: keep the chief's state."""
        self._called = [(str(call), int(e), int(b)) for call, e, b in told["called"]]
        self._states |= told["states"]
        self._data = told["data"] or self._data

    def tell_pass(self, job: Any, replica: Replica, data: dict[str, Any] | None) -> None:
        """Broadcast where the new pass over the data has begun. Collective."""
        told = broadcast_tree(replica.collective, data)
        if not replica.is_chief:
            self._data, job.source.journal.begun = told, told["pass"]

    # --- taking over ----------------------------------------------------------------------------

    def data(self, job: Any) -> dict[str, Any]:
        """The last chief's state of the data order."""
        return {**self._data, "seed": job.source.seed, "pass": job.source.journal.begun}

    def take_over(self, job: Any) -> None:
        """Become the chief: start this process' callbacks where the last chief's were."""
        if self._leads:
            return
        self._leads = True
        job.callbacks, job.callback_states = self._invite(), None
        job.heed_callbacks()
        job.saves = job.checkpoints is not None
        assert job.journal is not None
        if job.resumed is None:  # the last chief had not begun: nothing was called
            torch.set_rng_state(self._dice["torch"])
            set_beside_torch(self._dice)
            job.resumed = self._load()
            job.journal.take_over(())
            return
        again = {"train_begin", "epoch_begin"} if job.resumed["batch"] else {"train_begin"}
        job.journal.take_over(each for each in self._called if each[0] not in again)
        if self._states:
            job.resumed["callbacks"] = [self._states[i] for i in sorted(self._states)]
        self.owes = bool(job.resumed["batch"])
