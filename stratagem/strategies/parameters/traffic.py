"""What travels between one worker and the servers of its training: values here, gradients there.

    fetch   the newest values of a shard               every server
    stage   this server's part of the gradient         every server but the lead

Where much has to travel, couriers do it beside the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from stratagem.strategies.parameters.courier import Courier
from stratagem.strategies.parameters.lines import Lines
from stratagem.strategies.parameters.memory import Memory

_MUCH = 1 << 20  # bytes of values, from which on threads pay off


class Traffic:
    """The part of a worker that moves tensors."""

    lines: Lines
    memory: Memory

    def __init__(self) -> None:
        self._couriers: list[Courier] = []
        #: servers to which gradients are on their way while they are made
        self._streamed: set[int] = set()

    def begin_traffic(self, memory: Memory) -> None:
        """A training begins: nothing has travelled yet."""
        self.memory = memory
        #: by server: the version of the values here; and after which order to ask for newer ones
        self._have = [-1] * len(self.lines)
        self._after = self.lines.news = 0
        #: whether rows of a gradient that did not count may still lie on the servers' desks
        self._leftovers = False
        #: by variable: whether it has had a gradient; whether any of them was sparse
        self._had, self._sparse = [False] * len(memory.params), False
        self._hire_couriers()

    @property
    def version(self) -> int:
        """The version of the values here: that of the oldest shard."""
        return min(self._have)

    # --- values -----------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for the values that come with a ticket."""
        self._await_couriers()
        self.memory.arrived()
        self.lines.news = max(self.lines.news, self.version)

    def refresh(self) -> None:
        """Fetch the newest values from every server."""
        for i in range(len(self.lines)):
            header = {"t": "fetch", "have": self._have[i], "after": self._after_of(i)}
            self._take_values(i, self.lines.call(i, header).header)
        self.memory.arrived()

    def _after_of(self, i: int) -> int:
        return 0 if i == 0 else self._after

    def _ask_others(self, after: int) -> None:
        for i in range(1, len(self.lines)):
            self.lines.write(i, {"t": "fetch", "have": self._have[i], "after": after})

    def _take_from(self, i: int) -> None:
        self._take_values(i, self.lines.receive(i).header)

    def _take_values(self, i: int, told: Mapping[str, Any]) -> None:
        into, settle = self.memory.incoming(i, told)
        if into:
            self.lines.read_into(i, into)
        settle()
        self._have[i] = int(told["version"])

    # --- gradients --------------------------------------------------------------------------

    def begin_backward(self, *, listens: bool = False) -> None:
        """Gradients are about to be made, once each: send each as soon as it is there.

        Who listens for news of the others keeps the lead's connection free for that.
        """
        if self._couriers and self.memory.streams:
            self.memory.begin()
            self._streamed = set(range(int(listens), len(self.lines)))
            for i in self._streamed:
                self._carry(i, partial(self._stream, i))

    def _stream(self, i: int) -> None:
        memory = self.memory
        self.lines.stream(i, {"t": "stage"}, memory.nbytes(i), memory.parts(i))

    def finish_stream(self) -> set[int]:
        """The servers whose gradients left while they were made; now they are all there."""
        if not self._couriers:
            return set()
        streamed, self._streamed = self._streamed, set()
        if streamed:
            self.memory.complete()
            self._await_couriers()
        # Once it is known of every variable that its gradients are not sparse.
        used = self.memory.used() or [True] * len(self._had)
        self._had = [a or b for a, b in zip(self._had, used, strict=True)]
        self._sparse = self._sparse or self.memory.has_rows
        self.memory.streams = all(self._had) and not self._sparse
        return streamed

    def _stage(self, i: int, header: dict[str, Any]) -> bool:
        """Send a server its part of the gradient, unless that lies in its reach already."""
        rows, body = self.memory.outgoing(i)
        if rows:
            header["rows"] = rows
        near = self.memory.handle is not None
        if header["t"] == "stage" and near and not rows and not self._leftovers:
            return False
        self.lines.write(i, header, body)
        return True

    # --- couriers ---------------------------------------------------------------------------

    def _hire_couriers(self) -> None:
        """Where much has to travel it does so beside the computation."""
        self._dismiss_couriers()
        if not self.lines.near and self.memory.values.nbytes >= _MUCH:
            self._couriers = [Courier(f"courier-{i}") for i in range(len(self.lines))]

    def _dismiss_couriers(self) -> None:
        for courier in self._couriers:
            courier.end()
        self._couriers = []

    def _carry(self, i: int, errand: Callable[[], None]) -> None:
        if self._couriers:
            self._couriers[i].send(errand)
        else:
            errand()

    def _await_couriers(self) -> None:
        for courier in self._couriers:
            courier.wait()
