"""The chief's side: Keras' own loop runs here, and every step of it is played by all replicas.

    fit, evaluate, predict ...   the model's own methods, called while the other replicas listen
    train_step, test_step ...    cut the batch, command the others, play the own share
    metrics                      added up over the replicas when somebody outside a step reads them

Data, shuffling, callbacks and the progress bar are Keras' business and happen once.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from stratagem.data.loader import check_sampler
from stratagem.data.shard import rows
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.hooks import refuse_on_parameters
from stratagem.frontends.keras import environment, fused, parcel, user_metrics
from stratagem.frontends.keras.attributes import Attributes
from stratagem.frontends.keras.needs import ONE_STEP, Needs
from stratagem.frontends.keras.player import PARTS, Player, serve
from stratagem.frontends.keras.rehearse import rehearse
from stratagem.frontends.keras.results import from_chief, portable, public_names
from stratagem.frontends.keras.step_logs import flat, nested
from stratagem.replicas import follower
from stratagem.strategies import rehearsal
from stratagem.strategies.replica import Replica, current_replica
from stratagem.strategies.settings import Settings
from stratagem.strategies.strategy import Strategy
from stratagem.wire.tree import broadcast_tree

TRAINS = ("fit", "train_on_batch")
_numbers = itertools.count()
#: numbers of models that are gone here, for followers to forget
_gone: list[int] = []
#: the conductor whose call is under way in this process
_leader: Conductor | None = None


@dataclass
class Part:
    """What a follower needs to play; `model` is None when it has it from an earlier call."""

    number: int
    model: Any
    settings: Settings
    config: dict[str, Any]
    gone: list[int] = field(default_factory=lambda: list(_gone))


class Conductor:
    """Distributes one model; made when it is compiled in a strategy's scope."""

    overlaid = (
        "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
        "train_step", "test_step", "predict_step", "reset_metrics", "get_metrics_result", "save",
        "save_weights", "get_weights", "get_compile_config",
    )  # fmt: skip

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self.model, self.strategy = model, strategy
        self.player: Player | None = None
        self._number = next(_numbers)
        weakref.finalize(model, _gone.append, self._number)
        self._leading = self._in_step = self._ready = False
        #: whether the model had all its variables when it was sent to the followers
        self._whole = False
        #: what the running call needs to know of single steps
        self._needs = Needs()
        #: how often each tensor had been written to when all replicas were last alike
        self._versions: dict[int, int] = {}
        self._attributes: Attributes | None = None
        self._calls = 0
        #: whether a kind of step returns what the metrics hold, and not numbers of its own
        self._names: dict[str, bool] = {}
        self._mark: Any = None

    def lay_over(self) -> None:
        """Take the place of the model's methods, on this instance only."""
        taken = self.model.__dict__.get("_stratagem")
        for name in self.overlaid:
            if taken is None and name in self.model.__dict__:
                raise NotDistributable(
                    f"{name} was set on this model alone, where replicas do not see it; define it "
                    "in a subclass of keras.Model."
                )
            self.model.__dict__[name] = getattr(self, name)
        self.model.__dict__["_stratagem"] = self
        fused.install(self.model)

    def recompiled(self) -> None:
        """The model was compiled again: followers must get it anew."""
        self._mark = None

    def _own(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(type(self.model), name).__get__(self.model)
        return method

    # --- calls ------------------------------------------------------------------------------

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        if rehearsal.wanted():
            kwargs["verbose"] = 0
            rehearse(self.model, self.strategy, lambda: self._own("fit")(*args, **kwargs))
        return self._lead("fit", args, kwargs, self._needs_of("fit", args, kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("evaluate", args, kwargs, self._needs_of("evaluate", args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("predict", args, kwargs, self._needs_of("predict", args, kwargs))

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("train_on_batch", args, kwargs, ONE_STEP, again=True)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("test_on_batch", args, kwargs, ONE_STEP, again=True)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("predict_on_batch", args, kwargs, ONE_STEP, again=True)

    def _needs_of(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Needs:
        given = inspect.signature(self._own(name)).bind_partial(*args, **kwargs).arguments
        for loader in given.values():
            if isinstance(loader, DataLoader):
                check_sampler(loader)
        return Needs.of(given.get("callbacks"))

    def _lead(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], needs: Needs, *,
        again: bool = False,
    ) -> Any:  # fmt: skip
        """Call the model's own method while the other replicas listen."""
        own = self._own(name)
        team = self.strategy.team
        if self._leading:  # a validation, or a callback's call: the others listen already
            before, self._needs = self._needs, self._needs.joined(needs)
            try:
                return own(*args, **kwargs)
            finally:
                self._needs = before
        if busy():  # in a callback of another model: here alone, on whole batches
            return own(*args, **kwargs)
        if team.size == 1:
            with keras.device(environment.device_name(team.start())):
                return own(*args, **kwargs)
        self._refuse()
        if name in TRAINS:
            refuse_on_parameters(self.strategy, self.model)
        part = self._part(team.start(), again)
        mine = (lambda: own(*args, **kwargs), self, needs)
        results = team.call(_perform, (mine, part), sent=(None, part))
        return results[0]

    def _refuse(self) -> None:
        if self.model.compiled and self.model.jit_compile is True:
            raise NotDistributable(
                "jit_compile=True compiles a step that replicas cannot take part in; compile the "
                "model with jit_compile=False."
            )
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise NotDistributable(
                "the model's parameters were sharded by torch (fully_shard, or a tensor-parallel "
                "plan), which Keras' variables do not follow: it would train wrongly. Leave that "
                "out; the strategy distributes the model."
            )
        for layer in self.model._flatten_layers():
            if getattr(layer, "stateful", False):
                raise NotDistributable(
                    f"layer {layer.name!r} is stateful: it keeps a state for each row of the "
                    "batch, and replicas see other rows; use stateful=False, or one replica."
                )

    def _part(self, replica: Replica, again: bool) -> Part:
        """The model for the followers, unless they have it and it is the same."""
        mark = (
            id(replica), id(self.model.optimizer), self._schedules(), id(self.model.loss),
            *((id(v), v.trainable) for v in self.model.weights),
        )  # fmt: skip
        alone = self.strategy.team.place is None
        known = (
            again and alone and self.player is not None and mark == self._mark
            and self._watched().replaced() is None
        )
        if not known:
            if self.player is not None:
                self.player.close()
            self.player = Player(self.model, replica, self.strategy.settings)
            self._mark = mark
            self._ready = False
            self._whole = bool(self.model.built) and alone
            self._versions = self._now()
            self._attributes = Attributes(self.model)
            self._names = {}
        model = None if known else self.model
        return Part(self._number, model, self.strategy.settings, environment.config())

    def lead(self, call: Callable[[], Any], needs: Needs) -> Any:
        """In the chief, with all replicas listening."""
        assert self.player is not None
        if not self._ready:
            user_metrics.watch(self.model)
        with self.leads(needs), keras.device(environment.device_name(self.player.replica)):
            result = call()
            self._gather_statistics()
        told = None if self.strategy.team.place is None else portable(result)
        broadcast_tree(self.player.replica.collective, ["end", told])
        return result

    @contextmanager
    def leads(self, needs: Needs) -> Iterator[None]:
        """While its own call is under way."""
        global _leader
        self._leading, self._needs, _leader = True, needs, self
        try:
            yield
        finally:
            self._leading, _leader = False, None

    # --- steps ------------------------------------------------------------------------------

    def train_step(self, data: Any) -> Any:
        return self._step("train", data)

    def test_step(self, data: Any) -> Any:
        return self._step("test", data)

    def predict_step(self, data: Any) -> Any:
        if not self._leading or self._in_step:
            return self._own("predict_step")(data)
        parts = self._play("predict", data)
        return keras.tree.map_structure(lambda *each: torch.cat(each), *parts)

    def _step(self, name: str, data: Any) -> Any:
        if not self._leading or self._in_step:
            return self._own(f"{name}_step")(data)
        logs = self._play(name, data)
        if not isinstance(logs, dict):
            return logs
        assert self.player is not None
        if name not in self._names:
            self._names[name] = set(logs) == set(self._own("get_metrics_result")())
        exact = self._needs.train_logs if name == "train" else self._needs.test_logs
        if self._names[name] and not exact:
            return logs
        sources = self.player.sources.get(f"{name}_step")
        if sources is not None:
            sources.note(logs)
        self._tell("drain")
        if sources is None:
            return self._own("get_metrics_result")()
        each = flat(logs)
        held = sources.read(each)
        own = {log: value for log, value in each.items() if log not in held}
        return nested({**each, **held, **(self._mean_of(own) if own else {})})

    def _play(self, name: str, data: Any) -> Any:
        data = keras.tree.map_structure(as_tensor, data)
        total = rows_of(data)
        self._get_ready(data)
        self._in_step = True
        try:
            result = self._tell(name, data, total)
        finally:
            self._in_step = False
        self._versions = self._now()
        if self._needs.attributes:
            self._watched().changed()  # every replica's step changed them alike
        return result

    def _get_ready(self, data: Any) -> None:
        """Before the first step everybody is built alike; what was changed here is followed."""
        model = self.model
        if not self._ready:
            if not model.built:
                model(keras.utils.unpack_x_y_sample_weight(rows(data, 0, 1))[0])
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            example = None if self._whole else rows(data, 0, 1)
            self._tell("ready", example, not self._whole, self._seed())
            self._ready = True
            if not self._whole:
                self._versions = self._now()
                self._attributes = Attributes(model)
                trainable = [v.trainable for v in model.weights]
                self._tell("attributes", self._attributes.everything(), trainable)
        self._follow_changes()

    def _seed(self) -> int:
        """Follows from the state of this process' dice without rolling them."""
        self._calls += 1
        state = torch.get_rng_state().numpy().tobytes()
        return zlib.crc32(state + self._calls.to_bytes(8, "big"))

    def _follow_changes(self) -> None:
        """Tell the others what a callback, or the user between two calls, has changed."""
        assert self.player is not None
        if self._needs.attributes and self._schedules() != self._mark[2]:
            raise UsageError(
                "the schedule of the learning rate was replaced while the model trains, which the "
                "other replicas cannot follow; replace it between two calls of fit, or have a "
                "callback set a number each epoch (keras.callbacks.LearningRateScheduler)."
            )
        if self._needs.attributes:
            self._watched().refuse_replaced()
        if self._needs.attributes and (changes := self._watched().changed()):
            if id(self.model.optimizer) != self._mark[1]:
                raise UsageError(
                    "the model's optimizer was replaced while it trains, which the other replicas "
                    "cannot follow; compile the model again between two calls of fit."
                )
            self._tell("attributes", changes, [v.trainable for v in self.model.weights])
        now = self._now()
        if now != self._versions:
            changed = [
                (i, t.detach()) for i, t in enumerate(self.player.tensors())
                if t._version != self._versions.get(id(t), 0)
            ]  # fmt: skip
            if changed:
                self._tell("weights", changed)
            self._versions = now

    def _schedules(self) -> tuple[int, ...]:
        """Which objects the learning rate comes from; asked for every step."""
        optimizer = self.model.optimizer
        each = (optimizer, getattr(optimizer, "inner_optimizer", None))
        return tuple(id(getattr(one, "_learning_rate", None)) for one in each)

    def _now(self) -> dict[int, int]:
        """How often each tensor has been written to; a new one starts at zero."""
        assert self.player is not None
        return {id(t): t._version for t in self.player.tensors()}

    def _watched(self) -> Attributes:
        assert self._attributes is not None
        return self._attributes

    # --- reading ----------------------------------------------------------------------------

    def reset_metrics(self) -> None:
        if self._listening():
            self._tell("reset")
        else:
            self._own("reset_metrics")()

    def get_metrics_result(self) -> Any:
        if self._listening():
            self._tell("drain")
            self._gather_statistics()
        return self._own("get_metrics_result")()

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self._gather_statistics()
        return self._own("save")(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._gather_statistics()
        return self._own("save_weights")(*args, **kwargs)

    def get_weights(self) -> Any:
        self._gather_statistics()
        return self._own("get_weights")()

    def _gather_statistics(self) -> None:
        if self._listening():
            self._follow_changes()
            self._tell("settle")
            self._versions = self._now()

    def get_compile_config(self) -> Any:
        """Name the optimizer as every backend knows it, so that any of them opens the file."""
        self._gather_statistics()  # keras.saving.save_model comes by here and not by `save`
        return public_names(self._own("get_compile_config")())

    def _listening(self) -> bool:
        return self._leading and not self._in_step and self._ready

    # --- commanding -------------------------------------------------------------------------

    def _tell(self, name: str, *arguments: Any) -> Any:
        assert self.player is not None
        broadcast_tree(self.player.replica.collective, [name, list(arguments)])
        return PARTS[name](self.player, *arguments)

    def _mean_of(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Numbers of a step of the user's own, over all replicas."""
        assert self.player is not None
        broadcast_tree(self.player.replica.collective, ["logs", list(logs)])
        return self.player.logs(logs)


def busy() -> bool:
    """Whether a conductor's call is under way in this process."""
    return _leader is not None


def _perform(mine: tuple[Callable[[], Any], Conductor, Needs] | None, part: Part) -> Any:
    """On every replica: lead, or listen to the one that leads."""
    replica = current_replica()
    if mine is not None and replica.is_chief:
        call, conductor, needs = mine
        return conductor.lead(call, needs)
    if mine is not None:  # another worker's first replica has its model already
        player = mine[1].player
        assert player is not None
    else:
        player = _seated(part, replica)
    with keras.device(environment.device_name(replica)):
        told = serve(player)
    return from_chief(told, player.model)


def _seated(part: Part, replica: Replica) -> Player:
    """The player that this follower keeps between calls."""
    assert follower.desk is not None
    players = follower.desk.things.setdefault("keras", {})
    for number in part.gone:
        if number in players:
            players.pop(number).close()
    if part.model is not None:
        if part.number in players:
            players[part.number].close()
        environment.configure(part.config)
        parcel.settle(part.model)
        players[part.number] = Player(part.model, replica, part.settings)
    player: Player = players[part.number]
    return player


def rows_of(data: Any) -> int:
    """Examples in a batch, of which every part of it must have a row each."""
    parts = [t for t in keras.tree.flatten(data) if isinstance(t, torch.Tensor) and t.dim()]
    lengths = sorted({len(part) for part in parts})
    if len(lengths) != 1:
        raise NotDistributable(
            f"the parts of a batch have {' and '.join(map(str, lengths)) or 'no'} rows; replicas "
            "share a batch by its rows, so all its parts need a row for each example."
        )
    return lengths[0]


def as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    return torch.as_tensor(keras.ops.convert_to_tensor(leaf))
