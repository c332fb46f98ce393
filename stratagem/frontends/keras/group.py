"""A Keras model on the devices of one worker: they share every ticket, and hand in one gradient.

    the first    is the worker (hand.py): talks to the servers, and tells the others what to do
    the others   play their share of the ticket's rows; gradients are added up in backward
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from stratagem.data.shard import count_rows
from stratagem.frontends.keras import environment, parcel
from stratagem.frontends.keras.parts import Shared
from stratagem.frontends.keras.performer import Performer
from stratagem.frontends.keras.seats import Seat
from stratagem.frontends.keras.session import become_like
from stratagem.frontends.keras.step_logs import flat
from stratagem.strategies import setup
from stratagem.strategies.exchange import GradientExchange
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.wire.tree import broadcast_tree, gather_tree


class Group:
    """The devices of one worker around copies of one model, seen from one of them. Collective."""

    def __init__(self, model: Any, replica: Replica) -> None:
        self.model, self.replica = model, replica
        self.part = Shared(replica)
        named = [(v.path, v.value) for v in model.trainable_variables]
        self.params = [param for _, param in named]
        #: the type of the wire is for what goes to the servers
        reducer = setup.choose_reducer(self.params, replica, Settings())
        self.exchange = GradientExchange(named, replica, reducer, every_backward=True)
        self.exchange.armed = False

    def tell(self, *words: Any) -> None:
        """As the first: what comes now."""
        broadcast_tree(self.replica.collective, list(words))

    @contextmanager
    def step(self, examples: int, total: int) -> Iterator[None]:
        """With the first's values, on a ticket of so many examples of a batch."""
        setup.spread(self.params, self.replica)
        self.part.begin(examples, total)
        self.exchange.armed = True
        try:
            yield
        finally:
            self.exchange.armed = False

    def weighted(self, mine: dict[str, float]) -> dict[str, float]:
        """Means over the ticket's rows of what each device has of its own."""
        share = self.replica.share.weight
        everybody = gather_tree(self.replica.collective, {k: v * share for k, v in mine.items()})
        return {key: sum(part[key] for part in everybody) for key in mine}

    def drain(self, performer: Performer) -> None:
        """What all devices have counted goes to the first; running statistics become their mean."""
        mine = None
        if not self.replica.leads:
            mine = [performer.hand_over_counts(), performer.sources.known]
        for counts, known in gather_tree(self.replica.collective, mine)[1:]:
            if self.replica.leads:
                performer.add_counts(counts)
                performer.sources.join(known)
        environment.mean_of_kept(self.model, self.replica)

    def close(self) -> None:
        self.exchange.close()


class Assistant(Performer):
    """Another device than the first."""

    def __init__(self, model: Any, group: Group) -> None:
        super().__init__(model, group.params, group.replica, group.part)
        self._group = group
        #: of the last step: what was counted before it, and what it returned, if that is its own
        self._before: list[Any] = []
        self._logs: dict[str, Any] | None = None

    def _hand_over(self, given: dict[int, Any]) -> None:
        """The first does; it has this device's part of everything."""
        self._group.weighted({"loss": self._loss or 0.0})

    def work(self, payload: Any) -> None:
        """This device's share of a ticket."""
        data = payload["rows"]
        self.follow_changes(payload.get("news"))
        self._before = self.counted()
        with self._group.step(count_rows(data), int(payload["total"])):
            logs = self.perform(data)
        for param in self.params:
            param.grad = None
        self._logs = logs if self.custom and isinstance(logs, dict) else None

    def settle(self, kept: bool) -> None:
        """The servers have decided."""
        if not kept:
            self.take_back(self._before)
        elif self._logs is not None:
            numbers = self.sources.note(self._logs)
            self._group.weighted({log: numbers.get(log, 0.0) for log in flat(self._logs)})


def begin(model: Any, replica: Replica, told: Any) -> Group:
    """As the first: have the others' models become like this one."""
    broadcast_tree(replica.collective, ["begin", told])
    setup.spread(environment.kept(model), replica)
    return Group(model, replica)


def end(replica: Replica) -> None:
    """As the first: nothing more is to be done."""
    broadcast_tree(replica.collective, ["end"])


def assist(seat: Seat, replica: Replica) -> None:
    """As another: play what the first says, until it says that all is done."""
    word, *words = broadcast_tree(replica.collective)
    if word == "end":
        return
    model = seat.model
    environment.configure(seat.config)
    parcel.settle(model)
    with keras.device(environment.device_name(replica)):
        assistant = _begin(model, replica, *words)
        try:
            _follow(assistant, replica)
        finally:
            assistant.close()


def _begin(model: Any, replica: Replica, told: Any) -> Assistant:
    become_like(model, told)
    environment.move([*model.variables, *model.metrics_variables], replica.device)
    setup.spread(environment.kept(model), replica)
    environment.own_dice(model, told["seed"], told["worker"] + setup.DEVICES * replica.index)
    model.train()
    return Assistant(model, Group(model, replica))


def _follow(assistant: Assistant, replica: Replica) -> None:
    while True:
        word, *words = broadcast_tree(replica.collective)
        if word == "work":
            assistant.work(*words)
        elif word == "kept":
            assistant.settle(*words)
        elif word == "report":
            assistant._group.drain(assistant)
        elif word == "forget":
            type(assistant.model).reset_metrics(assistant.model)
        else:
            assistant._group.close()
            return
