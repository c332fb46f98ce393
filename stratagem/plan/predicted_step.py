"""A predicted step, and the base class of the predictions of all configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.plan.configuration import CENTRAL, MIRRORED, SERVERS, SHARDED, Configuration
from stratagem.plan.formulas import Calibration, between, sampled
from stratagem.plan.hardware import Hardware, say_seconds
from stratagem.plan.profile import Profile


@dataclass(frozen=True)
class Prediction:
    """The predicted speed and memory of a configuration; a step is the sum of its `parts`."""

    configuration: Configuration
    #: seconds in which every counted replica contributes one gradient
    step: float
    #: examples a second
    rate: float
    #: relative to one device
    speedup: float
    #: updates of the parameters a second
    updates: float
    parts: Mapping[str, float]
    #: what most of the step is spent on
    limit: str
    #: bounds of `step`: how often asynchronous workers wait for each other is a matter of chance
    within: tuple[float, float]
    #: bytes that each device needs, and bytes that it has; None if unknown
    memory: float | None = None
    room: float | None = None
    #: the share of the time in which the stages of a pipeline wait
    bubble: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether devices have enough memory; true if that is unknown."""
        return self.memory is None or self.room is None or self.memory <= self.room

    @property
    def efficiency(self) -> float:
        return self.speedup / self.configuration.replicas

    def to_json(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration.to_json(),
            "name": str(self.configuration),
            "replicas": self.configuration.replicas,
            "step_s": self.step,
            "examples_per_s": self.rate,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "updates_per_s": self.updates,
            "parts_s": dict(self.parts),
            "limit": self.limit,
            "step_within_s": list(self.within),
            "memory_bytes": self.memory,
            "room_bytes": self.room,
            "fits": self.fits,
            "bubble": self.bubble,
        }


class PredictedStep:
    """The parts of every configuration's step: computing, and waiting for stragglers."""

    def __init__(
        self,
        profile: Profile,
        hardware: Hardware,
        configuration: Configuration,
        calibration: Calibration,
    ) -> None:
        self.profile, self.hw = profile, hardware
        self.cfg, self.cal = configuration, calibration
        self.on_cpu = profile.device == "cpu"
        self.scale = self._crowded() / profile.compute if profile.compute > 0 else 1.0
        self.link = hardware.link * calibration.goodput
        #: bytes of one worker's gradient, and of the values that it pulls for the next step
        self.pushes = profile.travels(1, configuration.travelling)
        self.pulls = profile.travels(configuration.replicas, configuration.travelling)
        self.forward = profile.forward * self.scale
        self.compute = profile.compute * self.scale

    def _crowded(self) -> float:
        """Seconds of forward and backward while the other replicas of the host compute, too."""
        profile, here = self.profile, self.cfg.per_host
        if not self.on_cpu or here == 1:
            return profile.compute
        known = dict(profile.crowd)
        if known:  # a replica beside others is never faster than alone: that was noise
            seen = between(here, {1: profile.compute, **known}, self.hw.cores)
            return max(seen, profile.compute)
        cores = self.hw.cores
        alone = profile.with_threads(max(1, cores // here)) * max(1.0, here / cores)
        return alone * (1 + self.cal.contention * (min(here, cores) - 1))

    def waiting(self) -> float:
        """Seconds by which the slowest counted replica takes longer than usual.

        Replicas that meet every few steps wait for the slowest sum of these, which varies less.
        """
        spread, n = self.profile.spread, self.cfg.replicas
        factor = sampled(self.cfg.counted, n, spread)
        if self.on_cpu and self.cfg.hosts == 1 and self.profile.crowd:
            factor /= sampled(n, n, spread)  # `crowd` was measured at the slowest replica
        return self.compute * max(0.0, factor - 1) / math.sqrt(self.cfg.every)

    def handled(self, size: float) -> float:
        """Seconds by which sending a bucket delays the rest of backward, as both need the cores.

        0 if a core is idle, or if the cost of sockets is unknown.
        """
        cfg, hw = self.cfg, self.hw
        threads = self.profile.threads if cfg.per_host == 1 else max(1, hw.cores // cfg.per_host)
        if not self.on_cpu or hw.sockets is None or cfg.per_host * threads < hw.cores:
            return 0.0
        goes = 2 * (cfg.replicas - 1) / cfg.replicas * size
        return cfg.per_host * goes / hw.sockets / hw.cores

    def prediction(
        self, parts: dict[str, float], within: tuple[float, float] | None = None
    ) -> Prediction:
        """Return the prediction for a step of these parts."""
        cfg, step = self.cfg, sum(parts.values())
        rate = cfg.counted * self.profile.batch / max(step, 1e-12)
        single = self.profile.batch / max(self.profile.compute + self.profile.optimizer, 1e-12)
        return Prediction(
            cfg,
            step,
            rate,
            rate / single,
            (cfg.replicas if cfg.asynchronous else 1) / max(step, 1e-12),
            parts,
            max(parts, key=lambda name: parts[name]),
            within or (step, step),
            device_memory(self.profile, cfg),
            self.hw.room(cfg.per_host, self.profile.device),
        )

    def _latency(self) -> str:
        return f"latency between hosts ({say_seconds(self.hw.latency)})"

    @property
    def update(self) -> float:
        """Seconds of the optimizer on all parameters, with a replica's threads, beside others."""
        threads = max(1, self.hw.cores // self.cfg.per_host)
        return self.profile.optimizer_with(threads) * self.crowding

    @property
    def crowding(self) -> float:
        """The slowdown of memory while all replicas of a host compute."""
        if self.profile.crowd and self.profile.compute > 0:
            return max(1.0, self._crowded() / (self.profile.single_thread or self.profile.compute))
        return 1 + self.cal.contention * (min(self.cfg.per_host, self.hw.cores) - 1)


#: bytes of gradients that wait for their reduction (docs/sharded.md)
_WAITING = 8_000_000


def device_memory(profile: Profile, cfg: Configuration) -> float | None:
    """Bytes that one device needs; None if not measured, or for a model divided by layers.

    The subclasses for such models count their own memory. P parameters and buffers, G gradients,
    S states of the optimizer, A activations:

    one device, mirrored GPUs and hosts   P + G + S + A; and mirrored replicas of Keras models, of
                                          custom loops, and of optimizers that cannot update a part
    CPU replicas that share memory        (P + S + P) / n + G + A
    sharded, CPUs of one machine          (P + G + S) / n + A, and gradients before their reduction
    sharded, fully_shard                  (P + G + S) / n + A, and the largest layer, undivided
    workers of servers                    P + G + A
    pipeline, mesh                        of its own layers P + G + S, and A of each microbatch that
                                          is kept (staged_step.py)

    Memory that the replicas of a machine share counts in equal parts. Allocators, the interpreter
    and temporaries of kernels take more.
    """
    held, n = profile.footprint, cfg.replicas
    if held is None or cfg.staged:
        return None
    in_memory = profile.device == "cpu" and cfg.hosts == 1
    shares = in_memory and profile.one_set
    if n == 1 or (cfg.strategy not in (SHARDED, SERVERS) and not shares):
        return held.fixed + held.activations
    if cfg.strategy == SERVERS:
        return held.parameters + held.gradients + held.activations
    if cfg.strategy in (MIRRORED, CENTRAL):
        shared = 2 * held.parameters + held.states
        return shared / n + held.gradients + held.activations
    alone = min(_WAITING, held.gradients) if in_memory else 2 * largest_layer(profile)
    return held.fixed / n + held.activations + alone


def largest_layer(profile: Profile) -> float:
    """Bytes of the largest layer's parameters, which fully_shard gathers at once."""
    held = profile.footprint
    if held is None:
        return 0.0
    costs = profile.layers[0].costs if profile.layers else ()
    whole = sum(cost.fixed for cost in costs)
    if not whole:  # layers were not measured
        return float(held.parameters)
    return held.parameters * max(cost.fixed for cost in costs) / whole
