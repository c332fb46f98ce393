"""Predict a step of a pipeline: measured layers, cut as the strategy cuts them, in its schedule.

What is measured, and where each measurement is used:

    layer_profile   every layer alone, for several sizes of a microbatch: the share of the work that
                    each part has, and where the model is cut
    stage_profile   all layers in the stages' own code, in one process and in several at once: the
                    seconds of a microbatch (`_model_seconds`). Where it was not measured (other
                    devices than CPUs), the sum over the layers, scaled to the model's measured step
                    (`_layer_scale`)
    stage_profile   a message between two stages (`_message_seconds`), else the calibration's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from stratagem.errors import UsageError
from stratagem.plan.formulas import between
from stratagem.plan.predicted_step import PredictedStep, Prediction
from stratagem.plan.profile import LayerTable, StageTime
from stratagem.rules.layer_split import LayerCost, split_layers
from stratagem.rules.schedules import SCHEDULES, Op, kept
from stratagem.rules.timeline import HandOver, Timeline, timeline


class StagedStep(PredictedStep):
    """A step of devices that each have some of the layers."""

    def staged(self) -> Prediction:
        """Predict a step of as many examples as mirrored replicas on as many devices take."""
        busy = [sum(both) for both in zip(self.line.busy, self._late, strict=True)]
        # weight gradients come after a stage's last operation
        whole = max(sum(both) for both in zip(self.line.ends, self._late, strict=True))
        busiest = max(busy)
        over = self._message_seconds * 2 * self.cfg.microbatches * self.cfg.parts
        parts = {
            "compute": busiest - over,
            "bubble": whole - busiest,
            "handing over": over,
            "optimizer": self.update * self._largest,
            "overhead": self.cal.step,
        }
        if self.cfg.rows > 1:
            parts["memory"] = self._summing_seconds()
        found = self.prediction(parts)
        waits = 1 - sum(busy) / (len(busy) * whole) if whole else 0.0
        return replace(found, memory=max(self.memories, default=None), bubble=waits)

    @cached_property
    def table(self) -> LayerTable:
        """The layers for microbatches of this size."""
        pieces = max(1, round(self.cfg.microbatches / self.cfg.depth))
        for table in self.profile.layers:
            if table.pieces == pieces:
                return table
        counts = ", ".join(str(table.pieces * self.cfg.depth) for table in self.profile.layers)
        raise UsageError(
            f"{self.cfg.microbatches} microbatches on {self.cfg.depth} stages were not measured;"
            f" plan {f'one of {counts}' if counts else 'another strategy'}."
        )

    @cached_property
    def _late(self) -> list[float]:
        """Seconds of each stage's deferred weight gradients, computed once a batch for all rows."""
        whole, n = self.profile.layers[0].costs, self.cfg.depth
        found, at = [0.0] * n, 0
        for part, costs in enumerate(self.stages):
            found[part % n] += sum(cost.late for cost in whole[at : at + len(costs)])
            at += len(costs)
        each = self._model_seconds(self.cfg.per_host).late / sum(found) if sum(found) else 0.0
        return [each * late for late in found]

    @property
    def _processors(self) -> int:
        """The most stages of a host that compute at the same time."""
        return min(self.cfg.per_host, self.hw.cores) if self.on_cpu else self.cfg.per_host

    @property
    def _oversubscribed(self) -> float:
        """Stages of a host for each of its processors: how much longer they take all at once."""
        return self.cfg.per_host / self._processors

    def _model_seconds(self, computing: int) -> StageTime:
        """Seconds of all layers for a microbatch while so many stages of a host compute.

        Stages take turns if they are more than the processors.
        """
        at_once = min(computing, self._processors)
        found = self._undisturbed(at_once)
        turns = computing / at_once
        forward, backward, late = (turns * s for s in (found.forward, found.backward, found.late))
        return replace(found, forward=forward, backward=backward, late=late)

    def _undisturbed(self, busy: int) -> StageTime:
        """The same with a processor for each of `busy` stages.

        Interpolates between the measurements of one stage alone and of all at once; without these,
        sums over the layers.
        """
        tried = self.profile.stage_times
        here, pieces = self.cfg.per_host, self.table.pieces
        if tried and self.on_cpu:

            def typical(name: str, alone: bool) -> float:
                seen = [t for t in tried if t.pieces == pieces and t.alone == alone]
                known = {t.processes: float(getattr(t, name)) for t in seen}
                if not known:
                    return 0.0
                return between(here, known, self.hw.cores) / (
                    1.0 if here in known else self._oversubscribed
                )

            def mixed(name: str) -> float:
                alone, all_ = typical(name, True), typical(name, False)
                others = (busy - 1) / (self._processors - 1) if alone else 1.0
                return all_ - max(0.0, all_ - alone) * (1 - others)

            return StageTime(here, pieces, mixed("forward"), mixed("backward"), mixed("late"))
        costs, unit = self.table.costs, self._layer_scale
        forward = sum(c.forward for c in costs)
        rest = sum(c.seconds - c.late for c in costs) - forward
        late = sum(c.late for c in self.profile.layers[0].costs) * self.cfg.depth
        return StageTime(here, pieces, forward * unit, rest * unit, late * unit)

    def _summing_seconds(self) -> float:
        """Seconds in which rows all-reduce gradients in shared memory."""
        size, rows = self.profile.dense_bytes * self._largest, self.cfg.rows
        return size * (2 + 1 / rows) / self.hw.local * self._oversubscribed

    @cached_property
    def stages(self) -> list[Sequence[LayerCost]]:
        """The layers of each part, split so that they fit into memory if any split does."""
        costs, parts = self.table.costs, self.cfg.depth * self.cfg.parts
        room = self.hw.room(self.cfg.per_host, self.profile.device)
        limits = [None if room is None else room / self.cfg.parts, None]
        sized = [self._sized(cost) for cost in costs]
        held = self._kept_by_part()
        firsts = next(
            (f for limit in limits if (f := split_layers(sized, parts, held, limit))), None
        )
        if firsts is None:
            raise UsageError(f"{len(costs)} layers cannot be cut into {parts} stages; plan fewer.")
        return [costs[i:j] for i, j in pairwise([*firsts, len(costs)])]

    def _sized(self, cost: LayerCost) -> LayerCost:
        """The cost with the bytes that this optimizer and model were measured to hold."""
        return replace(
            cost,
            fixed=round(cost.fixed * self._fixed),
            activation=round(cost.activation * self._activation),
        )

    def _kept_by_part(self) -> list[int]:
        """Microbatches that each part keeps: the parts of a device share its number."""
        n, cfg = self.cfg.depth, self.cfg
        schedule = SCHEDULES[cfg.schedule]
        held = [kept(schedule(d, n, cfg.microbatches, cfg.parts)) for d in range(n)]
        return [-(-held[part % n] // cfg.parts) for part in range(n * cfg.parts)]

    @cached_property
    def _fixed(self) -> float:
        """Measured permanent bytes for each byte that the layers' costs count."""
        held, said = self.profile.footprint, sum(c.fixed for c in self.profile.layers[0].costs)
        return held.fixed / said if held is not None and said else 1.0

    @cached_property
    def _activation(self) -> float:
        """The same for activations: a tensor that two layers keep exists once."""
        held, said = self.profile.footprint, sum(c.activation for c in self.profile.layers[0].costs)
        return held.activations / said if held is not None and said else 1.0

    @cached_property
    def memories(self) -> list[float]:
        """Bytes of each device."""
        n = self.cfg.depth
        found = [0.0] * n
        for part, (costs, many) in enumerate(zip(self.stages, self._kept_by_part(), strict=True)):
            sized = [self._sized(cost) for cost in costs]
            found[part % n] += sum(c.fixed + many * c.activation for c in sized)
        return found

    @property
    def _largest(self) -> float:
        """The share of the parameters that the fullest device has and updates."""
        n = self.cfg.depth
        found = [0.0] * n
        for part, costs in enumerate(self.stages):
            found[part % n] += sum(cost.fixed for cost in costs)
        return max(found) / sum(found) if sum(found) else 1 / n

    @cached_property
    def _message_seconds(self) -> float:
        """Seconds in which an operation receives a message and sends one: two copies."""
        alone = self.profile.operation or self.cal.microbatch
        widest = max((costs[-1].crossing for costs in self.stages[:-1]), default=0)
        return alone if self.cfg.hosts > 1 else alone + 2 * widest / self.hw.local

    @cached_property
    def line(self) -> Timeline:
        """The real schedule, with the seconds of operations while other stages compute."""
        forward = [sum(c.forward for c in costs) for costs in self.stages]
        backward = [sum(c.seconds - c.late - c.forward for c in costs) for costs in self.stages]
        shares = {"F": _shares(forward), "B": _shares(backward)}
        cfg, takes = (
            self.cfg,
            [dict[str, list[float]]()],
        )  # by the number of computing stages in a row
        for computing in range(1, cfg.depth + 1):
            times = self._model_seconds(min(computing * cfg.rows, cfg.per_host))
            whole = {"F": times.forward, "B": times.backward}
            takes.append(
                {k: [whole[k] * part + self._message_seconds for part in shares[k]] for k in shares}
            )
        given = (SCHEDULES[cfg.schedule], cfg.depth, cfg.microbatches, cfg.parts)
        return timeline(*given, lambda op, k: takes[k][op.kind][op.part], self._carried)

    @property
    def _layer_scale(self) -> float:
        """Seconds of the model's measured step for each second of its layers measured alone, on a
        processor of its own."""
        whole = sum(cost.seconds for cost in self.profile.layers[0].costs)
        return self.compute / self._oversubscribed / whole if whole else 0.0

    def _carried(self, op: Op) -> HandOver:
        """A message over the link between hosts; copies in memory are part of an operation."""
        cfg = self.cfg
        source = op.part if op.kind == "F" else op.part - 1
        to = op.part + (1 if op.kind == "F" else -1)
        last = cfg.depth * cfg.parts - 1
        if cfg.hosts == 1 or not 0 <= to <= last:
            return HandOver()
        if op.part % cfg.replicas // cfg.per_host == to % cfg.replicas // cfg.per_host:
            return HandOver()
        return HandOver(self.stages[source][-1].crossing / self.link, self.hw.latency)


def _shares(of: Sequence[float]) -> list[float]:
    """Each number as a share of the sum."""
    return [each / sum(of) if sum(of) else 1 / len(of) for each in of]
