"""Where trials run: slots with devices of their own, and the processes in them.

A slot is free again once nothing is left of its trial, neither the process nor what it started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.processes import Guard, Process
from stratagem.launch.supervise import Escalation, steps_after

_LINGER = 1.0  # for what a trial started, once the trial itself has ended
_HELD = 5.0  # after SIGKILL: the kernel does not let a process go


@dataclass(frozen=True)
class Slot:
    """One place for a trial: the GPUs that it alone sees, none on a CPU."""

    number: int
    gpus: tuple[str, ...] = ()
    threads: int = 1

    def environ(self) -> dict[str, str]:
        """The threads do not depend on the number of slots: rounding would."""
        own = {"OMP_NUM_THREADS": str(self.threads)} if "OMP_NUM_THREADS" not in os.environ else {}
        return own | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})


def slots(asked: int | None, replicas: int, gpus: Sequence[str], cores: int) -> list[Slot]:
    """Deal the GPUs out, or else the processors; `asked` is None for as many as there are."""
    have, kind = (len(gpus), "GPU") if gpus else (cores, "processor")
    if replicas > have and (gpus or asked is None):
        raise UsageError(
            f"a trial needs {replicas} devices, and here {_are(have, kind)}; lower "
            f"--replicas-per-trial{'' if gpus else ', or give --slots 1 to let them share'}"
        )
    count = asked or have // replicas
    if not gpus:
        return [Slot(number) for number in range(count)]
    if count * replicas > have:
        raise UsageError(
            f"{count} slots of {replicas} need {count * replicas} GPUs, and here {_are(have, kind)}"
            f"; no GPU is shared: give --slots {have // replicas} at most"
        )
    threads = max(1, cores // have)
    dealt = [tuple(gpus[n * replicas : (n + 1) * replicas]) for n in range(count)]
    return [Slot(number, each, threads) for number, each in enumerate(dealt)]


def _are(count: int, kind: str) -> str:
    return f"is 1 {kind}" if count == 1 else f"are {count} {kind}s"


@dataclass
class _Running:
    """A trial in its slot."""

    number: int
    slot: Slot
    process: Process
    escalation: Escalation = field(default_factory=lambda: Escalation((), 0.0))


class TrialSlots:
    """Starts trials where a slot is free, and ends them with all that they started."""

    def __init__(self, slots: Sequence[Slot], scratch: Path) -> None:
        self._free = list(slots)
        self._running: dict[int, _Running] = {}
        self._ended: SimpleQueue[Process] = SimpleQueue()
        self._scratch = scratch
        self._guard = Guard(scratch)

    @property
    def free(self) -> bool:
        return bool(self._free)

    @property
    def running(self) -> list[int]:
        return list(self._running)

    def slot_of(self, number: int) -> Slot:
        return self._running[number].slot

    def start(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Slot:
        """Start a trial in the first slot that is free."""
        slot = self._free[0]
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            task = Task("worker", number)
            own = {**environ, "PYTHONUNBUFFERED": "1", **slot.environ()}
            process = Process(task, command, own, self._scratch / str(number), output=output)
        finally:
            os.close(output)
        self._guard.add(process)
        process.watch(self._ended)
        self._free.remove(slot)
        self._running[number] = _Running(number, slot, process)
        return slot

    def stop(self, number: int, reason: signal.Signals, grace: float) -> None:
        """Begin to end a trial: ask it to, then kill it; hurry if that was begun."""
        running, now = self._running[number], time.monotonic()
        if running.escalation.begun:
            running.escalation.hurry(now)
        else:
            running.escalation = Escalation(steps_after(reason, grace), now)

    def collect(self, seconds: float) -> list[tuple[int, int]]:
        """Wait so long for trials to end; numbers and exit codes of those whose slot is free."""
        with suppress(Empty):
            self._ended.get(timeout=seconds).reap()
            while True:
                self._ended.get_nowait().reap()
        now, over = time.monotonic(), []
        for running in list(self._running.values()):
            process = running.process
            for number in running.escalation.due(now):
                process.signal(number)
            if process.code is None:
                continue
            if process.gone() or now - process.ended > _LINGER + _HELD:
                over.append((running.number, process.code))
                self._guard.remove(process)
                del self._running[running.number]
                self._free.append(running.slot)
            elif now - process.ended > _LINGER:
                process.signal(signal.SIGKILL)
        self._free.sort(key=lambda slot: slot.number)
        return over

    def close(self) -> None:
        """Kill what is left."""
        for running in self._running.values():
            running.process.kill()
        self._guard.close()
