"""Run by each process of a peer: `child.py PEER REPLICAS FOLDER CASE:WAY ...`.

A case that ends leaves `CASE:WAY.RANK.json` in FOLDER. One that raises leaves `.error` and ends the
process at once, since the others may wait for it: cases that are left go into a new launch.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

import torch
from cases import CASES, Job

#: seconds in which the other processes should have ended a case that takes less than one
PATIENCE = 10.0


def rank() -> int:
    """This process' number, as torchrun or `stratagem run` have told it."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    return int(os.environ.get("RANK") or config.get("task", {}).get("index", 0))


def leave(path: Path, content: dict) -> None:
    """Write a file that appears whole."""
    half = path.with_name(path.name + ".half")
    half.write_text(json.dumps(content))
    half.rename(path)


def first_line(problem: BaseException) -> str:
    """Its first sentence, without the places and ports that differ from run to run."""
    line = (str(problem).strip().splitlines() or [""])[0]
    words = re.sub(r" ?\[[^]]*\](:\d+)?", "", line).partition(". ")[0].strip()
    return f"{type(problem).__name__}: {words}"


def together(folder: Path, case: str, rank: int, replicas: int) -> bool:
    """Wait for the other processes to end a case; False if one does not, for all of them."""
    late = time.monotonic() + PATIENCE
    while len(list(folder.glob(f"{case}.*.json"))) < replicas:
        if time.monotonic() > late:
            leave(folder / f"{case}.{rank}.left", {})
            break
        time.sleep(0.02)
    return not list(folder.glob(f"{case}.*.left"))


def main(peer: str, replicas: str, where: str, *asked: str) -> None:
    folder, mine = Path(where), rank()
    (folder / f"{os.getpid()}.pid").touch()
    torch.set_num_threads(1)
    module = importlib.import_module(f"peers.{peer}")
    for each in asked:
        name, _, way = each.partition(":")
        own = folder / each
        own.mkdir(exist_ok=True)
        leave(folder / f"{each}.{mine}.begun", {})
        job = Job(CASES[name], way, int(replicas), own, CASES[name].data())
        try:
            content = {"result": module.run(job), "seen": job.data.seen}
        except BaseException as problem:
            traceback.print_exc()
            error = {"words": first_line(problem), "time": time.time()}
            leave(folder / f"{each}.{mine}.error", error)
            os._exit(1)
        leave(folder / f"{each}.{mine}.json", content)
        if not together(folder, each, mine, int(replicas)):
            return  # as a script would that has no other case


if __name__ == "__main__":
    main(*sys.argv[1:])
