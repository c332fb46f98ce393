"""Slurm: a step started by srun, one worker per task.

Task i of a machine listens at port + i, where port is STRATAGEM_PORT or
20000 + SLURM_JOB_ID % 20000, so that jobs that share a machine seldom meet; two steps of one
job at the same time need a STRATAGEM_PORT each.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from stratagem.cluster.parsing import MAX_PORT, MAX_TASKS, integer, join, number, port, quote, wrong
from stratagem.cluster.spec import ClusterSpec, Place, Task

# Ids from here on mean the batch script, an interactive shell or no step: one process alone.
FIRST_SPECIAL_STEP = 0xFFFFFFF0

_NODES = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_COUNT = re.compile(r"(?P<tasks>[0-9]{1,5})(?:\(x(?P<times>[0-9]{1,5})\))?")


def detect(environ: Mapping[str, str]) -> Place | None:
    """The place of this task, if srun started it."""
    step = integer(environ.get("SLURM_STEP_ID", ""))
    if step is None or not 0 <= step < FIRST_SPECIAL_STEP:
        return None
    size = number(environ, _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), 1, MAX_TASKS)
    rank = number(environ, "SLURM_PROCID", 0, size - 1, why=f"the step has {size} tasks")
    nodes, counts = _layout(environ, size)
    slot = _slot(environ, rank, counts)
    spec = ClusterSpec(
        {"worker": _addresses(environ, nodes, counts)},
        where=_first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        example="gpu[01-04]",
    )
    return Place(spec, Task("worker", rank), "Slurm", slot if max(counts) > 1 else None)


def expand_nodelist(text: str, where: str = "nodelist") -> list[str]:
    """The machines of Slurm's shorthand: gpu[01-03,7],login is gpu01 gpu02 gpu03 gpu7 login."""
    example = "gpu[01-03,7],login"
    parts = _NODES.findall(text)
    if not parts or ",".join(parts) != text:
        raise wrong(f"{quote(text)} is not a list of machines", where, example)
    names: list[str] = []
    for part in parts:
        # Odd pieces stood in brackets; every combination is a machine.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [_expand_ranges(p, where) if i % 2 else [p] for i, p in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > MAX_TASKS:
            raise wrong(f"{quote(text)} is more than {MAX_TASKS} machines", where, example)
        names += map("".join, itertools.product(*choices))
    return names


def _expand_ranges(text: str, where: str) -> list[str]:
    """01-03,7 is 01 02 03 7: as wide as the first of the range is written."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match["low"], match["high"] or match["low"]) if match else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_TASKS - len(numbers):
            raise wrong(f"[{text[:60]}] is not a list of ranges", where, "gpu[01-03,7]")
        numbers += (str(i).zfill(len(low)) for i in range(int(low), int(high) + 1))
    return numbers


def expand_counts(text: str, where: str = "tasks per node") -> list[int]:
    """The tasks of each machine in Slurm's shorthand: 2(x3),1 is 2 2 2 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        times = int(match["times"] or 1) if match else 0
        if not match or len(counts) + times > MAX_TASKS:
            raise wrong(f"{quote(text)} is not a list of task counts", where, "2(x3),1")
        counts += [int(match["tasks"])] * times
    return counts


def _layout(environ: Mapping[str, str], size: int) -> tuple[list[str], list[int]]:
    """The machines of the step, and how many tasks each has."""
    name = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = expand_nodelist(environ.get(name, ""), name)
    name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = expand_counts(environ.get(name, ""), name)
    if len(counts) != len(nodes) or sum(counts) != size:
        raise wrong(
            f"{quote(environ[name])} is {sum(counts)} tasks on {len(counts)} machines, "
            f"but the step has {size} tasks on {len(nodes)}",
            name,
            "2(x3),1 for 7 tasks on 4 machines",
        )
    return nodes, counts


def _slot(environ: Mapping[str, str], rank: int, counts: Sequence[int]) -> int:
    """The number of this task on its machine, if tasks fill one machine after the other."""
    ends = list(itertools.accumulate(counts))
    node = next(node for node, end in enumerate(ends) if rank < end)
    start = ends[node] - counts[node]
    block_order = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank - start),
        # Only this one tells the chief too, whose place is the same in any order.
        "SLURM_GTIDS": ",".join(map(str, range(start, ends[node]))),
    }
    for name, expected in block_order.items():
        found = environ.get(name) or expected
        if found != expected:
            raise wrong(
                f"{quote(found)} for task {rank}, where machines filled one after the other would "
                f"give {quote(expected)}; the tasks' addresses would be wrong",
                name,
                "srun --distribution=block",
            )
    return rank - start


def _addresses(
    environ: Mapping[str, str], nodes: Sequence[str], counts: Sequence[int]
) -> list[str]:
    # Counted by name: the components of a heterogeneous step may share a machine.
    used: Counter[str] = Counter()
    slots: list[tuple[str, int]] = []
    for node, count in zip(nodes, counts, strict=True):
        slots += ((node, used[node] + i) for i in range(count))
        used[node] += count
    first = port(environ, 20000 + number(environ, "SLURM_JOB_ID", 0, 2**32) % 20000)
    most = max(used.values())
    if first + most - 1 > MAX_PORT:
        raise wrong(
            f"{first} leaves no room for {most} tasks on one machine",
            "STRATAGEM_PORT",
            f"STRATAGEM_PORT={max(1, MAX_PORT + 1 - most)}",
        )
    return [join(node, first + slot) for node, slot in slots]


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of the variables that is set; the first of all if none is."""
    return next((name for name in names if environ.get(name)), names[0])
