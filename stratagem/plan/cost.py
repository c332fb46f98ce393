"""Predict a step: the closed forms, put together for one configuration.

    predict(profile, hardware, Configuration(MULTI_WORKER, hosts=4)).step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.errors import UsageError
from stratagem.plan.calibration import Calibration
from stratagem.plan.configuration import SERVERS, Configuration
from stratagem.plan.formulas import largest_share, overlapped, ring, transfer
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import Profile
from stratagem.plan.stragglers import sampled
from stratagem.plan.units import say_rate, say_seconds
from stratagem.strategies.parameters.plan import sends_at_once
from stratagem.wire.turns import Rule

#: beyond so many, threads copy no faster
_MEMORY_THREADS = 4
_MESSAGES, _INSIDE = "messages", "links inside the host"


@dataclass(frozen=True)
class Prediction:
    """What a configuration does; `parts` are the seconds of a step, and add up to it."""

    configuration: Configuration
    #: seconds in which every counted replica has handed in once
    step: float
    #: examples a second
    rate: float
    #: to one device, and what is left of it for each replica
    speedup: float
    #: updates of the parameters a second
    updates: float
    parts: Mapping[str, float]
    #: what most of the step is spent on
    limit: str
    #: where `step` lies for certain: asynchronous workers stay out of each other's way, or in it,
    #: as chance has it
    within: tuple[float, float]

    @property
    def efficiency(self) -> float:
        return self.speedup / self.configuration.replicas

    def to_json(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration.to_json(), "name": str(self.configuration),
            "replicas": self.configuration.replicas, "step_s": self.step,
            "examples_per_s": self.rate, "speedup": self.speedup, "efficiency": self.efficiency,
            "updates_per_s": self.updates, "parts_s": dict(self.parts), "limit": self.limit,
            "step_within_s": list(self.within),
        }  # fmt: skip


def predict(
    profile: Profile, hardware: Hardware, configuration: Configuration,
    calibration: Calibration | None = None,
) -> Prediction:  # fmt: skip
    """One configuration on this hardware; the number of hosts may be more than it has."""
    case = _Case(profile, hardware, configuration, calibration or Calibration())
    if configuration.replicas == 1 and configuration.strategy != SERVERS:
        parts = {"compute": profile.compute, "optimizer": profile.optimizer}
        return case.told(parts, sum(parts.values()))
    if configuration.strategy == SERVERS or (configuration.served and not case.shares):
        return case.asynchronous() if configuration.asynchronous else case.synchronous()
    _check(profile, configuration)
    return case.mirrored()


def single(profile: Profile) -> float:
    """Examples a second of one device."""
    return profile.batch / max(profile.compute + profile.optimizer, 1e-12)


def _check(profile: Profile, configuration: Configuration) -> None:
    if profile.sparse:
        raise UsageError(
            f"{profile.name} has sparse gradients, which {configuration.strategy} cannot add up; "
            "plan ParameterServerStrategy."
        )


class _Case:
    """One prediction on its way."""

    def __init__(
        self, profile: Profile, hardware: Hardware, configuration: Configuration,
        calibration: Calibration,
    ) -> None:  # fmt: skip
        self.profile, self.hw = profile, hardware
        self.cfg, self.cal = configuration, calibration
        self.on_cpu = profile.device == "cpu"
        self.scale = self._crowded() / profile.compute if profile.compute > 0 else 1.0
        self.link = hardware.link * calibration.goodput
        #: of what travels between a worker and the servers, the part of the fullest of them
        self.share = self._share() if configuration.served else 1.0
        #: bytes of one worker's gradient, and of the values that it fetches for the next
        self.pushes = profile.travels(1, configuration.travelling)
        self.pulls = profile.travels(configuration.replicas, configuration.travelling)
        self.forward = profile.forward * self.scale
        self.compute = profile.compute * self.scale

    # --- computing ----------------------------------------------------------------------------

    def _crowded(self) -> float:
        """Forward and backward while the other replicas of the host compute, too."""
        profile, here = self.profile, self.cfg.per_host
        if not self.on_cpu or here == 1:
            return profile.compute
        known = dict(profile.crowd)
        if known:  # among others nobody is faster than alone: that was the machine's unrest
            seen = _between(here, {1: profile.compute, **known}, self.hw.cores)
            return max(seen, profile.compute)
        cores = self.hw.cores
        alone = profile.with_threads(max(1, cores // here)) * max(1.0, here / cores)
        return alone * (1 + self.cal.contention * (min(here, cores) - 1))

    def waiting(self) -> float:
        """How much longer than usual the last replica that counts takes."""
        spread, n = self.profile.spread, self.cfg.replicas
        factor = sampled(self.cfg.counted, n, spread)
        if self.on_cpu and self.cfg.hosts == 1 and self.profile.crowd:
            factor /= sampled(n, n, spread)  # the slowest of all is in what was measured
        return self.compute * max(0.0, factor - 1)

    # --- mirrored -----------------------------------------------------------------------------

    @property
    def in_memory(self) -> bool:
        """Whether gradients meet in memory that all replicas map."""
        return self.on_cpu and self.cfg.hosts == 1

    @property
    def shares(self) -> bool:
        """Whether central parameters lie in that memory, and no server is needed."""
        return self.in_memory and not self.cfg.asynchronous and not self.cfg.spares

    def mirrored(self) -> Prediction:
        if self.in_memory and self.cfg.wire is None:
            return self._shared_memory()
        profile, cal = self.profile, self.cal
        slow = self.waiting()
        end = self.compute + slow
        sizes = [(b.size * self.cfg.travelling, b.ready) for b in profile.buckets]
        ready = [(s, self.forward + slow + t * self.scale) for s, t in sizes[:-1]]
        ready += [(s, end) for s, _ in sizes[-1:]]  # its notes are known when backward has ended
        exposed = max(0.0, overlapped(ready, self.all_reduce) - end)
        cast = 2 * profile.dense_bytes / cal.cast if self.cfg.wire and self.on_cpu else 0.0
        times = profile.accumulated  # in a loop of one's own the gradient of each travels
        cast *= times
        parts = {
            "compute": self.compute, "stragglers": slow, **self._exposed(exposed * times),
            "optimizer": profile.optimizer, "overhead": cal.step * times,
            **({"rounding to 16 bits": cast} if cast else {}),
        }  # fmt: skip
        return self.told(parts, sum(parts.values()))

    def all_reduce(self, size: float) -> float:
        """Seconds of one bucket."""
        return math.fsum(self._carried(size).values())

    def _carried(self, size: float) -> dict[str, float]:
        """Seconds of one bucket, by what they are spent on."""
        cfg, hw = self.cfg, self.hw
        message = self.cal.message if self.on_cpu else self.cal.kernel
        inside = self._inside()
        here = {_MESSAGES: (hw.local_latency + message / 4, 0.0), _INSIDE: (0.0, inside)}
        there = {
            _MESSAGES: (message / 4, 0.0), self._latency(): (hw.latency, 0.0),
            self._between(): (0.0, min(self.link, inside)),
        }  # fmt: skip
        if cfg.hosts == 1:
            rings = [_ring(size, cfg.replicas, here)]
        elif cfg.hierarchical:
            rings = [_ring(size, cfg.per_host, here), _ring(size, cfg.hosts, there)]
        else:
            many = 1 - 2 / cfg.replicas if cfg.wire and self.on_cpu else 0.0
            rings = [_ring(size, cfg.replicas, there, 1 + self.cal.half * many)]
        return _added({_MESSAGES: message}, *rings)

    def _exposed(self, seconds: float) -> dict[str, float]:
        """What is left of it behind backward, as all of it is spent."""
        whole = _added(*(self._carried(b.size * self.cfg.travelling) for b in self.profile.buckets))
        total = math.fsum(whole.values())
        return {name: seconds * (part / total if total else 0.0) for name, part in whole.items()}

    def _inside(self) -> float:
        """Bytes a second that a ring carries inside a host."""
        return min(self.hw.local, self.cal.sockets) if self.on_cpu else self.hw.local

    def _between(self) -> str:
        """What keeps bytes between hosts from being faster."""
        if self.link > self._inside():
            return "what a host's sockets carry"
        return f"links between hosts ({say_rate(self.hw.link)})"

    def _latency(self) -> str:
        return f"latency between hosts ({say_seconds(self.hw.latency)})"

    def _shared_memory(self) -> Prediction:
        """Every replica copies its gradient, adds up its slice of all, and updates that slice."""
        profile, n = self.profile, self.cfg.replicas
        size = profile.dense_bytes
        threads = min(_MEMORY_THREADS, max(1, self.hw.cores // n))
        adding = size * (2 + 1 / n) / (self.hw.local * threads)
        times = profile.accumulated
        parts = {
            "compute": self.compute, "stragglers": self.waiting(), "memory": adding * times,
            "optimizer": profile.optimizer / n * self.crowding, "overhead": self.cal.step * times,
        }  # fmt: skip
        return self.told(parts, sum(parts.values()))

    @property
    def crowding(self) -> float:
        """How much slower memory is with all replicas of a host at work."""
        if self.profile.crowd and self.profile.compute > 0:
            return max(1.0, self._crowded() / (self.profile.single_thread or self.profile.compute))
        return 1 + self.cal.contention * (min(self.cfg.per_host, self.hw.cores) - 1)

    # --- servers ------------------------------------------------------------------------------

    def _share(self) -> float:
        """Of a gradient, the part of the fullest server."""
        profile, size = self.profile, self.profile.itemsize
        tables = [(table.rows, max(1, table.row_bytes // size)) for table in profile.sparse]
        parts = [1.0] * len(profile.shapes) + [t.touched / t.rows for t in profile.sparse]
        return largest_share(
            (*profile.shapes, *tables), size, max(1, self.cfg.servers), tuple(parts)
        )

    def _rates(self, at_once: float | None = None) -> tuple[float, float]:
        """Of a worker's way to the servers, and of a server's to the workers.

        With so many of them at once; else all of a host share its link.
        """
        if self.cfg.hosts == 1:
            return self.hw.local, self.hw.local
        slower, here = 1 / self.cal.cipher, float(self.cfg.per_host)
        worker = self.link / (here if at_once is None else max(1.0, min(here, at_once)))
        return 1 / (1 / worker + slower), 1 / (1 / self.link + slower)

    def _at_once(self) -> float:
        """How many workers push at the same time, when values were sent to so many at a time.

        Who had them first pushes while others still fetch; not all of that comes true. Small values
        are sent to all who ask.
        """
        cfg = self.cfg
        if cfg.hosts == 1 or not Rule().waits(self.pulls * self.share):
            return cfg.replicas
        together = min(cfg.replicas, sends_at_once(cfg.replicas, cfg.servers, in_step=True))
        return together + (cfg.replicas - together) * (1 - self.cal.turns)

    def _update(self) -> float:
        """The fullest server's optimizer, once.

        Where it would take less than one device's, by a faster kernel that one device could run,
        too, or because several servers share it out, nothing is gained by that here: nobody gets
        more than one device's worth from a replica because of its optimizer alone.
        """
        profile, rate = self.profile, self.hw.update
        dense = profile.dense_bytes / rate if profile.server is None else profile.server
        whole = dense + profile.sparse_bytes / rate
        return max(whole * self.share, profile.optimizer)

    def _talk(self) -> dict[str, float]:
        """Messages of one step: push, its answer, a ticket, its values."""
        messages = self.cal.exchange * max(1, self.cfg.servers)
        if self.cfg.hosts == 1:
            return {_MESSAGES: 4 * self.hw.local_latency + messages}
        return {self._latency(): 4 * self.hw.latency, _MESSAGES: messages}

    def synchronous(self) -> Prediction:
        cfg = self.cfg
        slow = self.waiting()
        end = self.compute + slow
        size, values = self.pushes, self.pulls
        pull = transfer(values, values * self.share, cfg.replicas, *self._rates())
        at_once = self._at_once()
        push = transfer(size, size * self.share, at_once, *self._rates(at_once))
        pushed = self._pushed(slow, push / size if size else 0.0)
        adding = cfg.counted * size * self.share / self.hw.local if cfg.hosts == 1 else 0.0
        parts = {
            "compute": self.compute, "stragglers": slow,
            self._server_link(cfg.replicas): max(0.0, pushed - end) + pull,
            "the servers' update": self._update() + adding, **self._talk(),
        }  # fmt: skip
        return self.told(parts, sum(parts.values()))

    def _pushed(self, slow: float, per_byte: float) -> float:
        """When the last gradient is with the servers; they travel while backward makes others."""
        end = self.compute + slow
        if self.profile.sparse or self.cfg.hosts == 1:
            return end + per_byte * self.pushes
        parts = [
            (b.size * self.cfg.travelling, self.forward + slow + b.ready * self.scale)
            for b in self.profile.stream
        ]
        return max(end, overlapped(parts, lambda size: size * per_byte))

    def asynchronous(self) -> Prediction:
        """Workers go round by themselves, past a server's link in, its update, its link out.

        One server has them in turn, and they fall into an order in which nobody waits, or one of
        the three is never idle. At several, who comes meets as many as there are on average
        with one worker less (mean value analysis).
        """
        size, values = self.pushes, self.pulls
        here = 2 * size * self.share / self.hw.local if self.cfg.hosts == 1 else 0.0
        update, talk = self._update() + here, self._talk()

        def times(others: int, met: float, waiting: float) -> tuple[float, float, float]:
            each = self._met(size, others, met) / size if size else 0.0
            pushed = max(0.0, self._pushed(0.0, each) - self.compute)
            return pushed, self._met(values, others, met), update * (1 + waiting)

        def cycle(*spent: float) -> float:
            return self.compute + sum(spent) + sum(talk.values())

        replicas, met, waiting = self.cfg.replicas, 0.0, 0.0
        if self.cfg.hosts > 1 and self.cfg.servers == 1:
            pushed, took, updated = times(0, 0, 0)
            full = replicas * max(max(size, values) / self._rates()[1], update)
            waits = max(0.0, full - cycle(pushed, took, updated))
            if full > updated * replicas:
                took, met = took + waits, replicas - 1
            else:
                updated += waits
        else:
            for n in range(1, replicas + 1):
                pushed, took, updated = times(n - 1, met, waiting)
                round_ = cycle(pushed, took, updated)
                met, waiting = n * took / round_, n * updated / round_
        parts = {
            "compute": self.compute, self._server_link(1 + met): pushed + took,
            "the servers' update": updated, **talk,
        }  # fmt: skip
        apart, in_step = cycle(*times(0, 0, 0)), cycle(*times(*[replicas - 1] * 3))
        return self.told(parts, sum(parts.values()), (apart, in_step))

    def _met(self, size: float, others: int, met: float) -> float:
        """A transfer that meets so many of the others on average, each of them by chance.

        Several servers are not full before several workers are there. So a crowd makes it slower,
        and nobody there makes it no faster: the number that is met on average is not enough.
        """
        worker, server = self._rates()
        alone, each = size / worker, size * self.share / server
        chance = met / others if others else 0.0
        if chance >= 1:
            return max(alone, each * (1 + others))
        took, likely, n = each * (1 + met), (1 - chance) ** others, 0
        while n <= others and each * (1 + n) < alone:  # so few that the worker's own link binds
            took += likely * (alone - each * (1 + n))
            likely *= (others - n) / (n + 1) * chance / (1 - chance)
            n += 1
        return took

    def _server_link(self, at_once: float) -> str:
        """Whose link binds with so many workers at a server."""
        if self.cfg.hosts == 1:
            return "memory"
        worker, server = self._rates()
        whose = "a worker's" if 1 / worker >= at_once * self.share / server else "a server's"
        if self.link > self.cal.cipher * (self.cfg.per_host if "worker" in whose else 1):
            return f"{whose} encryption"
        return f"{whose} link ({say_rate(self.hw.link)})"

    # --- the result ---------------------------------------------------------------------------

    def told(
        self, parts: dict[str, float], step: float, within: tuple[float, float] | None = None
    ) -> Prediction:
        cfg = self.cfg
        rate = cfg.counted * self.profile.batch / max(step, 1e-12)
        updates = (cfg.replicas if cfg.asynchronous else 1) / max(step, 1e-12)
        limit = max(parts, key=lambda name: parts[name])
        return Prediction(
            cfg, step, rate, rate / single(self.profile), updates, parts, limit,
            within or (step, step),
        )  # fmt: skip


def _ring(
    size: float, n: int, causes: Mapping[str, tuple[float, float]], longer: float = 1.0
) -> dict[str, float]:
    """A ring's seconds by cause: what a hop takes, or the rate of what is carried."""
    return {
        name: longer * (ring(size, n, 0.0, rate) if rate else ring(0.0, n, hop, 1.0))
        for name, (hop, rate) in causes.items()
    }


def _added(*parts: Mapping[str, float]) -> dict[str, float]:
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: math.fsum(each.get(name, 0.0) for each in parts) for name in names}


def _between(n: int, known: Mapping[int, float], cores: int) -> float:
    """What n replicas take, from the nearest numbers of replicas that are known.

    Each has its whole share of the cores as threads, so 12 of 16 cores take what 16 take, and
    between two numbers it is the load of a thread that counts.
    """
    def load(m: int) -> float:
        return max(1.0, m / cores) / max(1, cores // m)

    alike = [m for m in known if load(m) == load(n)]
    if alike:
        return known[min(alike, key=lambda m: abs(m - n))]
    points = sorted((load(m), seconds) for m, seconds in known.items())
    if len(points) == 1:
        return points[0][1]
    right = next((i for i, (at, _) in enumerate(points) if at > load(n)), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, right - 1)], points[max(1, right)]
    return max(y0 + (y1 - y0) * (load(n) - x0) / (x1 - x0), 0.0)
