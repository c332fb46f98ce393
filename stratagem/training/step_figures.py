"""The figures of one replica's steps: a line a second, for the run's folder and for the chief.

The chief receives the lines of all replicas, and warns of slow ones (`rules/slowness.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.figures.meter import METER
from stratagem.figures.recorder import PERIOD, event, recorder
from stratagem.figures.run_queue import RunQueue
from stratagem.rules.slowness import STEPS, Sample, SlowRule
from stratagem.training.replica import Replica
from stratagem.wire import link_time

log = logging.getLogger("stratagem")

Line = dict[str, Any]
#: seconds that a step took: in all, loading, waiting, on the link
Times = tuple[float, float, float, float]


class SlowWatch:
    """On the chief: warns once of each slow task, with the reason.

    A stage of a pipeline is compared with the same stage of other pipelines only.
    """

    def __init__(self) -> None:
        self._rules, self._lock = dict[Any, SlowRule](), threading.Lock()

    def hear(self, line: Mapping[str, Any]) -> None:
        """Receive the figures of a task."""
        task, sample = str(line.get("task", "")), Sample.from_json(line)
        with self._lock:
            found = self._rules.setdefault(line.get("stage"), SlowRule()).add(task, sample)
        if found is not None:
            log.warning("%s", found)
            event("slow", str(found), about=task, reason=found.reason)


class StepFigures:
    """Counts the steps of one task; `tell` sends its lines to the chief."""

    def __init__(self, task: str, tell: Callable[[Line], None]) -> None:
        self.task, self._tell = task, tell
        self._recorder = recorder(task)
        #: how many steps this task has made
        self.steps = 0
        self._times: list[Times] = []
        self._examples, self._passes = 0, -1
        self._at = self._flushed = time.perf_counter()
        meter = METER
        self._load, self._wait, self._link = meter.load, meter.wait, meter.link
        self._bytes, self._pushes, self._stale = meter.bytes, meter.pushes, meter.staleness
        self._run_queue = RunQueue()
        if self._recorder is not None:
            self._recorder.keep_writing(self._idle)

    def step(self, examples: int) -> None:
        """Count a step of so many of this task's examples."""
        now, meter = time.perf_counter(), METER
        self.steps += 1
        if meter.passes == self._passes:
            self._times.append(
                (
                    now - self._at,
                    meter.load - self._load,
                    meter.wait - self._wait,
                    meter.link - self._link,
                )
            )
            self._examples += examples
        self._at, self._passes = now, meter.passes
        self._load, self._wait, self._link = meter.load, meter.wait, meter.link
        if now - self._flushed >= PERIOD:
            self._flush(now)

    def _flush(self, now: float) -> None:
        times, self._times = self._times, []
        examples, self._examples = self._examples, 0
        seconds, self._flushed = now - self._flushed, now
        queue = self._run_queue.waited()
        if not times:
            return
        meter = METER
        all_, load, wait, link = mean_times(times)
        sent = min(wait, link_time.busy() / len(times))  # the rest overlapped with computation
        wait, link = wait - sent, link + sent
        pushes = meter.pushes - self._pushes
        line: Line = {
            "step": self.steps,
            "steps": len(times),
            "rate": round(examples / sum(each[0] for each in times), 3),
            "examples": examples / len(times),
            "compute": round(max(0.0, all_ - load - wait - link), 7),
            "load": round(max(0.0, load), 7),
            "wait": round(wait, 7),
            "link": round(link, 7),
            "queue": round(queue / len(times), 7),
            "bytes": round((meter.bytes - self._bytes) / seconds),
            "staleness": round((meter.staleness - self._stale) / pushes, 3) if pushes else None,
            "generation": meter.generation,
        }
        self._bytes, self._pushes, self._stale = meter.bytes, meter.pushes, meter.staleness
        if meter.losses and math.isfinite(meter.loss):
            line["loss"] = meter.loss / meter.losses
        meter.loss, meter.losses = 0.0, 0
        if self._recorder is not None:
            self._recorder.write(**line)
        self._tell({"task": self.task, **line})

    def _idle(self) -> Line:
        """Return the line of a second in which no step ended."""
        meter = METER
        since = meter.since if meter.doing else self._at
        doing = meter.doing or "compute"
        seconds = round(time.perf_counter() - since, 1)
        return {
            "step": self.steps,
            "steps": 0,
            "doing": doing,
            "seconds": seconds,
            "generation": meter.generation,
        }


def mean_times(times: Sequence[Times]) -> Times:
    """Return the mean of each kind of time, without the longest twentieth of the steps."""
    kept = times
    if len(times) >= STEPS:
        kept = sorted(times, key=lambda each: each[0] - each[2])
        kept = kept[: len(kept) - len(kept) // STEPS]
    all_, load, wait, link = (sum(kind) / len(kept) for kind in zip(*kept, strict=True))
    return all_, load, wait, link


def figures_of(replica: Replica) -> StepFigures:
    """Return the figures of a replica that all-reduces, or is alone."""
    found: StepFigures | None = replica.figures
    if found is None:
        membership = replica.membership
        if replica.count > 1 and replica.is_chief:
            membership.to_hub.on_note(SlowWatch().hear)
        give = membership.to_hub.give
        found = replica.figures = StepFigures(
            replica.name, lambda line: give({**line, "stage": replica.stage})
        )
    return found
