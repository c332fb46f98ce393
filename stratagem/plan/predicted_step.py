"""A predicted step, and what every configuration has in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.plan.configuration import (
    CENTRAL,
    MIRRORED,
    SERVERS,
    SHARDED,
    TENSOR,
    Configuration,
)
from stratagem.plan.formulas import Calibration, between, sampled
from stratagem.plan.hardware import Hardware, say_seconds
from stratagem.plan.profile import Profile


@dataclass(frozen=True)
class Prediction:
    """The predicted speed and memory of a configuration; a step is the sum of its `parts`."""

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
    #: bytes that each device holds, and may hold; None where that is not known
    memory: float | None = None
    room: float | None = None
    #: the share of the time in which the stages of a pipeline wait
    bubble: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether devices have the memory for it, as far as that is known."""
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
    """The parts that every configuration has: computing, and waiting for stragglers."""

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
        #: bytes of one worker's gradient, and of the values that it fetches for the next
        self.pushes = profile.travels(1, configuration.travelling)
        self.pulls = profile.travels(configuration.replicas, configuration.travelling)
        self.forward = profile.forward * self.scale
        self.compute = profile.compute * self.scale

    def _crowded(self) -> float:
        """Forward and backward while the other replicas of the host compute, too."""
        profile, here = self.profile, self.cfg.per_host
        if not self.on_cpu or here == 1:
            return profile.compute
        known = dict(profile.crowd)
        if known:  # among others nobody is faster than alone: that was the machine's unrest
            seen = between(here, {1: profile.compute, **known}, self.hw.cores)
            return max(seen, profile.compute)
        cores = self.hw.cores
        alone = profile.with_threads(max(1, cores // here)) * max(1.0, here / cores)
        return alone * (1 + self.cal.contention * (min(here, cores) - 1))

    def waiting(self) -> float:
        """How much longer than usual the last replica that counts takes; where they meet every so
        many steps, they wait for the slowest in that many, which are less unlike."""
        spread, n = self.profile.spread, self.cfg.replicas
        factor = sampled(self.cfg.counted, n, spread)
        if self.on_cpu and self.cfg.hosts == 1 and self.profile.crowd:
            factor /= sampled(n, n, spread)  # the slowest of all is in what was measured
        return self.compute * max(0.0, factor - 1) / math.sqrt(self.cfg.every)

    def handled(self, size: float) -> float:
        """How much later the rest of backward is because the cores carry a bucket meanwhile; not at
        all where a core is idle, or it is not known what that takes."""
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
        """The optimizer on all parameters, with the threads that a replica has, among others."""
        threads = max(1, self.hw.cores // self.cfg.per_host)
        return self.profile.optimizer_with(threads) * self.crowding

    @property
    def crowding(self) -> float:
        """How much slower memory is with all replicas of a host at work."""
        if self.profile.crowd and self.profile.compute > 0:
            return max(1.0, self._crowded() / (self.profile.single_thread or self.profile.compute))
        return 1 + self.cal.contention * (min(self.cfg.per_host, self.hw.cores) - 1)


#: gradients that wait until it is their turn to be added up (docs/sharded.md)
_WAITING = 8_000_000


def device_memory(profile: Profile, cfg: Configuration) -> float | None:
    """Bytes of one device; None where nothing was measured, or for a divided model, which knows
    more. P parameters and buffers, G gradients, S states of the optimizer, A what forward keeps:

    one device, mirrored GPUs and hosts   P + G + S + A
    CPU replicas that share memory        (P + S + P) / n + G + A
    sharded, CPUs of one machine          (P + G + S) / n + A, and gradients that wait their turn
    sharded, fully_shard                  (P + G + S) / n + A, and the largest layer, whole
    workers of servers                    P + G + A
    pipeline, mesh                        of its own layers P + G + S, and A of each microbatch that
                                          is kept (staged_step.py)
    divided layers                        of what is divided 1/n of P + G + S, of others all

    Of what memory is shared by the replicas of a machine each counts its part. What allocators,
    the interpreter and temporaries of kernels take comes on top of it.
    """
    held, n = profile.footprint, cfg.replicas
    if held is None or cfg.staged or cfg.strategy == TENSOR:
        return None
    in_memory = profile.device == "cpu" and cfg.hosts == 1
    if n == 1 or (cfg.strategy not in (SHARDED, SERVERS) and not in_memory):
        return held.fixed + held.activations
    if cfg.strategy == SERVERS:
        return held.parameters + held.gradients + held.activations
    if cfg.strategy in (MIRRORED, CENTRAL):
        shared = 2 * held.parameters + held.states
        return shared / n + held.gradients + held.activations
    alone = min(_WAITING, held.gradients) if in_memory else 2 * largest_layer(profile)
    return held.fixed / n + held.activations + alone


def largest_layer(profile: Profile) -> float:
    """Bytes of the largest layer's parameters: what fully_shard gathers at a time."""
    held = profile.footprint
    if held is None:
        return 0.0
    costs = profile.layers[0].costs if profile.layers else ()
    whole = sum(cost.fixed for cost in costs)
    if not whole:  # it is not known where layers end
        return float(held.parameters)
    return held.parameters * max(cost.fixed for cost in costs) / whole
