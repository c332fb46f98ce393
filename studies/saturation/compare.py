"""Measured steps against formulas: what was written down before, with terms found, the planner's.

python studies/saturation/compare.py [data.json] [--figure saturation.png] [--rows]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
from task import FORWARD, LAYERS  # noqa: E402
from terms import BUCKET, Row, facts, terms  # noqa: E402

from stratagem.plan.configuration import MULTI_WORKER, SERVERS, Configuration  # noqa: E402
from stratagem.plan.cost import predict  # noqa: E402
from stratagem.plan.hardware import Hardware  # noqa: E402
from stratagem.plan.profile import GradientPart, Profile  # noqa: E402

BATCH = 12
#: half of a word there and back between two hosts, as probe.py finds it
LATENCY = 0.15e-3


def measured(row: Row) -> float:
    """Asynchronous workers differ among each other: there the mean counts, which is the rate."""
    return float(row["mean_s"] if row["strategy"] == "async" else row["step_s"])


def loops(rows: Iterable[Row]) -> dict[int, float]:
    """By the model's bytes: what one host alone takes besides computing."""
    return {
        row["bytes"]: row["step_s"] - row["compute_s"] for row in rows if row["strategy"] == "one"
    }


def configuration(row: Row) -> Configuration:
    wire = "bfloat16" if row["wire"] == "bfloat16" else None
    if row["strategy"] == "ring":
        return Configuration(MULTI_WORKER, hosts=row["hosts"], wire=wire)
    return Configuration(
        SERVERS,
        hosts=row["hosts"],
        servers=row["servers"],
        wire=wire,
        asynchronous=row["strategy"] == "async",
    )


def profile(row: Row, loop: float) -> Profile:
    """What the planner's own profile of such a host would say."""
    compute, layer = row["compute_s"] + loop, row["bytes"] // LAYERS
    forward, backward = compute * FORWARD, compute * (1 - FORWARD)
    together = max(1, BUCKET // layer)
    ends = [*range(together, LAYERS, together), LAYERS]
    sizes = [layer * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    buckets = tuple(
        GradientPart(size, backward * end / LAYERS) for size, end in zip(sizes, ends, strict=True)
    )
    shapes = ((layer // 4 // 64, 64),) * LAYERS
    gradients = tuple(GradientPart(layer, backward * (i + 1) / LAYERS) for i in range(LAYERS))
    return Profile(
        "sleeper",
        BATCH // row["hosts"],
        forward,
        backward,
        0.0,
        buckets,
        shapes,
        gradients=gradients,
    )


def planned(row: Row, loop: float) -> float:
    """What the planner predicts for a row."""
    if row["strategy"] == "one":
        return float(row["compute_s"] + loop)
    hardware = Hardware(hosts=row["hosts"], link=row["link_bits"] / 8, latency=LATENCY)
    return predict(profile(row, loop), hardware, configuration(row)).step


Formula = Callable[[Row, float], float]
FORMULAS: dict[str, Formula] = {
    "facts": lambda row, loop: facts(row),
    "terms": terms,
    "planner": planned,
}


def errors(rows: Sequence[Row], formula: Formula) -> list[float]:
    """Relative, signed: more than 0 is predicted too slow. The compute-only rows are no test."""
    own = loops(rows)
    return [
        formula(row, own[row["bytes"]]) / measured(row) - 1
        for row in rows
        if row["strategy"] != "one"
    ]


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by strategy, servers and wire."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["strategy"] != "one":
            servers = f" {row['servers']} ps" if row["servers"] else ""
            found.setdefault(f"{row['strategy']}{servers} {row['wire']}", []).append(row)
    return found


def table(rows: Sequence[Row]) -> str:
    """Median and worst error of each formula, by group."""
    own = [row for row in rows if row["strategy"] == "one"]
    lines = ["| | rows | " + " | ".join(f"{name}: median, worst" for name in FORMULAS) + " |"]
    lines.append("| --- | --- |" + " --- |" * len(FORMULAS))
    for name, members in {**groups(rows), "all": list(rows)}.items():
        cells = []
        for formula in FORMULAS.values():
            sizes = [abs(e) for e in errors([*own, *members], formula)]
            cells.append(f"{statistics.median(sizes):.0%}, {max(sizes):.0%}")
        count = sum(row["strategy"] != "one" for row in members)
        lines.append(f"| {name} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def listing(rows: Sequence[Row]) -> str:
    """Every row, and every formula's error in it."""
    own = loops(rows)
    lines = []
    for row in rows:
        if row["strategy"] == "one":
            continue
        took = measured(row)
        guesses = [formula(row, own[row["bytes"]]) for formula in FORMULAS.values()]
        lines.append(
            f"{row['strategy']:6}{row['hosts']:3}{row['servers']:3} {row['wire']:9}"
            f"{row['link_bits'] / 1e6:6.0f}{row['bytes'] / 1e6:6.1f}{took * 1e3:9.1f}"
            f"{row['spread']:7.1%}" + "".join(f"{guess / took - 1:+8.1%}" for guess in guesses)
        )
    return "\n".join(lines)


def figure(rows: Sequence[Row], path: str) -> None:
    """Speedup by hosts: measured (marks) and by the terms (lines), a panel a link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    own = loops(rows)
    links = sorted({row["link_bits"] for row in rows if row["hosts"] > 2})
    canvas, panels = pyplot.subplots(1, len(links), figsize=(3.4 * len(links), 3.6), sharey=True)
    for panel, link in zip(panels, links, strict=True):
        size = next(r["bytes"] for r in rows if r["link_bits"] == link and r["hosts"] > 2)
        here = [r for r in rows if r["link_bits"] == link and r["bytes"] == size]
        alone = next(r["step_s"] for r in here if r["strategy"] == "one")
        for number, (name, members) in enumerate(_curves(here).items()):
            hosts = [1, *(r["hosts"] for r in members)]
            colour, dash = f"C{number // 2}", "--" if "bfloat16" in name else "-"
            guess = [1.0, *(alone / terms(r, own[size]) for r in members)]
            panel.plot(hosts, guess, dash, color=colour, linewidth=1)
            seen = [1.0, *(alone / measured(r) for r in members)]
            fill = "white" if "bfloat16" in name else colour
            label = name.replace("bfloat16", "bf16").replace("float32", "fp32")
            label = label.replace("1 ps", "1 server").replace("ps", "servers")
            panel.plot(
                hosts, seen, "o", color=colour, markerfacecolor=fill, markersize=5, label=label
            )
        panel.axhline(1.0, color="grey", linewidth=0.5)
        panel.set_title(
            f"{link / 1e6:.0f} Mbit/s, {size / 1e6:.1f} MB, {alone * 1e3:.0f} ms alone", fontsize=9
        )
        panel.set_xlabel("hosts")
        panel.set_xticks([1, 2, 3, 4])
    panels[0].set_ylabel("speedup, same global batch")
    for dash, what in (("-", "fp32"), ("--", "bf16")):  # in the legend alone
        panels[-1].plot([], [], dash, color="black", linewidth=1, label=f"terms.py, {what}")
    panels[-1].legend(
        fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        title="dots are measured",
        title_fontsize=7,
    )
    canvas.tight_layout()
    canvas.savefig(path, dpi=90)


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """What the figure shows: the synchronous strategies, fp32 and bf16 side by side."""
    found = {k: v for k, v in groups(rows).items() if not k.startswith("async")}
    return {
        name: sorted(found[name], key=lambda r: r["hosts"])
        for name in sorted(found, key=lambda k: (k.split()[:-1], "b" in k))
    }


def read(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path, default=HERE / "data.json")
    parser.add_argument("--figure", metavar="PNG")
    parser.add_argument("--rows", action="store_true", help="every row, not only the summary")
    args = parser.parse_args()
    rows = read(args.data)
    if args.rows:
        print(listing(rows))
    print(table(rows))
    if args.figure:
        figure(rows, args.figure)


if __name__ == "__main__":
    main()
