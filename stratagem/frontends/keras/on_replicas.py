"""Replicas of a Keras model: all make each step together, with an all-reduce in backward.

The chief broadcasts each verb of `ReplicaSteps` with its arguments, and every replica runs it.
"""

from __future__ import annotations

import logging
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shares import rows
from stratagem.errors import UsageError
from stratagem.frontends.keras.adapter import (
    Attributes,
    KerasAdapter,
    device_name,
    is_whole,
    trainable,
)
from stratagem.frontends.keras.callback_needs import from_chief, portable
from stratagem.frontends.keras.driver import STEPS, Call, Driver
from stratagem.frontends.keras.model_pickle import FollowerModel
from stratagem.frontends.keras.replica_steps import ReplicaSteps
from stratagem.frontends.keras.step_logs import flat, nested
from stratagem.replicas import follower
from stratagem.training.replica import END, CommandLoop, Replica, current_replica

log = logging.getLogger("stratagem")


class OnReplicas:
    """The chief's side of a model on replicas."""

    plays = STEPS
    #: the verbs of every replica
    form: type[ReplicaSteps] = ReplicaSteps

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.steps: ReplicaSteps | None = None
        #: whether the followers are built; whether the model had all its variables when it was sent
        self.is_open = self._whole = False
        #: by step: whether its logs are the metrics, and nothing else
        self._names: dict[str, bool] = {}
        #: identities of the model's parts when it was sent to the followers
        self._mark: Any = None
        self._rates: tuple[int, ...] = ()
        self._optimizer: Any = None
        #: whether the user was warned that `train_on_batch` ignores `sync=`
        self._warned = False

    @property
    def adapter(self) -> KerasAdapter:
        assert self.steps is not None
        return self.steps.adapter

    # --- calls ------------------------------------------------------------------------------

    def recompiled(self) -> None:
        """Have the model sent again by the next call."""
        self._mark = None

    def takes(self, call: Call) -> bool:
        return self._driver.strategy.replica_group.size > 1

    def inner_call(self) -> None:
        """Followers wait for verbs already."""

    def start(self, call: Call) -> Any:
        replica_group = self._driver.strategy.replica_group
        seat = self._seat(replica_group.start(), call)
        return replica_group.call(perform, ((call, self), seat), sent=(None, seat))[0]

    def _seat(self, replica: Replica, call: Call) -> FollowerModel:
        """Return the model for the followers, or only its number if they have the same model."""
        driver, model = self._driver, self._driver.model
        self._rates, self._optimizer = _schedules(model), model.optimizer
        made_of = (id(replica), id(model.optimizer), self._rates, id(model.loss))
        mark = (*made_of, *((id(v), v.trainable) for v in model.weights))
        alone = driver.strategy.replica_group.place is None
        known = call.needs.single and alone and self.steps is not None and mark == self._mark
        if known and self.adapter.attributes is not None:
            known = self.adapter.attributes.replaced() is None
        if not known:
            if self.steps is not None:
                self.steps.close()
            self.steps = self.form(model, replica, driver.strategy.settings)
            self._mark, self._names, self.is_open = mark, {}, False
            self._whole = is_whole(model) and alone
            self.adapter.mark()
            self.adapter.attributes = Attributes(model)
        settings = driver.strategy.settings
        return FollowerModel(driver.number, None if known else model, settings, self.form)

    def lead(self, call: Call) -> Any:
        """As the chief, run the call while all other replicas wait for verbs."""
        sync = self._driver.strategy.settings.sync
        if call.name == "train_on_batch" and sync is not None and not self._warned:
            self._warned = True
            _warn_of_single_batches(sync)
        with self._driver.leads(call):
            result = call.run()
            self._driver.settle()
        self._end(None if self._driver.strategy.replica_group.place is None else portable(result))
        return result

    def _end(self, told: Any) -> None:
        CommandLoop(self.adapter.replica.collective).tell(END, told)

    def _tell(self, verb: str, *arguments: Any) -> Any:
        """Broadcast a verb and run it here, too."""
        assert self.steps is not None
        CommandLoop(self.adapter.replica.collective).tell(verb, *arguments)
        return self.steps.verbs[verb](*arguments)

    # --- steps ------------------------------------------------------------------------------

    def prepare(self, data: Any) -> bool:
        """Build all copies alike before the first step; send changes before each."""
        adapter, seed = self.adapter, self._driver.seed
        if not self.is_open:
            example = rows(data, 0, 1)
            adapter.build(example)
            told: dict[str, Any] = {"seed": seed()}
            if not self._whole:
                told = adapter.described(example, told["seed"])
                told["values"] = [t.detach() for t in adapter.tensors()]
            self._tell("become", told)
            self.is_open = True
            if not self._whole:
                adapter.mark()
        self._driver.follow_changes()
        if (saved := self._driver.resumed) is not None:
            self._driver.resumed = None
            self._tell("go_on", saved)
        return True

    def shares(self, step: str) -> tuple[int, bool]:
        return self.adapter.replica.count, False

    def step(self, name: str, data: Any, total: int) -> Any:
        driver, adapter = self._driver, self.adapter
        with driver.playing():
            result = self._tell(name.removesuffix("_step"), data, total)
        adapter.mark()
        if driver.needs.attributes and adapter.attributes is not None:
            adapter.attributes.mark()  # a step changes attributes alike on every replica
        if name == "predict_step":
            return keras.tree.map_structure(lambda *each: torch.cat(each), *result)
        return self._logs(name, result) if isinstance(result, dict) else result

    def _logs(self, name: str, logs: dict[str, Any]) -> Any:
        """Return a step's logs to Keras: of all replicas only if a callback reads them."""
        metrics, needs = self._driver.own("get_metrics_result"), self._driver.needs
        if name not in self._names:
            self._names[name] = set(logs) == set(metrics())
        exact = needs.train_logs if name == "train_step" else needs.test_logs
        if self._names[name] and not exact:
            return logs
        sources = self.adapter.sources.get(name)
        if sources is not None:
            sources.note(logs)
        self._tell("drain")
        if sources is None:
            return metrics()
        each = flat(logs)
        held = sources.read(each)
        own = [log for log in each if log not in held]
        return nested({**each, **held, **(self._tell("logs", own) if own else {})})

    # --- reading ----------------------------------------------------------------------------

    def progress(self) -> list[Any]:
        found: list[Any] = self._tell("progress")
        return found

    def settle(self, *, counts: bool, state: bool) -> None:
        if counts:
            self._tell("drain")
        self._driver.follow_changes()
        self._tell("average")
        self.adapter.mark()

    def reset(self) -> None:
        self._tell("reset")

    # --- what callbacks change ----------------------------------------------------------------

    def refuse_changes(self) -> None:
        if self._driver.needs.attributes and _schedules(self._driver.model) != self._rates:
            raise UsageError(
                "the schedule of the learning rate was replaced while the model trains, which the "
                "other replicas cannot follow; replace it between two calls of fit, or have a "
                "callback set a number each epoch (keras.callbacks.LearningRateScheduler)."
            )

    def send_attributes(self, changes: list[Any]) -> None:
        model = self._driver.model
        if model.optimizer is not self._optimizer:
            raise UsageError(
                "the model's optimizer was replaced while it trains, which the other replicas "
                "cannot follow; compile the model again between two calls of fit."
            )
        self._tell("follow", changes, trainable(model))

    def send_tensors(self, written: list[tuple[int, Tensor]], *, last: bool) -> None:
        self._tell("take", written)


def _warn_of_single_batches(sync: Any) -> None:
    """Every call ends with the same weights everywhere, so `sync=` has an effect in `fit` alone."""
    log.warning(
        "train_on_batch has replicas meet after every batch, whatever sync=%r says; use fit to "
        "have them meet now and then.",
        sync,
    )


def _schedules(model: Any) -> tuple[int, ...]:
    """Return the identities of the learning rates; called before every step."""
    optimizer = model.optimizer
    each = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return tuple(id(getattr(one, "_learning_rate", None)) for one in each)


def perform(mine: tuple[Call, OnReplicas] | None, seat: FollowerModel | None) -> Any:
    """On every replica: lead the call, or run the chief's verbs."""
    replica = current_replica()
    # another worker's first replica has its model already
    steps = mine[1].steps if mine is not None else _seated(seat, replica)
    assert steps is not None
    try:
        if mine is not None and replica.is_chief:
            call, side = mine
            return side.lead(call)
        with keras.device(device_name(replica)):
            (told,) = CommandLoop(replica.collective).serve(steps.verbs)
        return from_chief(told, steps.adapter.model)
    except BaseException:
        steps.break_off()
        raise


def _seated(seat: FollowerModel | None, replica: Replica) -> ReplicaSteps:
    """Return the steps of a model that this follower was sent, now or by an earlier call."""
    assert follower.state is not None and seat is not None
    known: dict[int, ReplicaSteps] = follower.state.things.setdefault("keras", {})
    for number in (*seat.gone, *([seat.number] if seat.model is not None else [])):
        if number in known:
            known.pop(number).close()
    if seat.model is not None:
        known[seat.number] = seat.steps(seat.unpacked(), replica, seat.settings)
    return known[seat.number]
