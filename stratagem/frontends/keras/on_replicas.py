"""Replicas of a Keras model: all play each step together, and add up their gradients in backward.

The chief says a verb, with the rows that it is about, and every replica does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shares import rows
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras.adapter import (
    KerasAdapter,
    device_name,
    kept,
    replica_progress,
    roll_dice,
    take_progress,
    trainable,
)
from stratagem.frontends.keras.attributes import Attributes
from stratagem.frontends.keras.callback_needs import from_chief, portable
from stratagem.frontends.keras.denominators import SharedPart, synchronise
from stratagem.frontends.keras.driver import STEPS, Call, Driver
from stratagem.frontends.keras.model_pickle import FollowerModel
from stratagem.frontends.keras.row_check import CheckSchedule
from stratagem.frontends.keras.step_logs import flat, nested
from stratagem.replicas import follower
from stratagem.state.keras_stepper import fuse
from stratagem.state.write_tracker import WriteTracker
from stratagem.training.command_loop import END, CommandLoop
from stratagem.training.exchange import GradientExchange, open_exchange
from stratagem.training.lossy_wire import check_optimizer, load_kept
from stratagem.training.replica import Replica, current_replica
from stratagem.training.replica_state import own_of
from stratagem.training.settings import Settings
from stratagem.training.step_figures import figures_of
from stratagem.wire.tree import broadcast_tree, gather_tree


class ReplicaSteps:
    """What one replica does when the chief says a verb; its committer is the all-reduce."""

    def __init__(self, model: Any, replica: Replica, settings: Settings) -> None:
        self.adapter = adapter = KerasAdapter(model, SharedPart(replica), updates=True)
        self.settings = settings
        self._figures = figures_of(replica)
        for optimizer in adapter.optimizers:
            fuse(optimizer)
        self.committer: GradientExchange | None = None
        self._unsync: Callable[[], None] | None = None
        #: whether a training step is under way, when BatchNorm layers meet
        self.active = False
        self._trained = False
        #: of all replicas, from a backup: what their committers go on from
        self._kept: list[dict[str, Any]] = []
        self._trainable: list[bool] = []
        self.verbs: dict[str, Callable[..., Any]] = {
            "become": self.become,
            "follow": self.follow,
            "take": adapter.take,
            "train": self.train,
            "test": partial(self.together, adapter.test),
            "predict": partial(self.together, adapter.predict),
            "logs": adapter.logs,
            "reset": adapter.metrics.begin,
            "drain": adapter.drain,
            "average": self.average,
            "progress": self.progress,
            "go_on": self.go_on,
        }

    def become(self, told: dict[str, Any]) -> None:
        """Be as the chief's copy, but for random numbers."""
        self.adapter.become(told)
        replica = self.adapter.replica
        if not replica.is_chief:
            roll_dice(self.adapter.model, told["seed"], replica.index)

    def follow(self, changes: list[Any], trained: list[bool]) -> None:
        """Take over what was changed on the chief; another set of gradients is added up then."""
        self.adapter.follow(changes, trained)
        if trained != self._trainable and self.committer is not None:
            self.committer.meet()
            mine = self.committer.state()  # goes on with the parameters that are left
            self._kept = gather_tree(self.adapter.replica.collective, mine)
            self.close()
        self._trainable = trained

    def train(self, data: Any, total: int) -> Any:
        adapter = self.adapter
        if self.committer is None:
            self._open()
        adapter.mode(True)
        adapter.part.begin(total, total)
        self.active = self._trained = True
        try:
            with nullcontext() if self.committer is None else self._adding(self.committer):
                result = adapter.play("train_step", data)
        finally:
            self.active = False
        if self.committer is not None:
            self.committer.sync()
        self._figures.step(adapter.replica.share.examples)
        if total < adapter.replica.count:
            self._share_state()
        return result

    def _open(self) -> None:
        """Hooks on the gradients, and on BatchNorm layers where they are to be synchronised."""
        model, replica = self.adapter.model, self.adapter.replica
        # by their place: the paths of a model that is built once more are others
        places = {id(v): i for i, v in enumerate(model.variables)}
        trained = model.trainable_variables
        named = [(f"{v.name} (variable {places[id(v)]})", v.value) for v in trained]
        self._trainable = trainable(model)
        if not named:
            return  # Keras trains nothing then, and counts
        check_optimizer(self.settings, model.optimizer, replica)
        self.committer = self._exchange(named)
        self.committer.optimizer = model.optimizer
        load_kept(self.committer, self._kept)
        self._kept = []
        self.committer.armed = False
        if self.settings.sync_batchnorm:
            self._unsync = synchronise(model, replica, lambda: self.active)

    def _exchange(self, named: Sequence[tuple[str, Any]]) -> GradientExchange:
        """What adds the gradients up. Collective."""
        return open_exchange(named, self.adapter.replica, self.settings, every_backward=True)

    @contextmanager
    def _adding(self, exchange: GradientExchange) -> Iterator[None]:
        """While a step trains: what backward makes is added up over the replicas."""
        exchange.armed, reduced = True, exchange.finished
        weights = WriteTracker(exchange.buckets.params)
        try:
            yield
        finally:
            exchange.armed = False
        if exchange.finished == reduced and weights.written():
            raise NotDistributable(
                "train_step changed the weights without loss.backward(), so the replicas could "
                "not add their gradients up; call loss.backward() and take the gradients from "
                "[v.value.grad for v in self.trainable_weights]."
            )

    @torch.no_grad()
    def _share_state(self) -> None:
        """Replicas that had no example take over what the chief's layers have kept in mind."""
        state, replica = kept(self.adapter.model), self.adapter.replica
        if state:
            told = broadcast_tree(replica.collective, [t.detach() for t in state])
            if not replica.share.examples:
                for mine, theirs in zip(state, told, strict=True):
                    mine.copy_(theirs)

    def average(self) -> None:
        if self._trained:
            self.together(self.adapter.average)

    def together(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do it when all copies are alike. Collective."""
        if self.committer is not None:
            self.committer.meet()
        return act(*arguments)

    def progress(self) -> list[Any]:
        """What every replica has of its own. Collective."""
        adapter = self.adapter
        mine = replica_progress(adapter.model, adapter.replica)
        mine["residuals"] = {} if self.committer is None else self.committer.state()
        return gather_tree(adapter.replica.collective, mine)

    def go_on(self, saved: list[Any]) -> None:
        """All but residuals as another than the chief, which did so before it read its data."""
        adapter = self.adapter
        self._kept = [each.get("residuals", {}) for each in saved]
        if self.committer is not None:
            load_kept(self.committer, self._kept)
            self._kept = []
        if not adapter.replica.is_chief:
            take_progress(adapter.model, own_of(saved, adapter.replica), adapter.replica)

    def close(self) -> None:
        """Take the hooks away."""
        if self.committer is not None:
            self.committer.close()
            self.committer = None
        if self._unsync is not None:
            self._unsync()
            self._unsync = None


class OnReplicas:
    """The chief's side of a model on replicas."""

    plays = STEPS
    #: what every replica does
    form: type[ReplicaSteps] = ReplicaSteps

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.steps: ReplicaSteps | None = None
        #: whether the followers are built; whether the model had all its variables when it was sent
        self.is_open = self._whole = False
        #: whether a kind of step returns what the metrics hold, and not numbers of its own
        self._names: dict[str, bool] = {}
        #: what the followers' copies were made of
        self._mark: Any = None
        self._rates: tuple[int, ...] = ()
        self._optimizer: Any = None

    @property
    def adapter(self) -> KerasAdapter:
        assert self.steps is not None
        return self.steps.adapter

    # --- calls ------------------------------------------------------------------------------

    def recompiled(self) -> None:
        """Followers must get the model anew."""
        self._mark = None

    def takes(self, call: Call) -> bool:
        return self._driver.strategy.replica_group.size > 1

    def inner_call(self) -> None:
        """The others listen already."""

    def start(self, call: Call) -> Any:
        replica_group = self._driver.strategy.replica_group
        seat = self._seat(replica_group.start(), call)
        return replica_group.call(perform, ((call, self), seat), sent=(None, seat))[0]

    def _seat(self, replica: Replica, call: Call) -> FollowerModel:
        """The model for the followers, unless they have it and it is the same."""
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
            self._whole = bool(model.built) and alone
            self.adapter.mark()
            self.adapter.attributes = Attributes(model)
            driver.schedule = CheckSchedule(model)
        settings = driver.strategy.settings
        return FollowerModel(driver.number, None if known else model, settings, self.form)

    def lead(self, call: Call) -> Any:
        """In the chief, with all replicas listening."""
        with self._driver.leads(call):
            result = call.run()
            self._driver.settle()
        self._end(None if self._driver.strategy.replica_group.place is None else portable(result))
        return result

    def _end(self, told: Any) -> None:
        CommandLoop(self.adapter.replica.collective).tell(END, told)

    def _tell(self, verb: str, *arguments: Any) -> Any:
        """Have everybody do it, here too."""
        assert self.steps is not None
        CommandLoop(self.adapter.replica.collective).tell(verb, *arguments)
        return self.steps.verbs[verb](*arguments)

    # --- steps ------------------------------------------------------------------------------

    def prepare(self, data: Any) -> bool:
        """Before the first step everybody is built alike; what was changed here is followed."""
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

    def shares(self) -> tuple[int, bool]:
        return self.adapter.replica.count, False

    def step(self, name: str, data: Any, total: int) -> Any:
        driver, adapter = self._driver, self.adapter
        with driver.playing():
            result = self._tell(name.removesuffix("_step"), data, total)
        adapter.mark()
        if driver.needs.attributes and adapter.attributes is not None:
            adapter.attributes.mark()  # every replica's step changed them alike
        if name == "predict_step":
            return keras.tree.map_structure(lambda *each: torch.cat(each), *result)
        return self._logs(name, result) if isinstance(result, dict) else result

    def _logs(self, name: str, logs: dict[str, Any]) -> Any:
        """What a step returns to Keras: exact numbers only where somebody looks at them."""
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


def _schedules(model: Any) -> tuple[int, ...]:
    """Which objects the learning rate comes from; asked for every step."""
    optimizer = model.optimizer
    each = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return tuple(id(getattr(one, "_learning_rate", None)) for one in each)


def perform(mine: tuple[Call, OnReplicas] | None, seat: FollowerModel | None) -> Any:
    """On every replica: lead, or listen to the one that leads."""
    replica = current_replica()
    if mine is not None and replica.is_chief:
        call, side = mine
        return side.lead(call)
    # another worker's first replica has its model already
    steps = mine[1].steps if mine is not None else _seated(seat, replica)
    assert steps is not None
    with keras.device(device_name(replica)):
        (told,) = CommandLoop(replica.collective).serve(steps.verbs)
    return from_chief(told, steps.adapter.model)


def _seated(seat: FollowerModel | None, replica: Replica) -> ReplicaSteps:
    """What this follower keeps between calls, for every model that it was sent."""
    assert follower.state is not None and seat is not None
    known: dict[int, ReplicaSteps] = follower.state.things.setdefault("keras", {})
    for number in (*seat.gone, *([seat.number] if seat.model is not None else [])):
        if number in known:
            known.pop(number).close()
    if seat.model is not None:
        known[seat.number] = seat.steps(seat.unpacked(), replica, seat.settings)
    return known[seat.number]
