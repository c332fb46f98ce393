"""The most memory of a stage beside that of one device, on a net of 200 MB of parameters with Adam.

    python benchmarks/pipeline/memory.py [--stages 1,2,4] [--width 2048] [--layers 12]

Of every process, without what it had before the model was made: the largest proportional set size
(pages that several processes map count in parts), looked at every 20 ms, and the largest resident
set size, of which the kernel keeps account (shared pages count in full). A fit is measured from the
making of the model to its end: the whole model is in the first process before and after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg

ROWS, STEPS, MICROBATCHES = 64, 3, 8


def kept() -> dict[str, int]:
    """Of this process: what this file has in mind is sent along to others, and would be the first
    one's."""
    found: dict[str, int] = vars(sys).setdefault("stratagem_peak", {"before": 0, "most": 0})
    return found


def held() -> int:
    """Bytes of this process; of those that several share, its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def watch() -> None:
    def look() -> None:
        while True:
            peak["most"] = max(peak["most"], held())
            time.sleep(0.02)

    peak = kept()
    peak["before"], peak["resident"] = held(), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins anew
    threading.Thread(target=look, daemon=True).start()


def peaks() -> tuple[float, float]:
    peak = kept()
    most = peak["most"] - peak["before"], resident("VmHWM") - peak["resident"]
    return most[0] / 1e6, most[1] / 1e6


def child(stages: int, width: int, layers: int) -> list[tuple[float, float]]:
    devices = [f"cpu:{i}" for i in range(stages)]
    strategy: Any = (
        sg.PipelineStrategy(devices, MICROBATCHES) if stages > 1 else sg.MirroredStrategy(["cpu:0"])
    )
    strategy.run(watch)
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    with strategy.scope():
        model = sg.Model(nn.Sequential(*hidden, nn.Linear(width, 10)))
        model.compile("adam", "cross_entropy")
    del hidden
    x, y = torch.randn(ROWS * STEPS, width), torch.randint(0, 10, (ROWS * STEPS,))
    model.fit(x, y, batch_size=ROWS, epochs=1, verbose=0)
    found: list[tuple[float, float]] = strategy.run(peaks)
    strategy.close()
    return found


def measured(stages: int, args: argparse.Namespace) -> Any:
    words = [sys.executable, __file__, "--child", str(stages)]
    words += ["--width", str(args.width), "--layers", str(args.layers)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default="1,2,4")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--child", type=int)
    args = parser.parse_args()
    if args.child:
        torch.set_num_threads(1)
        print(json.dumps(child(args.child, args.width, args.layers)))
        return
    size = args.layers * args.width * (args.width + 1) * 4 / 1e6
    print(f"{platform.machine()}, torch {torch.__version__}, {size:.0f} MB of parameters, Adam\n")
    print("| stages | largest, PSS | of one | largest, resident | of one | PSS of each, MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    first: Any = None
    for stages in map(int, args.stages.split(",")):
        found = measured(stages, args)
        most = [max(each) for each in zip(*found, strict=True)]
        first = first or most
        parts = [a / b for a, b in zip(most, first, strict=True)]
        each = ", ".join(f"{pss:.0f}" for pss, _ in found)
        print(
            f"| {stages} | {most[0]:.0f} MB | **{parts[0]:.2f}** | {most[1]:.0f} MB | "
            f"{parts[1]:.2f} | {each} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
