"""Predict the step of a configuration from the closed forms (formulas.py).

predict(profile, hardware, Configuration(MULTI_WORKER, hosts=4)).step
"""

from __future__ import annotations

import math
from functools import cached_property

from stratagem.errors import UsageError
from stratagem.plan.configuration import SERVERS, SHARDED, Configuration
from stratagem.plan.formulas import (
    Calibration,
    added,
    largest_share,
    overlapped,
    ring_by_cause,
    sampled,
    shared_transfer,
    transfer,
)
from stratagem.plan.hardware import Hardware, say_rate
from stratagem.plan.lossy import sent
from stratagem.plan.predicted_step import PredictedStep
from stratagem.plan.predicted_step import Prediction as Prediction
from stratagem.plan.profile import Profile
from stratagem.plan.staged_step import StagedStep
from stratagem.servers.training_plan import sends_at_once
from stratagem.wire.send_queue import TurnRule

#: more threads than this copy no faster
_MEMORY_THREADS = 4
#: passes over the weights in a meeting: read, subtract, step, write, read again
_MEETING = 5
_MESSAGES, _INSIDE = "messages", "links inside the host"


def predict(
    profile: Profile,
    hardware: Hardware,
    configuration: Configuration,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict one configuration, which may use more hosts than the hardware has."""
    given = (profile, hardware, configuration, calibration or Calibration())
    if configuration.replicas == 1 and configuration.strategy != SERVERS:
        parts = {"compute": profile.compute, "optimizer": profile.optimizer}
        return PredictedStep(*given).prediction(parts)
    free = configuration.asynchronous or configuration.spares
    in_memory = profile.device == "cpu" and configuration.hosts == 1
    if configuration.strategy == SERVERS or (configuration.served and (free or not in_memory)):
        served = _ServerStep(*given)
        return served.asynchronous() if configuration.asynchronous else served.synchronous()
    if profile.sparse:
        raise UsageError(
            f"{profile.name} has sparse gradients, which {configuration.strategy} cannot add up; "
            "plan ParameterServerStrategy."
        )
    if configuration.staged:
        return StagedStep(*given).staged()
    mirrored = _MirroredStep(*given)
    if configuration.strategy == SHARDED and not in_memory:
        return mirrored.gathered()
    if in_memory and configuration.wire is None:
        return mirrored.shared_memory()
    return mirrored.compressed() if configuration.lossy else mirrored.all_reduced()


class _MirroredStep(PredictedStep):
    """A step of replicas that all-reduce, shard, or share memory."""

    def all_reduced(self) -> Prediction:
        profile, cal = self.profile, self.cal
        slow = self.waiting()
        end = self.compute + slow
        sizes = [(b.size * self.cfg.travelling, b.ready) for b in profile.buckets]
        ready, late = [], 0.0
        for size, at in sizes[:-1]:
            ready.append((size, self.forward + slow + at * self.scale + late))
            late += self.handled(size)
        # the last bucket carries the notes, which are known when backward has ended
        ready += [(s, end + late) for s, _ in sizes[-1:]]
        exposed = max(0.0, overlapped(ready, lambda s: math.fsum(self._carried(s).values())) - end)
        if self.cfg.every > 1:
            met = added(*(self._carried(s / self.cfg.fragments) for s, _ in sizes))
            exposed = math.fsum(self._not_hidden(met).values())
        cast = 2 * profile.dense_bytes / cal.cast if self.cfg.wire and self.on_cpu else 0.0
        times = profile.accumulated  # a custom loop all-reduces every micro-batch
        cast *= times
        parts = {
            "compute": self.compute,
            "stragglers": slow,
            **self._exposed(exposed * times),
            "optimizer": profile.optimizer,
            "overhead": cal.step * times,
            **({"rounding to 16 bits": cast} if cast else {}),
            **self._weight_passes(),
        }
        return self.prediction(parts)

    def compressed(self) -> Prediction:
        """A step with compressed gradients, as if they were sent when backward has ended.

        In a model of several buckets the first are sent before that, which is not counted.

        Each replica sends every other one the slice that it adds up, and gets the sum; the replicas
        of a host share its link. PowerSGD all-reduces its factors.
        """
        profile, cfg, cal = self.profile, self.cfg, self.cal
        wire = cfg.wire or ""
        seconds = {each.wire: each.among(cfg.replicas) for each in profile.codecs}
        if wire not in seconds:
            raise UsageError(f"the encoding of wire={wire} was not measured; plan with --lossy.")
        goes = sent(wire, profile.shapes, profile.itemsize, cfg.replicas)
        apart = cfg.per_host * 2 * (cfg.replicas - cfg.per_host) * goes.slices / cfg.fragments
        each = cfg.every == 1
        met = 2 * (len(profile.buckets) if each else 1)  # gradient and sum of each bucket
        carried = added(
            *(self._carried(size / cfg.fragments) for size in goes.rounds),
            {self._between(): apart / min(self.link, self._inside())},
            {self._latency(): met * self.hw.latency, _MESSAGES: met * cal.message} if apart else {},
            self._carried(0.0) if each else {},  # the notes
        )
        parts = {
            "compute": self.compute,
            "stragglers": self.waiting(),
            "compressing": seconds[wire] * self.crowding / cfg.every,
            **self._not_hidden(carried),
            "optimizer": profile.optimizer,
            "overhead": cal.step,
            **self._weight_passes(),
        }
        return self.prediction(parts)

    def _not_hidden(self, carried: dict[str, float]) -> dict[str, float]:
        """Seconds per step of sending the fragments that are not hidden behind computation.

        DiLoCo sends a fragment during `overlap` updates; all else is sent when a step is over.
        """
        cfg, whole = self.cfg, math.fsum(carried.values())
        beside = cfg.sync.delay * (self.compute + self.profile.optimizer)
        left = max(0.0, whole - beside) / whole if whole else 0.0
        return {name: part * left * cfg.fragments / cfg.every for name, part in carried.items()}

    def _weight_passes(self) -> dict[str, float]:
        """Seconds per step of the passes over the weights in a meeting, on CPUs."""
        if self.cfg.every == 1 or not self.on_cpu:
            return {}
        passes = _MEETING * self.profile.dense_bytes / self.hw.local
        return {"meeting": passes / self.cfg.every}

    def gathered(self) -> Prediction:
        """A step of fully_shard: all-gather for forward and for backward, then reduce-scatter.

        Each moves (n-1)/n of all bytes, half of an all-reduce. On CPUs none of it overlaps; on GPUs
        it is hidden as far as the computation is long enough.
        """
        profile, cal = self.profile, self.cal
        slow = self.waiting()
        once = added(*(self._carried(bucket.size) for bucket in profile.buckets))
        times = 1.5 * profile.accumulated
        total = times * math.fsum(once.values())
        exposed = total if self.on_cpu else max(0.0, total - self.compute)
        parts = {
            "compute": self.compute,
            "stragglers": slow,
            **{name: exposed * part * times / total for name, part in once.items() if total},
            "optimizer": profile.optimizer / self.cfg.replicas,
            "overhead": cal.step * profile.accumulated,
        }
        return self.prediction(parts)

    def _carried(self, size: float) -> dict[str, float]:
        """Seconds of the all-reduce of one bucket, by cause."""
        cfg, hw = self.cfg, self.hw
        message = self.cal.message if self.on_cpu else self.cal.kernel
        inside = self._inside()
        here = {_MESSAGES: (hw.local_latency + message / 4, 0.0), _INSIDE: (0.0, inside)}
        there = {
            _MESSAGES: (message / 4, 0.0),
            self._latency(): (hw.latency, 0.0),
            self._between(): (0.0, min(self.link, inside)),
        }
        if cfg.hosts == 1:
            rings = [ring_by_cause(size, cfg.replicas, here)]
        elif cfg.hierarchical:
            rings = [ring_by_cause(size, cfg.per_host, here), ring_by_cause(size, cfg.hosts, there)]
        else:
            many = 1 - 2 / cfg.replicas if cfg.wire and self.on_cpu else 0.0
            rings = [ring_by_cause(size, cfg.replicas, there, 1 + self.cal.half * many)]
        return added({_MESSAGES: message}, *rings)

    def _exposed(self, seconds: float) -> dict[str, float]:
        """Split the seconds not hidden behind backward by the causes of all communication."""
        whole = added(*(self._carried(b.size * self.cfg.travelling) for b in self.profile.buckets))
        total = math.fsum(whole.values())
        return {name: seconds * (part / total if total else 0.0) for name, part in whole.items()}

    def _inside(self) -> float:
        """Bytes a second that a ring carries inside a host."""
        return min(self.hw.local, self.cal.sockets) if self.on_cpu else self.hw.local

    def _between(self) -> str:
        """The name of the bottleneck between hosts."""
        if self.link > self._inside():
            return "what a host's sockets carry"
        return f"links between hosts ({say_rate(self.hw.link)})"

    def shared_memory(self) -> Prediction:
        """A step in shared memory: a replica copies its gradient, then sums and updates a slice."""
        profile, n = self.profile, self.cfg.replicas
        size = profile.dense_bytes
        threads = min(_MEMORY_THREADS, max(1, self.hw.cores // n))
        adding = size * (2 + 1 / n) / (self.hw.local * threads)
        times = profile.accumulated
        sliced = profile.one_set or self.cfg.strategy == SHARDED
        parts = {
            "compute": self.compute,
            "stragglers": self.waiting(),
            "memory": adding * times,
            "optimizer": self.update / (n if sliced else 1),
            "overhead": self.cal.step * times,
        }
        return self.prediction(parts)


class _ServerStep(PredictedStep):
    """A step of workers that push gradients to servers and pull parameters."""

    @cached_property
    def share(self) -> float:
        """The fullest server's share of a gradient."""
        profile, size = self.profile, self.profile.itemsize
        tables = [(table.rows, max(1, table.row_bytes // size)) for table in profile.sparse]
        parts = [1.0] * len(profile.shapes) + [t.touched / t.rows for t in profile.sparse]
        return largest_share(
            (*profile.shapes, *tables), size, max(1, self.cfg.servers), tuple(parts)
        )

    def _rates(self, at_once: float | None = None) -> tuple[float, float]:
        """Bytes a second of a worker's link, and of a server's.

        The workers of a host share its link: all of them, or `at_once` if that is fewer.
        """
        if self.cfg.hosts == 1:
            return self.hw.local, self.hw.local
        slower, here = 1 / self.cal.cipher, float(self.cfg.per_host)
        worker = self.link / (here if at_once is None else max(1.0, min(here, at_once)))
        return 1 / (1 / worker + slower), 1 / (1 / self.link + slower)

    def _at_once(self) -> float:
        """The number of workers that push at the same time.

        Servers send values to a few workers at a time, so the first push while the last still pull;
        `turns` is the measured part of that overlap. Small values are sent to all at once.
        """
        cfg = self.cfg
        if cfg.hosts == 1 or not TurnRule().waits(self.pulls * self.share):
            return cfg.replicas
        together = min(cfg.replicas, sends_at_once(cfg.replicas, cfg.servers, in_step=True))
        return together + (cfg.replicas - together) * (1 - self.cal.turns)

    def _update(self) -> float:
        """Seconds of the fullest server's update, at least those of one device's optimizer.

        Several servers share the update, and their kernel may be faster. One device could run that
        kernel, too, so neither counts as a speedup by replicas.
        """
        profile, rate = self.profile, self.hw.update
        dense = profile.dense_bytes / rate if profile.server is None else profile.server
        whole = dense + profile.sparse_bytes / rate
        return max(whole * self.share, profile.optimizer)

    def _message_seconds(self) -> dict[str, float]:
        """Seconds of the messages of a step: push, answer, ticket, values."""
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
            "compute": self.compute,
            "stragglers": slow,
            self._server_link(cfg.replicas): max(0.0, pushed - end) + pull,
            "the servers' update": self._update() + adding,
            **self._message_seconds(),
        }
        return self.prediction(parts)

    def _pushed(self, slow: float, per_byte: float) -> float:
        """The time at which servers have the last gradient; pushes overlap with backward."""
        end = self.compute + slow
        if self.profile.sparse or self.cfg.hosts == 1:
            return end + per_byte * self.pushes
        parts = [
            (b.size * self.cfg.travelling, self.forward + slow + b.ready * self.scale)
            for b in self.profile.stream
        ]
        return max(end, overlapped(parts, lambda size: size * per_byte))

    def asynchronous(self) -> Prediction:
        """A step of asynchronous workers, as a closed queueing network.

        A worker cycles through computation, a server's incoming link, its update and its outgoing
        link. With one server the workers settle into an order in which none waits, or one of these
        three is never idle. With several servers an arriving worker meets the average queue of a
        network with one worker less (mean value analysis).
        """
        size, values = self.pushes, self.pulls
        here = 2 * size * self.share / self.hw.local if self.cfg.hosts == 1 else 0.0
        update, talk = self._update() + here, self._message_seconds()

        def carry(size: float, others: int, met: float) -> float:
            worker, server = self._rates()
            return shared_transfer(size / worker, size * self.share / server, others, met)

        def times(others: int, met: float, waiting: float) -> tuple[float, float, float]:
            each = carry(size, others, met) / size if size else 0.0
            pushed = max(0.0, self._pushed(0.0, each) - self.compute)
            return pushed, carry(values, others, met), update * (1 + waiting)

        def cycle(*spent: float) -> float:
            return compute + sum(spent) + sum(talk.values())

        replicas, met, waiting = self.cfg.replicas, 0.0, 0.0
        compute = self._at_own_pace(1.0)
        if self.cfg.hosts > 1 and self.cfg.servers == 1:
            pushed, took, updated = times(0, 0, 0)
            full = replicas * max(max(size, values) / self._rates()[1], update)
            compute = self._at_own_pace(compute / max(full, cycle(pushed, took, updated)))
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
                compute = self._at_own_pace(compute / round_)
        parts = {
            "compute": compute,
            self._server_link(1 + met): pushed + took,
            "the servers' update": updated,
            **talk,
        }
        apart, in_step = cycle(*times(0, 0, 0)), cycle(*times(*[replicas - 1] * 3))
        return self.prediction(parts, (apart, in_step))

    def _at_own_pace(self, part: float) -> float:
        """Seconds of computing while others of the host compute for this part of the time.

        Replicas that compute at once were measured in step: at the slowest one.
        """
        profile, here = self.profile, self.cfg.per_host
        if not self.on_cpu or here == 1 or not profile.crowd:
            return self.compute
        alone = profile.with_threads(max(1, self.hw.cores // here))
        beside = max(alone, self.compute / sampled(here, here, profile.spread))
        return alone + (beside - alone) * part

    def _server_link(self, at_once: float) -> str:
        """The name of the bottleneck with `at_once` workers at a server."""
        if self.cfg.hosts == 1:
            return "memory"
        worker, server = self._rates()
        whose = "a worker's" if 1 / worker >= at_once * self.share / server else "a server's"
        if self.link > self.cal.cipher * (self.cfg.per_host if "worker" in whose else 1):
            return f"{whose} encryption"
        return f"{whose} link ({say_rate(self.hw.link)})"
