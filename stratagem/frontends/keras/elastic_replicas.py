"""Replicas of a Keras model that may die and join, while Keras' own loop goes on in the chief.

The chief holds the whole batch. When a replica is lost in a step, or one waits to join,

    `StepUndo` puts the chief's copy back to what it was before the step
    `_regroup` makes a new group; the followers begin again with copies of the chief's model
    `_surely` makes the step again, of the same batch in new shares

Counts of metrics would be lost with a replica, so followers hand theirs over after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.feedback import Feedback
from stratagem.compat.torch_names import copy_all
from stratagem.errors import NotDistributable, ReplicaError, ReplicaLost
from stratagem.frontends.keras.adapter import KerasAdapter, own_variables, replica_progress
from stratagem.frontends.keras.driver import Call, Driver
from stratagem.frontends.keras.model_pickle import FollowerModel
from stratagem.frontends.keras.on_replicas import OnReplicas, perform
from stratagem.frontends.keras.step_logs import restorer
from stratagem.training.elastic import Again
from stratagem.training.local_steps import LocalUpdates
from stratagem.training.lossy_wire import begin_anew, broken_round, updated_alone
from stratagem.training.replica import current_replica


class StepUndo:
    """Copies of all that a step may write to in the chief's model, to undo the step."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._tensors: Sequence[Tensor] = ()
        self._metrics: Callable[[], None] = lambda: None

    @torch.no_grad()
    def take(self, adapter: KerasAdapter, name: str) -> None:
        """Copy before a step. A test step writes to metrics only, a predict step to nothing."""
        if name == "predict_step":
            return
        self._metrics = restorer(lambda: adapter.model.metrics_variables)
        if name == "train_step":
            found = [*adapter.tensors(), *own_variables(adapter.model)]
            self._tensors = list({id(t): t for t in found}.values())
            if [t.shape for t in self._tensors] != [t.shape for t in self._copies]:
                self._copies = [torch.empty_like(t) for t in self._tensors]
            copy_all(self._copies, [t.detach() for t in self._tensors])

    @property
    def trains(self) -> bool:
        """Whether a training step runs that can be undone."""
        return bool(self._tensors)

    def forget(self) -> None:
        """The step is complete."""
        self._tensors, self._metrics = (), lambda: None

    @torch.no_grad()
    def back(self) -> None:
        """Undo the step."""
        for tensor, value in zip(self._tensors, self._copies, strict=False):
            tensor.copy_(value)
        self._metrics()
        self.forget()


class ElasticReplicas(OnReplicas):
    """The chief's side, where replicas may leave and join."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._again = Again(self._done)
        self._undo = StepUndo()
        #: how many steps are complete, and how many the wire had sent before this one
        self._played = self._sent_before = 0
        #: opens the followers' committers in a new group
        self._reopen: Callable[[], None] = lambda: None
        #: whether this process runs Keras' loop, and whether it makes a new group in a step of it
        self._leads = self._regroups = False

    def takes(self, call: Call) -> bool:
        """Take every call in a cluster, where other tasks may join a single replica."""
        return super().takes(call) or self._driver.strategy.replica_group.place is not None

    def start(self, call: Call) -> Any:
        begin_anew()
        self._again, self._leads = Again(self._done), False
        group = self._driver.strategy.replica_group
        given = ((call, self), None), partial(self._sent, call), self._again
        try:
            return group.call(perform, *given)[0]
        except ReplicaLost as error:
            if self.steps is None or group.leads is not False:  # not under `stratagem run`
                raise
            chief = self.adapter.replica.membership.members[0]
            raise (_heirless(error) if error.who == chief.name else error) from None

    def _sent(self, call: Call) -> tuple[None, FollowerModel]:
        """Return the model for followers; called again for each new group."""
        return None, self._seat(current_replica(), call)

    def _done(self) -> int | None:
        """How far this process is; None for the chief within Keras' loop, which never restarts."""
        return None if self._leads and not self._regroups else self._played

    def lead(self, call: Call) -> Any:
        self._leads = True
        return super().lead(call)

    # --- steps that are made again ------------------------------------------------------------

    def _surely(self, act: Callable[[], Any]) -> Any:
        """Do something collective; when replicas have left or joined, regroup and do it again."""
        while True:
            membership = self.adapter.replica.membership
            try:
                membership.raise_if_trouble()  # a single replica would not notice in a collective
                return act()
            except Exception as error:  # Keras may have wrapped it
                trouble = membership.trouble
                if trouble is None and not isinstance(error, ReplicaError):
                    raise
                known = error if trouble is None or isinstance(error, ReplicaError) else None
                self._regroup(known or trouble.error())  # type: ignore[union-attr]

    def _regroup(self, error: BaseException) -> None:
        """Undo the step, and make a group of the replicas that are left or have joined."""
        apart = None if self.steps is None else self.steps.committer
        if self._undo.trains and isinstance(apart, LocalUpdates):
            apart.uncounted = False
        self._undo.back()
        if (wire := self._wire()) is not None:
            wire.state_at(self._sent_before)  # error feedback as before the undone step
        if self.steps is not None:
            self.steps.break_off()
        self._mark, self._regroups = None, True
        try:
            self._again.regroup(error)
        finally:
            self._regroups = False

    def prepare(self, data: Any) -> bool:
        return bool(self._surely(partial(super().prepare, data)))

    def step(self, name: str, data: Any, total: int) -> Any:
        plain, prepare = super().step, super().prepare

        def reopen() -> None:
            if not self.is_open:
                prepare(data)
            if self.steps is not None and self.steps.committer is None:
                self._tell("open")

        self._reopen = reopen

        def play() -> Any:
            if name == "train_step" or broken_round() is not None:
                reopen()  # before `take`: a round of `sync=` that broke off is completed there
            elif not self.is_open:
                prepare(data)
            self._undo.take(self.adapter, name)
            self._sent_before = self._sent_now()
            result = plain(name, data, total)
            self._refuse_several()
            if name != "predict_step":
                self._tell("drain")
            return result

        result = self._surely(play)
        self._undo.forget()
        self._sent_before = self._sent_now()
        self._played += 1
        if name == "train_step":
            updated_alone()
        if name == "train_step" and self._driver.strategy.settings.sync is not None:
            self._surely(self._sync)
        self.adapter.mark()
        return result

    def _sync(self) -> None:
        """Average weights if it is time; a round that broke off is made when a committer opens."""
        if self.steps is not None and self.steps.committer is not None:
            self._tell("sync")
        else:
            self._reopen()

    def _wire(self) -> Feedback | None:
        """Return the codec that keeps parts of gradients for later steps, if there is one."""
        committer = None if self.steps is None else self.steps.committer
        found = None if committer is None else committer.reducer
        return found if isinstance(found, Feedback) else None

    def _sent_now(self) -> int:
        wire = self._wire()
        return 0 if wire is None else wire.steps

    def _refuse_several(self) -> None:
        if self._sent_now() > self._sent_before + 1:
            raise NotDistributable(
                "train_step makes several updates, and of a lossy wire the last one can be undone "
                "when a replica dies; make one update a step, or leave wire or elastic out."
            )

    def settle(self, *, counts: bool, state: bool) -> None:
        plain = partial(super().settle, counts=counts, state=state)

        def act() -> None:
            if broken_round() is not None:
                self._reopen()
            if self.is_open:
                plain()

        self._surely(act)

    def reset(self) -> None:
        plain = super().reset
        self._surely(lambda: plain() if self.is_open else self.adapter.metrics.begin())

    def progress(self) -> list[Any]:
        plain, model = super().progress, self._driver.model
        alone = partial(replica_progress, model)
        found: list[Any] = self._surely(
            lambda: plain() if self.is_open else [alone(self.adapter.replica)]
        )
        return found

    def _end(self, told: Any) -> None:
        self._surely(partial(super()._end, told))


def _heirless(error: ReplicaLost) -> ReplicaLost:
    """Say why no task takes the place of a Keras model's chief, as one would for an `sg.Model`."""
    what = str(error).removesuffix(" Then start the job again.")
    return ReplicaLost(
        f"{what} Of a Keras model the chief alone runs Keras' loop, so the job ends with it; with "
        "keras.callbacks.BackupAndRestore, `stratagem run --restarts 3` starts it again, and it "
        "goes on with the next batch.",
        error.who,
    )
