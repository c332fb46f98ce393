"""The chief's side: Keras' own loop runs here, and every step of it is played by all replicas.

    fit, evaluate, predict ...   the model's own methods, called while the other replicas listen
    train_step, test_step ...    cut the batch, command the others, play the own share
    metrics                      added up over the replicas when somebody outside a step reads them

Data, shuffling, callbacks and the progress bar are Keras' business and happen once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from stratagem.data.shard import rows
from stratagem.errors import UsageError
from stratagem.frontends.hooks import refuse_on_parameters
from stratagem.frontends.keras import environment, user_metrics
from stratagem.frontends.keras.attributes import Attributes
from stratagem.frontends.keras.batches import as_tensor, rows_of
from stratagem.frontends.keras.needs import Needs
from stratagem.frontends.keras.overlay import TRAINS, Overlay, busy
from stratagem.frontends.keras.player import PARTS, Player, serve
from stratagem.frontends.keras.results import from_chief, portable
from stratagem.frontends.keras.seats import Seat, seated
from stratagem.frontends.keras.step_logs import flat, nested
from stratagem.strategies.replica import Replica, current_replica
from stratagem.strategies.strategy import Strategy
from stratagem.wire.tree import broadcast_tree


class Conductor(Overlay):
    """Distributes one model over replicas; made when it is compiled in a strategy's scope."""

    def __init__(self, model: Any, strategy: Strategy) -> None:
        super().__init__(model, strategy)
        self.player: Player | None = None
        #: whether the followers are built; whether the model had all its variables when it was sent
        self._ready = self._whole = False
        #: how often each tensor had been written to when all replicas were last alike
        self._versions: dict[int, int] = {}
        #: whether a kind of step returns what the metrics hold, and not numbers of its own
        self._names: dict[str, bool] = {}
        self._mark: Any = None

    def recompiled(self) -> None:
        """The model was compiled again: followers must get it anew."""
        self._mark = None

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
        seat = self._seat(team.start(), again)
        mine = (lambda: own(*args, **kwargs), self, needs)
        results = team.call(_perform, (mine, seat), sent=(None, seat))
        return results[0]

    def _seat(self, replica: Replica, again: bool) -> Seat:
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
        return Seat(self.number, model, self.strategy.settings, environment.config())

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

    def get_weights(self) -> Any:
        self._gather_statistics()
        return self._own("get_weights")()

    def _gather_statistics(self) -> None:
        if self._listening():
            self._follow_changes()
            self._tell("settle")
            self._versions = self._now()

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


def _perform(mine: tuple[Callable[[], Any], Conductor, Needs] | None, seat: Seat) -> Any:
    """On every replica: lead, or listen to the one that leads."""
    replica = current_replica()
    if mine is not None and replica.is_chief:
        call, conductor, needs = mine
        return conductor.lead(call, needs)
    if mine is not None:  # another worker's first replica has its model already
        player = mine[1].player
        assert player is not None
    else:
        player = seated(seat, replica)
    with keras.device(environment.device_name(replica)):
        told = serve(player)
    return from_chief(told, player.model)
