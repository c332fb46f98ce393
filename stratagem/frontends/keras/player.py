"""One replica's copy of a Keras model, and what it plays when the conductor says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shard import rows, share
from stratagem.errors import NotDistributable
from stratagem.frontends.keras import attributes, environment, fused, normalization
from stratagem.frontends.keras.denominators import made_exact, whole_activity
from stratagem.frontends.keras.parcel import optimizers
from stratagem.frontends.keras.step_logs import Sources, flat, has_own, number
from stratagem.frontends.keras.user_metrics import user_metrics
from stratagem.frontends.outputs import check_rows
from stratagem.strategies import setup
from stratagem.strategies.exchange import GradientExchange
from stratagem.strategies.prepare import to_device
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.wire.tree import broadcast_tree, gather_tree

Data = Any


class Player:
    """Every method that takes part in a step is collective: all replicas call it alike."""

    def __init__(self, model: Any, replica: Replica, settings: Settings) -> None:
        self.model, self.replica, self.settings = model, replica, settings
        self._optimizers = optimizers(model)
        fused.install(model)
        self.exchange: GradientExchange | None = None
        self._unsync: Callable[[], None] | None = None
        #: whether a training step is under way, when BatchNorm layers meet
        self.active = False
        self._trained = False
        self._trainable: list[bool] = []
        self._tensors: list[Tensor] = []
        #: for steps whose logs are the user's own
        self.sources = {
            step: Sources(model) for step in ("train_step", "test_step") if has_own(model, step)
        }

    # --- coming together --------------------------------------------------------------------

    def ready(self, example: Data, everything: bool, seed: int) -> None:
        """Build whatever has no variables yet, then take the chief's values."""
        if not self.replica.is_chief:
            if not self.model.built:
                with torch.no_grad():
                    self.model(keras.utils.unpack_x_y_sample_weight(self._here(example))[0])
                self.model._track_variables()  # a build of the user's own may come too late
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
        self._move()
        self._tensors = self.tensors()
        if everything:
            told = broadcast_tree(self.replica.collective, [t.detach() for t in self.tensors()])
            self._take(enumerate(told))
        if not self.replica.is_chief:
            self.reset()  # the copy came with what the chief had counted
            for metric in user_metrics(self.model):
                metric.reset_state()
            environment.own_dice(self.model, seed, self.replica.index)

    def weights(self, changed: list[tuple[int, Tensor]]) -> None:
        """Take over what a callback or the user changed on the chief."""
        self._take(changed)

    def attributes(self, changes: list[attributes.Change], trainable: list[bool]) -> None:
        """Take over what was changed on the chief, and what is trained from now on."""
        if not self.replica.is_chief:
            attributes.follow(self.model, changes)
            for variable, wanted in zip(self.model.weights, trainable, strict=True):
                if variable.trainable != wanted:
                    variable.trainable = wanted
        if trainable != self._trainable and self.exchange is not None:
            self.close()
        self._trainable = trainable

    def _take(self, values: Any) -> None:
        if self.replica.is_chief:
            return
        mine = self.tensors()
        with torch.no_grad():
            for index, value in values:
                mine[index].copy_(value)

    def tensors(self) -> list[Tensor]:
        """Everything that replicas must have alike. Asked for twice a step, so kept once ready."""
        if self._tensors:
            return self._tensors
        variables = [*self.model.weights]
        for optimizer in self._optimizers:
            variables += optimizer.variables
        return [v.value for v in variables] + environment.buffers(self.model)

    def _move(self) -> None:
        device = self.replica.device
        everything = [*self.model.variables, *self.model.metrics_variables]
        for optimizer in self._optimizers:
            everything += optimizer.variables
        environment.move(everything, device)

    # --- steps --------------------------------------------------------------------------------

    def train(self, data: Data, total: int) -> Any:
        if self.exchange is None:
            self._open()
        assert self.exchange is not None
        self._mode(True)
        self.exchange.armed = self.active = self._trained = True
        reduced = self.exchange.finished
        written = [p._version for p in self.exchange.buckets.params]
        try:
            result = self._play("train_step", data, total)
        finally:
            self.exchange.armed = self.active = False
        if self.exchange.finished == reduced and written != [
            p._version for p in self.exchange.buckets.params
        ]:
            raise NotDistributable(
                "train_step changed the weights without loss.backward(), so the replicas could "
                "not add their gradients up; call loss.backward() and take the gradients from "
                "[v.value.grad for v in self.trainable_weights]."
            )
        if total < self.replica.count:
            self._share_state()
        return result

    def _share_state(self) -> None:
        """Replicas that had no example take over what the chief's layers have kept in mind."""
        state = environment.kept(self.model)
        if state:
            told = broadcast_tree(self.replica.collective, [t.detach() for t in state])
            if not self.replica.share.examples:
                with torch.no_grad():
                    for mine, theirs in zip(state, told, strict=True):
                        mine.copy_(theirs)

    @torch.no_grad()
    def test(self, data: Data, total: int) -> Any:
        self._mode(False)
        return self._play("test_step", data, total)

    @torch.no_grad()
    def predict(self, data: Data, total: int) -> list[Any]:
        """Every replica's outputs, in order; an empty share has none."""
        self._mode(False)
        cuts = [share(total, self.replica.count, index) for index in range(self.replica.count)]
        start, end = cuts[self.replica.index]
        mine = None
        if end > start:
            mine = self._own("predict_step")(self._here(rows(data, start, end)))
        parts = [part for part in gather_tree(self.replica.collective, mine) if part is not None]
        check_rows(parts, [end - start for start, end in cuts if end > start])
        return parts

    def _play(self, step: str, data: Data, total: int) -> Any:
        start, end = share(total, self.replica.count, self.replica.index)
        self.replica.share.set(end - start, total)
        sources = self.sources.get(step)
        listening = nullcontext() if sources is None else sources.listening()
        with made_exact(self.replica), whole_activity(self.model, self.replica), listening:
            if end > start:
                return self._own(step)(self._here(rows(data, start, end)))
            with environment.unheard(self.model):
                return self._own(step)(self._here(rows(data, 0, 1)))

    def _own(self, name: str) -> Callable[..., Any]:
        """The model's own method, beneath what the conductor laid over it."""
        method: Callable[..., Any] = getattr(type(self.model), name).__get__(self.model)
        return method

    def _here(self, data: Data) -> Data:
        return data if self.replica.device.type == "cpu" else to_device(data, self.replica.device)

    def _mode(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    def _open(self) -> None:
        """Hooks on the gradients, and on BatchNorm layers where they are to be synchronised."""
        named = [(v.path, v.value) for v in self.model.trainable_variables]
        if not named:
            raise NotDistributable(
                "the model has no trainable weights, so there is nothing to train on several "
                "replicas; set layer.trainable = True somewhere."
            )
        self._trainable = [v.trainable for v in self.model.weights]
        reducer = setup.choose_reducer([p for _, p in named], self.replica, self.settings)
        self.exchange = GradientExchange(named, self.replica, reducer, every_backward=True)
        self.exchange.armed = False
        if self.settings.sync_batchnorm:
            self._unsync = normalization.install(
                self.model, self.replica, lambda: self.active
            )

    # --- between steps ----------------------------------------------------------------------

    def reset(self) -> None:
        self._own("reset_metrics")()

    def drain(self) -> None:
        """Hand what the metrics have counted over to the chief, and start counting anew."""
        metrics = [metric.variables for metric in self.model.metrics]
        mine = [[v.value.detach().clone() for v in variables] for variables in metrics]
        if not self.replica.is_chief:
            self._own("reset_metrics")()
            mine = [[before - v.value for before, v in zip(counted, variables, strict=True)]
                    for counted, variables in zip(mine, metrics, strict=True)]  # fmt: skip
        everybody = gather_tree(self.replica.collective, mine)
        if self.replica.is_chief:
            for theirs in everybody[1:]:
                for variables, counted in zip(metrics, theirs, strict=True):
                    if counted:  # one that was never given anything may have no variables yet
                        _add(variables, counted)

    def settle(self) -> None:
        """One defined answer for moving statistics: the mean over replicas."""
        if self._trained:
            environment.mean_of_kept(self.model, self.replica)

    def logs(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What a step of the user's own returned, weighted by the examples behind it."""
        share = self.replica.share
        numbers = {key: number(value) * share.weight for key, value in mine.items()}
        everybody = gather_tree(self.replica.collective, numbers)
        return {key: sum(part[key] for part in everybody) for key in numbers}

    def close(self) -> None:
        """Take the hooks away."""
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None
        if self._unsync is not None:
            self._unsync()
            self._unsync = None


@torch.no_grad()
def _add(variables: list[Any], counted: list[Tensor]) -> None:
    for variable, part in zip(variables, counted, strict=True):
        variable.value.add_(part.to(variable.value.device))


def serve(player: Player) -> Any:
    """Play what the conductor commands until it says that all is done; returns what it tells."""
    last: Any = None
    while True:
        name, arguments = broadcast_tree(player.replica.collective)
        if name == "end":
            return arguments
        if name == "logs":
            player.logs({key: value for key, value in flat(last).items() if key in arguments})
            continue
        result = PARTS[name](player, *arguments)
        if name in ("train", "test"):
            last = result


PARTS: dict[str, Callable[..., Any]] = {
    "ready": Player.ready, "weights": Player.weights, "train": Player.train, "test": Player.test,
    "predict": Player.predict, "reset": Player.reset, "drain": Player.drain,
    "settle": Player.settle, "attributes": Player.attributes,
}  # fmt: skip
