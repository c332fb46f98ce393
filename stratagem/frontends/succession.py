"""What the chief of a training tells the others, so that one of them can be the chief after it.

Weights, optimizer, metrics and the place in the data are everybody's. Only the chief has callbacks
that run, and what orders the data; both go to the others whenever all listen to the chief. Who
takes over begins its own callbacks as after a checkpoint: `on_train_begin` and, in mid-epoch,
`on_epoch_begin` once more, then their state is put to what the last chief's was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.frontends.callback_list import CallbackList
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree


class Succession:
    """One training's, on every replica; those that only follow another process take part, too."""

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
        """On the chief: what the others must know now; without `data` two batches are what it is
        between, and only callbacks that act there can have changed."""
        states = job.callback_states
        which = job.callbacks.at_batches if data is None else None
        return {
            "called": [list(each) for each in job.journal.recent] if job.journal else [],
            "states": {} if states is None else states.by_number(which),
            "data": data,
        }

    def hear(self, told: Mapping[str, Any]) -> None:
        """On the others: remember it."""
        self._called = [(str(call), int(e), int(b)) for call, e, b in told["called"]]
        self._states |= told["states"]
        self._data = told["data"] or self._data

    def tell_pass(self, job: Any, replica: Replica, data: dict[str, Any] | None) -> None:
        """A pass over the data has begun: tell from where. Collective."""
        told = broadcast_tree(replica.collective, data)
        if not replica.is_chief:
            self._data, job.source.journal.begun = told, told["pass"]

    # --- taking over ----------------------------------------------------------------------------

    def data(self, job: Any) -> dict[str, Any]:
        """What the data's order goes on from, as far as the chief has told."""
        return {**self._data, "seed": job.source.seed, "pass": job.source.journal.begun}

    def take_over(self, job: Any) -> None:
        """This process is the chief: its own callbacks go on where the last chief's were."""
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
