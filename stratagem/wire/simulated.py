"""A simulated network in virtual time: links and latencies decide how long messages take.

    host ==up==> [ rack ==up==> core ==down==> rack ] ==down==> host

A message has a fair share of every link on its route, as TCP streams do, and has passed when the
slowest of them has let it through: one full link bounds a transfer exactly, and the senders to one
server share its down link (incast). Nothing is random.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf, isfinite, nan
from typing import Any, NamedTuple

from stratagem.errors import UsageError

Action = Callable[[], None]


class Clock:
    """Virtual time: runs actions in order of time, then in the order they were scheduled.

    Consecutive actions for the same time, as of all workers that wait for one update, share an
    event: the order is the same, and there are fewer events.
    """

    def __init__(self) -> None:
        self.now = 0.0
        #: a heap of events, each [time, number, action, further actions of the same time...]
        self._due: list[list[Any]] = []
        self._number = count()
        self._stopped = False
        #: the last scheduled event, and its time, NaN once it has begun
        self._last: list[Any] = []
        self._last_time = nan

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Action) -> None:
        """Schedule an action at a time, or now if that has passed."""
        if time < self.now:
            time = self.now
        if time == self._last_time:
            self._last.append(action)
        else:
            self._last, self._last_time = [time, next(self._number), action], time
            heappush(self._due, self._last)

    def after(self, seconds: float, action: Action) -> None:
        """Schedule an action after so many seconds."""
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Run scheduled actions until none is left or `stop` is called."""
        self._stopped, due = False, self._due
        while due:
            event = heappop(due)
            self.now = event[0]
            if event is self._last:
                self._last_time = nan  # a running event takes no more actions
            if len(event) == 3:  # a shortcut for the usual event of one action
                event[2]()
                if self._stopped:
                    return
                continue
            for done, action in enumerate(event[2:], 3):
                action()
                if self._stopped:
                    if event[done:]:
                        heappush(due, [*event[:2], *event[done:]])
                    return

    def stop(self) -> None:
        """End `run` after the current action."""
        self._stopped = True


class SimulatedLink:
    """One direction of a cable, shared evenly by its current streams.

    `_served` counts the bytes that a stream present from the start would have had so far; a stream
    ends when `_served` has grown by its size. So the order in which streams end is known, and one
    event is enough for all of them. Most are of one size, and end in the order they came.
    """

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock, self._rate = clock, rate
        self._streams: list[tuple[float, int, Action]] = []
        self._served = self._since = 0.0
        self._number = count()
        self._open = True
        self._alarm = inf  # the time of the next `_look`

    def send(self, size: float, then: Action) -> None:
        """Let `size` bytes pass, then act."""
        streams, now = self._streams, self._clock.now
        if streams and self._open:  # `_progress`, inlined as it is called often
            self._served += (now - self._since) * self._rate / len(streams)
        self._since = now
        stream = (self._served + size, next(self._number), then)
        if not streams or stream > streams[-1]:
            streams.append(stream)
        else:
            insort(streams, stream)
        if streams[0] is stream:  # else the scheduled look is early enough
            self._look_later()

    def stop(self) -> None:
        """Let nothing pass until `go`; current streams wait."""
        self._progress()
        self._open = False

    def go(self) -> None:
        """Let streams pass again."""
        self._progress()
        self._open = True
        self._look_later()

    def _progress(self) -> None:
        now = self._clock.now
        if self._streams and self._open:
            self._served += (now - self._since) * self._rate / len(self._streams)
        self._since = now

    def _look_later(self) -> None:
        """Schedule a look for the end of the first stream, unless one is due before."""
        streams = self._streams
        if not streams or not self._open:
            return
        left = streams[0][0] - self._served
        end = self._clock.now + (left * len(streams) / self._rate if left > 0.0 else 0.0)
        if end < self._alarm:
            self._alarm = end
            self._clock.at(end, self._look)

    def _look(self) -> None:
        if self._clock.now < self._alarm:
            return  # an earlier look has replaced this one
        self._alarm = inf
        streams, rate, now = self._streams, self._rate, self._clock.now
        if streams and self._open:  # `_progress`
            self._served += (now - self._since) * rate / len(streams)
        self._since = now
        # times closer than the clock's resolution are equal
        soon = 1e-12 * now if now > 1.0 else 1e-12
        while streams and self._open:
            left = (streams[0][0] - self._served) * len(streams) / rate
            if left > soon:
                end = now + left  # `_look_later`
                if end < self._alarm:
                    self._alarm = end
                    self._clock.at(end, self._look)
                break
            streams.pop(0)[2]()


@dataclass(frozen=True)
class Topology:
    """Hosts and the links between them; rates are in bytes per second and direction.

    Topology(rate=1.25e9, latency=50e-6)                      10 Gbit/s, all alike
    Topology(rate=1.25e9, per_rack=16, rack_rate=5e9)         racks with a narrower way out
    Topology(rate=1.25e9, per_host=8, inside_rate=100e9)      eight tasks behind one cable
    """

    rate: float
    latency: float = 0.0
    per_host: int = 1
    inside_rate: float = inf
    inside_latency: float = 0.0
    per_rack: int = 0
    rack_rate: float = inf

    def __post_init__(self) -> None:
        for name in ("rate", "inside_rate", "rack_rate"):
            if not getattr(self, name) > 0:
                raise UsageError(
                    f"{name} of a topology is {getattr(self, name)}; it is in bytes per second and "
                    "more than 0, as 1.25e9 for 10 Gbit/s."
                )
        for name in ("latency", "inside_latency"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError(f"{name} of a topology is a number of seconds, 0 or more.")
        if self.per_host < 1 or self.per_rack < 0:
            raise UsageError("per_host of a topology is at least 1, per_rack at least 0.")

    def host(self, task: int) -> int:
        """Return the host of a task, when tasks fill one host after the other."""
        return task // self.per_host


class Flow(NamedTuple):
    """Bytes from host to host: `out` of the source, `into` the target.

    They differ where one flow stands for many equal ones, of which one end sends or receives all.
    """

    source: int
    target: int
    out: float
    into: float


class Route:
    """Flows that are sent together; links that several of them pass carry their sum.

    least   the seconds that it takes at least, for links that no other route uses
    own     flows over such links, if these may be cut
    calm    the time of their first cut: before it these flows take `least`
    """

    def __init__(
        self,
        network: Network,
        flows: Sequence[Flow],
        least: float = 0.0,
        own: Sequence[Flow] = (),
        calm: float = inf,
    ) -> None:
        self._network, self._least, self._calm = network, least, calm
        self._clock, self._cuts = network.clock, network.cuts
        self._hosts = {host for flow in flows for host in (flow.source, flow.target)}
        self.latency = max(network.latency(flow.source, flow.target) for flow in flows)
        self._loads, self._own = self._sums(flows), self._sums(own)
        alone = len(self._loads) == 1
        self._only = next(iter(self._loads.items())) if alone else None

    def _sums(self, flows: Sequence[Flow]) -> dict[SimulatedLink, float]:
        loads: dict[SimulatedLink, float] = {}
        for flow in flows:
            for link, size in self._network.way(flow):
                if size > 0:
                    loads[link] = loads.get(link, 0.0) + size
        return loads

    @property
    def is_cut(self) -> bool:
        """Whether one of its hosts is off the network."""
        return self._network.is_cut(self._hosts)

    def send(self, then: Action, later: float = 0.0, passed: Action | None = None) -> None:
        """Send all flows, then call `then` on arrival, or `later` seconds after it.

        `passed` is called when the links are free again.
        """
        if self._cuts and self.is_cut:
            self._network.hold(partial(self.send, then, later, passed))
        elif self._loads:
            late, now = self.latency + later, self._clock.now
            earliest = now + self._least + late
            done: Action = partial(self._passed, late, earliest, then, passed)
            if self._own and now + self._least >= self._calm:
                done = self._over_own(partial(self._passed, late, earliest, then, None), passed)
            if self._only is not None:  # one link
                link, size = self._only
                link.send(size, done)
                return
            passage = _Passage(len(self._loads), done)
            for link, size in self._loads.items():
                link.send(size, passage.passed)
        else:
            self._clock.after(self._least + self.latency + later, then)
            if passed is not None:
                passed()

    def _over_own(self, done: Action, passed: Action | None) -> Action:
        """Send over the own links, too; returns what to call after the shared links."""
        passage = _Passage(1 + len(self._own), done)
        for link, size in self._own.items():
            link.send(size, passage.passed)

        def shared() -> None:
            passage.passed()
            if passed is not None:
                self._unless_cut(passed)

        return shared

    def _unless_cut(self, action: Action) -> None:
        """Act now, or when all its hosts are back on the network."""
        if self.is_cut:
            self._network.hold(partial(self._unless_cut, action))
        else:
            action()

    def _passed(self, late: float, earliest: float, then: Action, passed: Action | None) -> None:
        clock = self._clock
        at = clock.now + late
        clock.at(at if at > earliest else earliest, then)
        if passed is not None:
            passed()


class _Passage:
    """Counts the links that are still to be passed."""

    __slots__ = ("_left", "_then")

    def __init__(self, left: int, then: Action) -> None:
        self._left, self._then = left, then

    def passed(self) -> None:
        self._left -= 1
        if not self._left:
            self._then()


class Network:
    """Carries messages between hosts; links are created when first used."""

    def __init__(self, clock: Clock, topology: Topology) -> None:
        self.clock, self.topology = clock, topology
        self._links: dict[tuple[str, int], SimulatedLink] = {}
        #: hosts that are off the network, and how many cuts keep them off
        self.cuts: dict[int, int] = {}
        self._held: list[Action] = []

    def send(self, source: int, target: int, size: float, then: Action) -> None:
        """Carry `size` bytes from host to host, then act there."""
        Route(self, [Flow(source, target, size, size)]).send(then)

    def latency(self, source: int, target: int) -> float:
        """Return the seconds that an empty message takes."""
        same = source == target
        return self.topology.inside_latency if same else self.topology.latency

    def is_cut(self, hosts: set[int]) -> bool:
        """Whether messages between these hosts have to wait."""
        return len(hosts) > 1 and not hosts.isdisjoint(self.cuts)

    def hold(self, message: Action) -> None:
        """Send a message when a host comes back."""
        self._held.append(message)

    def cut(self, host: int) -> None:
        """Take a host off the network; messages under way wait."""
        self.cuts[host] = self.cuts.get(host, 0) + 1
        for link in self._cables(host):
            link.stop()

    def mend(self, host: int) -> None:
        """Undo a cut; the host is back once no cut is left."""
        left = self.cuts.pop(host) - 1
        if left:
            self.cuts[host] = left
            return
        for link in self._cables(host):
            link.go()
        held, self._held = self._held, []
        for message in held:
            message()

    def _cables(self, host: int) -> list[SimulatedLink]:
        rate = self.topology.rate
        return self._link("up", host, rate) + self._link("down", host, rate)

    def way(self, flow: Flow) -> list[tuple[SimulatedLink, float]]:
        """Return the links that a flow passes and its bytes on each; not infinitely fast ones."""
        shape, (source, target, out, into) = self.topology, flow
        if source == target:
            return [(link, out) for link in self._link("inside", source, shape.inside_rate)]
        here = self._link("up", source, shape.rate)
        there = self._link("down", target, shape.rate)
        if shape.per_rack and source // shape.per_rack != target // shape.per_rack:
            here += self._link("rack up", source // shape.per_rack, shape.rack_rate)
            there += self._link("rack down", target // shape.per_rack, shape.rack_rate)
        return [(link, out) for link in here] + [(link, into) for link in there]

    def _link(self, name: str, number: int, rate: float) -> list[SimulatedLink]:
        if rate == inf:
            return []
        if (name, number) not in self._links:
            self._links[name, number] = SimulatedLink(self.clock, rate)
        return [self._links[name, number]]
