"""Draw docs/speed.png from result.json: how many times as fast as DDP, and where the limit lies.

python benchmarks/cpu_replicas/figure.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
OURS, LIMIT = "#2a6f97", "#adb5bd"


def main() -> None:
    rows = json.loads((HERE / "result.json").read_text())
    labels = [f"{row['model'].upper()}, {row['replicas']} replicas" for row in rows]
    ours = [row["ddp/ours"] for row in rows]
    limits = [row["ddp/ours"] / row["limit/ours"] for row in rows]
    figure, axes = plt.subplots(figsize=(7.2, 0.62 * len(rows) + 1.1), dpi=140)
    places = range(len(rows))
    axes.barh(places, ours, height=0.55, color=OURS, zorder=2)
    for place, ratio, limit in zip(places, ours, limits, strict=True):
        axes.plot([limit, limit], [place - 0.38, place + 0.38], color="black", lw=2, zorder=3)
        axes.annotate(f"{ratio:.2f}x", (0.1, place), va="center", color="white", weight="bold")
    axes.axvline(1, color=LIMIT, ls="--", zorder=1)
    axes.annotate("DDP on Gloo", (1.04, -0.5), va="center", fontsize=9, color="#495057")
    axes.set_yticks(list(places), labels)
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.set_title("Replicas on the CPU of one machine", fontsize=10, loc="left")
    axes.set_xlabel("steps a second, DDP = 1; the black line: the limit, no communication at all")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    figure.tight_layout()
    figure.savefig(HERE.parents[1] / "docs" / "speed.png")


if __name__ == "__main__":
    main()
