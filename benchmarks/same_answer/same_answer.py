"""The same cases through every peer, on one device and on several processes: the same answer?

    python benchmarks/same_answer/same_answer.py [--peers ddp,own_loop] [--cases short] [--write]

Each peer runs in processes of its own, several cases in one launch. What N processes answer is
compared with what the same script answers with one. --write puts the table into README.md and all
numbers into result.json. The exit code is 1 if a peer is not equal where batches divide, with one
process to a loop by hand and with several to one: then this script is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import peers  # noqa: E402
from cases import CASES  # noqa: E402
from comparing import ROUNDING, compare  # noqa: E402
from launches import Failed, Found, run  # noqa: E402
from pages import REPLICAS, Table, full_table, write  # noqa: E402


def answers(peer: str, names: Sequence[str], hand: dict[str, Found | Failed]) -> Table:
    """Run the cases of a peer, and compare."""
    ways = {name: peers.peer(peer).ways_of(name) for name in names}
    asked = [f"{name}:{way}" for name in names for way in ways[name]]
    alone = run(peer, 1, asked)
    table: Table = {}
    for name in names:
        first = alone[f"{name}:{ways[name][0]}"]
        table[name] = {"1": [compare(CASES[name], hand[f"{name}:"], first)]}
    for count in REPLICAS:
        found = run(peer, count, asked)
        for name in names:
            keys = {way: f"{name}:{way}" for way in ways[name]}
            cells = [compare(CASES[name], alone[k], found[k], way) for way, k in keys.items()]
            table[name][str(count)] = sorted(cells, key=lambda cell: cell.badness)
    return table


def versions(peer: str) -> tuple[dict[str, str], str]:
    """The versions of a peer's packages, and what is missing."""
    found, missing = {}, []
    for package, least in peers.peer(peer).packages.items():
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
            continue
        if tuple(map(int, found[package].split("+")[0].split(".")[:2])) < least:
            missing.append(f"{package} {'.'.join(map(str, least))}")
    return found, ", ".join(missing)


def wrong(tables: dict[str, Table]) -> list[str]:
    """Where cases in which all peers must be equal are not: a mistake of this script."""
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
    parser.add_argument("--peers", default=",".join(peers.PEERS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--write", action="store_true", help="README.md and result.json")
    args = parser.parse_args()
    names = args.cases.split(",")
    result: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rounding": ROUNDING,
        "cases": {name: CASES[name].title for name in names},
        "peers": {},
        "left out": {},
        "cells": {},
    }
    hand = run("by_hand", 1, [f"{name}:" for name in names])
    tables: dict[str, Table] = {}
    for peer in args.peers.split(","):
        found, missing = versions(peer)
        if missing:
            result["left out"][peer] = missing
            print(f"{peer}: left out, {missing} is not installed", flush=True)
            continue
        result["versions"] |= found
        result["peers"][peer] = peers.peer(peer).title
        tables[peer] = table = answers(peer, names, hand)
        result["cells"][peer] = {
            name: {count: [asdict(cell) for cell in cells] for count, cells in counts.items()}
            for name, counts in table.items()
        }
        for name, counts in table.items():
            for count, cells in counts.items():
                for cell in cells:
                    said = f"{peer:18} {name:13} {count} {cell.way:24} {cell} {cell.words}"
                    print(said.rstrip(), flush=True)
    print(full_table(result))
    if args.write:
        write(result)
    if mistakes := wrong(tables):
        sys.exit("\n".join(["the script is wrong:", *mistakes]))


if __name__ == "__main__":
    main()
