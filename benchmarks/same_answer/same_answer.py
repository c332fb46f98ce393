"""The same cases through every peer, on one device and on several processes: the same answer?

    python benchmarks/same_answer/same_answer.py [--peers ddp,own_loop] [--cases short] [--write]

Each peer runs in processes of its own, several cases in one launch. What N processes answer is
compared with what the same peer answers with one. --write puts the table into README.md and all
numbers into result.json. The exit code is 1 if batches that divide are not equal for every peer, or
a peer alone is not equal to a loop by hand there: then the script is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import CASES, Case, weights  # noqa: E402
from launches import Failed, Found, run  # noqa: E402

BY_HAND = "by_hand"
PEERS = (
    "ddp",
    "accelerate_loop",
    "lightning_trainer",
    "hf_trainer",
    "keras_parallel",
    "own_loop",
    "own_model",
    "own_keras",
)
REPLICAS = (2, 3)
#: what float32 may leave between two orders of a sum, as a share of the way that weights went
ROUNDING = 1e-5
ORDER = ("equal", "different", "error", "hang", "omitted")


@dataclass(frozen=True)
class Cell:
    """How a case went: `amount` is the difference, or the seconds after which it was ended."""

    status: str
    amount: float = 0.0
    words: str = ""
    way: str = ""

    def __str__(self) -> str:
        if self.status == "equal":
            return "equal" + (f" ({self.amount:.0e})" if self.amount else "")
        if self.status == "different":
            return f"**off by {self.amount:.1%}**"
        if self.status == "hang":
            return f"**hangs** ({self.amount:.0f} s)"
        return "**error**" if self.status == "error" else "-"

    @property
    def badness(self) -> tuple[int, float]:
        return ORDER.index(self.status), self.amount


# --- comparing ----------------------------------------------------------------------------------


def compare(case: Case, one: Found, found: Found | Failed, way: str = "") -> Cell:
    """What several processes left of a case, against what one did."""
    if isinstance(found, Failed):
        return Cell(found.status, found.seconds, found.words, way)
    if case.task == "order":
        amount, words = other_batches(case, one, found)
    else:
        amount, words = distance(case, one[0]["result"], found[0]["result"]), ""
    return Cell("equal" if amount <= ROUNDING else "different", amount, words, way)


def distance(case: Case, one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """The largest difference of metrics; of weights as a share of the way that training moved
    the one that went farthest."""
    worst = 0.0
    for name, values in one.items():
        gaps = [abs(a - b) for a, b in zip(values, other[name], strict=True)]
        if not all(map(math.isfinite, gaps)):
            return math.inf
        moved = 1.0
        if name == "weights":
            start = weights(case.model())["weights"]
            moved = max(abs(a - b) for a, b in zip(values, start, strict=True))
            assert moved > 1e-3, "training did not move the weights"
        worst = max(worst, max(gaps) / moved)
    return worst


def other_batches(case: Case, one: Found, found: Found) -> tuple[float, str]:
    """The share of global batches that have other rows than one device's, and what else is off."""
    expected, batches = batches_of(case, one), batches_of(case, found)
    differ = sum(a != b for a, b in zip(expected, batches, strict=True))
    every = list(range(case.rows))
    epochs = [batches[i : i + case.steps] for i in range(0, len(batches), case.steps)]
    once = all(sorted(row for batch in epoch for row in batch) == every for epoch in epochs)
    again = "" if len(set(map(str, epochs))) > 1 else "every epoch in the same order"
    words = "; ".join(filter(None, ["" if once else "not every row once an epoch", again]))
    return differ / len(expected) + bool(words), words


def batches_of(case: Case, found: Found) -> list[list[int]]:
    """The rows of each global batch. (What a process read before the training does not count.)"""
    share = case.batch // len(found)
    steps = case.epochs * case.steps
    read = [each["seen"][-steps * share :] for each in found]
    return [
        sorted(row for rows in read for row in rows[i * share : (i + 1) * share])
        for i in range(steps)
    ]


# --- a peer --------------------------------------------------------------------------------------


def answers(peer: str, names: Sequence[str], hand: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every case of a peer: the cell of each number of processes, and of one against `hand`."""
    module = import_module(f"peers.{peer}")
    mine = [name for name in names if name not in module.OMITTED]
    ways = {name: module.WAYS.get(name, ("",)) for name in mine}
    asked = [f"{name}:{way}" for name in mine for way in ways[name]]
    alone = run(peer, 1, [f"{name}:{ways[name][0]}" for name in mine])
    found = {count: run(peer, count, asked) for count in REPLICAS}
    table: dict[str, dict[str, Any]] = {}
    for name in names:
        if name in module.OMITTED:
            table[name] = {str(n): [Cell("omitted", words=module.OMITTED[name])] for n in REPLICAS}
            continue
        one = alone[f"{name}:{ways[name][0]}"]
        if isinstance(one, Failed):
            failed = Cell(one.status, one.seconds, f"on one device, too: {one.words}")
            table[name] = {str(n): [failed] for n in (1, *REPLICAS)}
            continue
        table[name] = {"1": [compare(CASES[name], hand[f"{name}:"], one)]}
        for count in REPLICAS:
            cells = [
                compare(CASES[name], one, found[count][f"{name}:{way}"], way) for way in ways[name]
            ]
            table[name][str(count)] = sorted(cells, key=lambda cell: cell.badness)
    return table


def versions(peer: str) -> tuple[dict[str, str], str]:
    """The versions of a peer's packages, and what is missing."""
    found, missing = {}, []
    for package, least in import_module(f"peers.{peer}").PACKAGES.items():
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
            continue
        if tuple(map(int, found[package].split("+")[0].split(".")[:2])) < least:
            missing.append(f"{package} {'.'.join(map(str, least))} or later")
    return found, ", ".join(missing)


# --- the table -----------------------------------------------------------------------------------


def text(cells: dict[str, list[Cell]], notes: list[str]) -> str:
    """The best way of each number of processes, in one cell of the table."""
    best = [cells[str(count)][0] for count in REPLICAS]
    if any(cell.words for cell in best if cell.status == "error"):
        words = next(cell.words for cell in best if cell.status == "error")
        notes += [words] if words not in notes else []
        return f"**error** [{notes.index(words) + 1}]"
    worst = max(best, key=lambda cell: cell.badness)
    if worst.status == "equal" or len({cell.status for cell in best}) > 1:
        return str(worst)
    if worst.status == "different":
        return "**off by " + ", ".join(f"{cell.amount:.1%}" for cell in best) + "**"
    return str(worst)


def markdown(result: dict[str, Any], tables: dict[str, dict[str, dict[str, list[Cell]]]]) -> str:
    notes: list[str] = []
    titles = [result["peers"][peer] for peer in tables]
    lines = ["| case | " + " | ".join(titles) + " |", "| --- " * (len(titles) + 1) + "|"]
    for name in result["cases"]:
        row = [text(table[name], notes) for table in tables.values()]
        lines.append(f"| {CASES[name].title} | " + " | ".join(row) + " |")
    lines += ["", *(f"[{number}] `{words}`<br>" for number, words in enumerate(notes, 1))]
    ran = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"{ran}; {result['machine']}."])


def write(result: dict[str, Any], page: str) -> None:
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    readme = HERE / "README.md"
    before, mark, rest = readme.read_text().partition("<!-- the table -->\n")
    after = rest.partition("<!-- its end -->")[2]
    readme.write_text(f"{before}{mark}\n{page}\n\n<!-- its end -->{after}")


def wrong(tables: dict[str, dict[str, dict[str, list[Cell]]]]) -> list[str]:
    """Where batches that divide are not equal, or a peer alone is not a loop by hand: a mistake
    in the script."""
    return [
        f"{peer}, {CASES[name].title}, {count} processes: {cells[0]} {cells[0].words}"
        for peer, table in tables.items()
        for name, counts in table.items()
        if CASES[name].must_be_equal
        for count, cells in counts.items()
        if cells[0].status != "equal"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--write", action="store_true", help="README.md and result.json")
    args = parser.parse_args()
    names = args.cases.split(",")
    result: dict[str, Any] = {
        "versions": {"python": platform.python_version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rounding": ROUNDING,
        "peers": {},
        "cases": {name: CASES[name].title for name in names},
        "cells": {},
    }
    hand = run(BY_HAND, 1, [f"{name}:" for name in names])
    tables = {}
    for peer in args.peers.split(","):
        found, missing = versions(peer)
        if missing:
            print(f"{peer}: left out, there is no {missing} here", flush=True)
            continue
        result["versions"] |= found
        result["peers"][peer] = import_module(f"peers.{peer}").TITLE
        tables[peer] = answers(peer, names, hand)
        result["cells"][peer] = {
            name: {n: [asdict(cell) for cell in cells] for n, cells in counts.items()}
            for name, counts in tables[peer].items()
        }
        for name, counts in tables[peer].items():
            for n, cells in counts.items():
                for cell in cells:
                    print(f"{peer:18} {name:13} {n} {cell.way:20} {cell} {cell.words}", flush=True)
    page = markdown(result, tables)
    print(page)
    if args.write:
        write(result, page)
    if mistakes := wrong(tables):
        sys.exit("\n".join(["the script is wrong:", *mistakes]))


if __name__ == "__main__":
    main()
