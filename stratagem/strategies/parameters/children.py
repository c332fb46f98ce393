"""The other workers of a local cluster: processes that are hired, called, watched and replaced.

A call goes on here beside the caller's own part of it. A child that ends in the middle of it is
replaced at once: the new one gets the same call, and takes part from there.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stratagem.errors import ReplicaError, ReplicaLost
from stratagem.replicas import follower, graph_pickle
from stratagem.replicas.pool import Follower, Pool
from stratagem.strategies.parameters.trouble import failed
from stratagem.strategies.parameters.worker import Worker

log = logging.getLogger("stratagem")

_TOGETHER = 10.0  # seconds that a call waits for children which are still starting
_IN_VAIN = 20  # replacements in a row that did not hand in a single gradient


@dataclass
class Hand:
    """A child that works: the process, and what is still to come of it."""

    index: int
    name: str
    pool: Pool
    #: when it was started
    hired: float = field(default_factory=time.monotonic)
    #: it has said that it is connected
    seated: bool = False
    #: it has been given the call that is under way
    called: bool = False
    #: its answer to that is still to come
    waiting: bool = False
    value: Any = None
    #: replacements since it was last known to have handed something in, and how much it had then
    in_vain: int = 0
    received: int = 0

    @property
    def one(self) -> Follower:
        return self.pool.followers[0]


class _Called(Exception):
    """The call is over; what was being done beside it is done no more."""


class Children:
    """All of them, at one call after the other."""

    def __init__(self, worker: Worker, start: Callable[[int], Pool], arrive: float) -> None:
        """`worker` is the one that this process is; who has not come after `arrive` seconds is
        replaced."""
        self._worker, self._start, self._arrive = worker, start, arrive
        self.hands: list[Hand] = []
        #: why the call under way cannot go on
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._parcel = b""
        self._segments: list[Any] = []
        self._overseer: threading.Thread | None = None

    def hire(self, indices: range) -> None:
        """Start these workers; they take their places meanwhile."""
        for i in indices:
            self.hands.append(Hand(i, f"worker {i}", self._start(i)))

    def begin(self, call: tuple[Any, ...]) -> None:
        """Have all of them run this, from now on beside whatever is done here."""
        self.error, self._done = None, threading.Event()
        if not self.hands:
            return
        self._parcel, self._segments = graph_pickle.dumps(call)
        for hand in self.hands:
            hand.called, hand.waiting, hand.value = False, True, None
            hand.in_vain = hand.received = 0
        self._wait_for_hands()
        self._overseer = threading.Thread(
            target=self._oversee, name="stratagem-children", daemon=True
        )
        self._overseer.start()

    def leave_alone(self) -> None:
        """What was to be done here is done: nobody is watched any more."""
        self._done.set()
        if self._overseer is not None:
            self._overseer.join()
            self._overseer = None

    def collect(self, *, trained: bool) -> list[Any]:
        """Wait for the answers: a training has been brought to its end without them."""
        if self.error is not None:
            raise self.error
        while any(hand.waiting for hand in self.hands):
            self._look(patiently, spare_the_silent=not trained)
        self._segments, self._parcel = [], b""
        for hand in self.hands:
            hand.pool.drain()
        return [hand.value for hand in self.hands]

    def end(self) -> None:
        for hand in self.hands:
            hand.pool.end()

    # --- beside the call --------------------------------------------------------------------

    def _wait_for_hands(self) -> None:
        """Let everybody begin together; but who takes long comes later."""
        until = time.monotonic() + _TOGETHER
        while time.monotonic() < until and not all(hand.called for hand in self.hands):
            self._look(patiently)

    def _oversee(self) -> None:
        """Hand the call to the children, replace those that die, see what failed."""
        while not self._done.is_set() and self.error is None:
            try:
                self._look(self._until_done)
            except _Called:
                return
            except BaseException as error:
                self.error = error
                self._worker.interrupt(error)

    def _until_done(self) -> None:
        if self._done.is_set():
            raise _Called

    def _look(self, watch: Callable[[], None], *, spare_the_silent: bool = True) -> None:
        """Take a tenth of a second to see what the children do."""
        for hand in self.hands:
            if hand.waiting and hand.seated and not hand.called:
                self._hand_over(hand, watch)
        waiting = {hand.one.control: hand for hand in self.hands if hand.waiting}
        for sock in select.select(list(waiting), [], [], 0.1)[0]:
            self._hear(waiting[sock], watch)
        given_up = self._worker.given_up | (set() if spare_the_silent else self._worker.silent)
        for hand in self.hands:
            if hand.waiting and hand.name in given_up:
                self._replace(hand, "does not answer any more")
            elif not hand.seated and time.monotonic() - hand.hired > self._arrive:
                self._replace(hand, "has not come")  # the lead does not know it yet

    def _hand_over(self, hand: Hand, watch: Callable[[], None]) -> None:
        try:
            hand.one.send(self._parcel, watch)
            hand.called = True
        except ConnectionError:
            self._replace(hand, "has ended")
        except _Called:
            self._replace(hand, "did not take its work")  # it has half of it
            raise

    def _hear(self, hand: Hand, watch: Callable[[], None]) -> None:
        answer = hand.one.answer(0.0, watch)
        if answer is None or _was_dropped(hand, answer):
            self._replace(hand, "has ended")
        elif answer.failed:
            hand.waiting = False
            raise _failure(hand.name, answer) from answer.error
        elif hand.seated:
            hand.waiting, hand.value = False, answer.value
        else:
            hand.seated = True

    def _replace(self, hand: Hand, why: str) -> None:
        received = self._received(hand)
        hand.in_vain = hand.in_vain + 1 if received == hand.received else 0
        hand.received = received
        if hand.in_vain > _IN_VAIN:
            raise ReplicaLost(
                f"{hand.name} ended again and again: {_IN_VAIN} replacements in a row have not "
                "handed in a single gradient. The last lines of their output stand above; is the "
                "machine out of memory?", hand.name,
            )  # fmt: skip
        log.warning("%s %s; another takes its place", hand.name, why)
        hand.pool.end()
        self._worker.given_up.discard(hand.name)
        self._worker.silent.discard(hand.name)
        hand.seated = hand.called = False
        hand.pool, hand.hired = self._start(hand.index), time.monotonic()

    def _received(self, hand: Hand) -> int:
        """How many gradients have come from a child's place so far."""
        try:
            stats = self._worker.stats()
        except (OSError, ReplicaError) as problem:
            log.info("the lead does not show its books: %s", problem)
            return hand.received
        return stats.by_worker.get(hand.index, {}).get("received", 0) if stats else 0


def patiently() -> None:
    """A child that lives is waited for."""


def _failure(name: str, answer: follower.Answer) -> BaseException:
    if isinstance(answer.error, ReplicaError):
        return answer.error  # it only passes on what happened to another
    return failed(name, answer.text)


def _was_dropped(hand: Hand, answer: follower.Answer) -> bool:
    """Whether a child says of itself that the others have gone on without it."""
    return isinstance(answer.error, ReplicaError) and answer.error.who == hand.name
