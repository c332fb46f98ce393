"""Which task is slow, and why: the rule, without a clock.

Replicas that wait for each other all take as long as the slowest. They differ in the time that
each takes by itself:

    own = compute + load + link        step = own + wait

A task is slow if its own time is more than RATIO times the median of the other tasks', over STEPS
steps. The part that exceeds theirs most is the reason. Time in which it was ready to run and had no
core is not its own: where that makes the difference, the machine has more work than cores, which is
said once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

RATIO, STEPS = 1.5, 20
#: a task that was named may be named again once its ratio has fallen to this
AGAIN = 1.25
#: differences below this, in seconds per step, are ignored
LEAST = 0.001

Reason = Literal["computes", "loads data", "link", "cores"]


@dataclass(frozen=True)
class Sample:
    """Mean seconds per step over some steps of one task."""

    steps: int
    compute: float
    load: float
    link: float
    wait: float
    #: examples a step
    examples: float = 1.0
    #: of all this, how long it was ready to run and had no core
    queue: float = 0.0

    @property
    def own(self) -> float:
        return self.compute + self.load + self.link

    @property
    def busy(self) -> float:
        """Its own time with a core to itself."""
        return max(0.0, self.own - self.queue)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Sample:
        """Read a line of figures; ValueError if it is none."""
        numbers = [line.get(name) for name in ("compute", "load", "link", "wait", "examples")]
        steps, known = line.get("steps"), [n for n in numbers if isinstance(n, int | float)]
        if not isinstance(steps, int) or len(known) < len(numbers):
            raise ValueError("a line of figures lacks a number")
        return cls(steps, *map(float, [*known, line.get("queue", 0.0)]))


@dataclass(frozen=True)
class Finding:
    """A slow task: its seconds per step, those of other tasks, and the part that is in excess."""

    task: str
    reason: Reason
    own: float
    others: float
    part: float
    theirs: float

    def __str__(self) -> str:
        if self.reason == "cores":
            return (
                f"this machine has more work than cores: {self.task} takes {_ms(self.own)} a step, "
                f"the others {_ms(self.others)}, since it queues for a core. Fewer processes, "
                "workers of DataLoaders or threads (OMP_NUM_THREADS) would finish sooner."
            )
        text = (
            f"{self.task} is slow: it takes {_ms(self.own)} a step, the others {_ms(self.others)}; "
        )
        if self.reason == "link":
            return text + (
                f"its link takes {_ms(self.part)} of them (the others' {_ms(self.theirs)}). Look "
                "at its network: the card, the cable, and what else uses them."
            )
        if self.reason == "loads data":
            return text + (
                f"it loads data for {_ms(self.part)} of them (the others {_ms(self.theirs)}). More "
                "num_workers= in its DataLoader may help, or a faster disk."
            )
        return text + (
            f"it computes for {_ms(self.part)} of them (the others {_ms(self.theirs)}). Does "
            "something else run there, is the device slower, or hot? On the chief: a callback?"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class SlowRule:
    """Takes every task's samples as they come, and names slow tasks."""

    def __init__(self) -> None:
        self._windows: dict[str, deque[Sample]] = {}
        self._means: dict[str, Sample] = {}
        self._named: set[tuple[str, Reason]] = set()
        self._crowded = False

    def add(self, task: str, sample: Sample) -> Finding | None:
        """Add a sample; return a finding if the task is slow and was not named yet."""
        if sample.steps < 1:
            return None
        window = self._windows.setdefault(task, deque())
        window.append(sample)
        while sum(each.steps for each in window) - window[0].steps >= STEPS:
            window.popleft()
        if sum(each.steps for each in window) < STEPS:
            return None
        self._means[task] = _mean(window)
        others = [each for name, each in self._means.items() if name != task]
        return self._judge(task, self._means[task], others) if others else None

    def _judge(self, task: str, mine: Sample, others: Sequence[Sample]) -> Finding | None:
        fair = median(each.own for each in others)
        # shares differ by a row at most, which is much for small shares
        rows = median(each.examples for each in others)
        fair *= max(1.0, mine.examples / rows) if rows > 0 else 1.0
        if mine.own <= AGAIN * fair:
            self._named = {each for each in self._named if each[0] != task}
        if mine.own <= RATIO * fair or mine.own - fair <= LEAST:
            return None
        if mine.busy <= RATIO * fair or mine.busy - fair <= LEAST:
            return self._crowding(task, mine, fair)
        found = _finding(task, mine, others, fair)
        if (task, found.reason) in self._named:
            return None
        self._named.add((task, found.reason))
        return found

    def _crowding(self, task: str, mine: Sample, fair: float) -> Finding | None:
        """Name the machine, once: a task is late for want of a core alone."""
        first, self._crowded = not self._crowded, True
        if not first:
            return None
        return Finding(task, "cores", mine.own, fair, mine.queue, 0.0)


def _finding(task: str, mine: Sample, others: Sequence[Sample], fair: float) -> Finding:
    """Name the part that exceeds the other tasks' most."""
    parts: list[tuple[float, Reason, float, float]] = []
    names: dict[str, Reason] = {"compute": "computes", "load": "loads data", "link": "link"}
    for name, reason in names.items():
        part, theirs = getattr(mine, name), median(getattr(each, name) for each in others)
        parts.append((part - theirs, reason, part, theirs))
    _, reason, part, theirs = max(parts)
    return Finding(task, reason, mine.own, fair, part, theirs)


def _mean(window: Iterable[Sample]) -> Sample:
    """Average the window without its longest twentieth: rare pauses make no task slow."""
    kept = sorted(window, key=lambda each: each.own)
    kept = kept[: len(kept) - len(kept) // STEPS]
    steps = sum(each.steps for each in kept)

    def over(name: str) -> float:
        return float(sum(getattr(each, name) * each.steps for each in kept)) / steps

    return Sample(steps, *map(over, ("compute", "load", "link", "wait", "examples", "queue")))
