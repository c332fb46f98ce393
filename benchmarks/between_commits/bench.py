"""Two commits of stratagem against each other: is anything slower than it was?

    python benchmarks/between_commits/bench.py OLD [NEW] [--cases fit-2,loop-2] [--rounds 15]

OLD and NEW are commits, or folders with a checkout; NEW is this checkout if it is left out. Each
case trains in two process trees, one a commit, which both stay alive and take turns: a round is an
epoch of the one and then an epoch of the other, in the other order every second round. Printed is
the median of the rounds' ratios, new to old: 1.03 is 3% slower. A third tree runs the old commit
again; its ratio says what the machine cannot tell. `first-step` is a fresh process each round, from
its start to the end of the first training step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

Epoch = Callable[[], None]
HERE = Path(__file__).resolve()
STEPS, BATCH = 100, 64  # of an epoch; examples a step and replica
LIMIT = 300  # seconds an arm may take to begin, and for an epoch


# --- in a child: each case returns an epoch -----------------------------------------------------


def build(width: int, replicas: int) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    rows = STEPS * BATCH * replicas
    return net, torch.randn(rows, 64), torch.randint(0, 10, (rows,))


def fit(strategy: Any, width: int, replicas: int, steps: int = STEPS) -> Epoch:
    import stratagem as sg

    module, x, y = build(width, replicas)
    rows = steps * BATCH * replicas
    with strategy.scope():
        model = sg.Model(module)
        model.compile("adam", loss="cross_entropy", metrics=["accuracy"])
    return lambda: model.fit(x[:rows], y[:rows], batch_size=BATCH * replicas, verbose=0)


def mirrored(replicas: int) -> Any:
    import stratagem as sg

    return sg.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def loop(replicas: int, width: int) -> Epoch:
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import stratagem as sg

    strategy = sg.MultiWorkerMirroredStrategy() if replicas > 1 else mirrored(1)
    net, x, y = build(width, replicas)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH * replicas, shuffle=True)
    net, optimizer, loader = strategy.prepare(net, optimizer, loader)

    def epoch() -> None:
        for rows, classes in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(rows), classes).backward()
            optimizer.step()

    return epoch


def keras(replicas: int, strategy: Any = None) -> Epoch:
    import keras
    import numpy as np

    with (strategy or mirrored(replicas)).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    dice, rows = np.random.default_rng(0), STEPS * BATCH * replicas
    x = dice.normal(size=(rows, 64)).astype("float32")
    y = dice.integers(0, 10, rows)
    return lambda: model.fit(x, y, batch_size=BATCH * replicas, verbose=0)


def servers(updates: str) -> tuple[Any, int]:
    import stratagem as sg

    rule, parts = (sg.Synchronous(), 2) if updates == "sync" else (sg.Asynchronous(), 1)
    cluster = sg.LocalCluster(workers=2, ps=1)
    return sg.ParameterServerStrategy(cluster, updates=rule), parts


def served(updates: str) -> Epoch:
    strategy, parts = servers(updates)
    return fit(strategy, 256, parts)


CASES: dict[str, Callable[[], Epoch]] = {
    "fit-1": lambda: fit(mirrored(1), 256, 1),
    "fit-2": lambda: fit(mirrored(2), 256, 2),
    "fit-2-large": lambda: fit(mirrored(2), 8192, 2, STEPS // 4),
    "loop-1": lambda: loop(1, 256),
    "loop-2": lambda: loop(2, 256),
    "loop-2-large": lambda: loop(2, 4096),
    "keras-1": lambda: keras(1),
    "keras-2": lambda: keras(2),
    "keras-servers": lambda: keras(2, servers("sync")[0]),
    "servers-sync": lambda: served("sync"),
    "servers-async": lambda: served("async"),
    "servers-sync-sockets": lambda: served("sync"),
    "first-step": lambda: fit(mirrored(2), 256, 2, 1),
}
LAUNCHED = ("loop-2", "loop-2-large")  # by `stratagem run`


def child(case: str, where: str) -> None:
    """An epoch for each byte that comes; the seconds it took go back.

    Only the chief is asked: the others of a launched case begin each epoch and wait for it there.
    """
    import torch

    torch.set_num_threads(1)
    epoch = CASES[case]()
    if "worker" in os.environ.get("TF_CONFIG", "") and '"index": 0' not in os.environ["TF_CONFIG"]:
        while True:
            epoch()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(where)
        epoch()
        line.sendall(b"\n")
        while line.recv(1):
            started = time.perf_counter()
            epoch()
            line.sendall(f"{time.perf_counter() - started}\n".encode())
    os._exit(0)  # a launched case's others are in the middle of an epoch


# --- in the parent ------------------------------------------------------------------------------


class Arm:
    """A process tree that trains a case with a commit's code."""

    def __init__(self, case: str, checkout: Path, folder: Path) -> None:
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        where = tempfile.mktemp(dir=folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(where)
            listener.listen(1)
            listener.settimeout(1.0)
            self._process = subprocess.Popen(
                command(case, where),
                env=environ(case, checkout),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                cwd=folder,
            )
            self._line = self._accept(listener)
        self._line.settimeout(LIMIT)
        self._answers = self._line.makefile()
        self._answers.readline()

    def _accept(self, listener: socket.socket) -> socket.socket:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
        self._process.terminate()
        raise self._failed()

    def epoch(self) -> float:
        self._line.sendall(b"g")
        answer = self._answers.readline()
        if not answer:
            raise self._failed()
        return float(answer)

    def _failed(self) -> RuntimeError:
        self._errors.seek(0)
        return RuntimeError("an arm ended:\n" + self._errors.read().decode()[-3000:])

    def close(self) -> None:
        self._line.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._line.close()
        self._process.wait(60)
        self._errors.close()


class FirstStep:
    """A fresh process each time."""

    def __init__(self, case: str, checkout: Path, folder: Path) -> None:
        self._arm = lambda: Arm(case, checkout, folder)

    def epoch(self) -> float:
        started = time.perf_counter()
        arm = self._arm()
        took = time.perf_counter() - started
        arm.close()
        return took

    def close(self) -> None:
        return None


def command(case: str, where: str) -> list[str]:
    script = [str(HERE), "--child", case, where]
    if case in LAUNCHED:
        return [
            sys.executable,
            "-m",
            "stratagem",
            "run",
            "--replicas",
            "2",
            "--grace",
            "1",
            *script,
        ]
    return [sys.executable, *script]


def environ(case: str, checkout: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "KERAS_BACKEND": "torch",
        "CUDA_VISIBLE_DEVICES": "",
        "STRATAGEM_SHARED_MEMORY": "0" if "sockets" in case else "1",
    }


@contextmanager
def checkout(name: str, folder: Path) -> Iterator[Path]:
    """A folder with the commit, or the folder itself."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(HERE.parent), "worktree"]
    place = Path(tempfile.mkdtemp(dir=folder)) / "checkout"
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), name], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


def measure(case: str, checkouts: dict[str, Path], rounds: int, folder: Path) -> str:
    kind = FirstStep if case == "first-step" else Arm
    with ExitStack() as ends:
        arms = {}
        for name, place in checkouts.items():
            arms[name] = kind(case, place, folder)
            ends.callback(arms[name].close)
        found = []
        for number in range(rounds + 1):
            order = list(arms) if number % 2 else list(arms)[::-1]
            found.append({name: arms[name].epoch() for name in order})
    ratios = [sorted(r[name] / r["old"] for r in found[1:]) for name in ("new", "again")]
    new, again = (statistics.median(r) for r in ratios)
    low, high = ratios[0][rounds // 4], ratios[0][-1 - rounds // 4]
    ms = statistics.median(r["old"] for r in found[1:]) * 1e3
    return f"{case:22}{ms:10.1f}{new:9.3f}   {low:.3f} to {high:.3f}{again:12.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("old", nargs="?", help="a commit or a checkout's folder")
    parser.add_argument("new", nargs="?", default=str(HERE.parents[2]))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    if args.old is None:
        parser.error("which commit is the old one?")
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores; {args.rounds} rounds")
    print(f"{'case':22}{'old, ms':>10}{'new/old':>9}   {'middle half':14}{'old/old':>12}")
    with tempfile.TemporaryDirectory(prefix="between-") as name, ExitStack() as ends:
        folder = Path(name)
        old, new = (ends.enter_context(checkout(each, folder)) for each in (args.old, args.new))
        for case in args.cases.split(","):
            print(
                measure(case, {"old": old, "new": new, "again": old}, args.rounds, folder),
                flush=True,
            )


if __name__ == "__main__":
    main()
