"""Tables and the figure of the study, from its data alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import common

Data = dict[str, Any]


def rows_of(data: Data, condition: str, arm: str) -> list[Data]:
    return [r for r in data["runs"] if (r["condition"], r["arm"]) == (condition, arm)]


def order(data: Data, condition: str) -> dict[str, list[float]]:
    """The seconds of each arm that reached the target, in the order of the arms."""
    return {
        arm: sorted(r["seconds"] for r in rows_of(data, condition, arm) if r["seconds"] is not None)
        for arm in data["rates"]
    }


def tables(data: Data) -> None:
    """Everything that the README says, in Markdown."""
    machine, size = data["machine"], data["size"]
    print(
        f"{machine['kind']}, {machine['cores']} cores, torch {machine['torch']}, load "
        f"{machine['load before']:.1f} before and {machine['load after']:.1f} after; target "
        f"{size['target']:.0%}, a step of {size['step'] * 1e3:.0f} ms for {size['share']} "
        f"examples, {len(size['seeds'])} seeds, at most {size['epochs']} epochs.\n"
    )
    for condition in dict.fromkeys(row["condition"] for row in data["runs"]):
        print(
            f"{condition}:\n\n| arm | rate | reached | seconds, median | least to most | "
            "epochs | ms a pair of gradients | to mirrored |\n" + "| --- " * 8 + "|"
        )
        for arm in data["rates"]:
            print(_row(data, condition, arm))
        print()


def _row(data: Data, condition: str, arm: str) -> str:
    rows, first = rows_of(data, condition, arm), rows_of(data, condition, next(iter(data["rates"])))
    took = order(data, condition)[arm]
    pairs = data["size"]["train"] / data["size"]["share"] / 2  # of gradients, in an epoch
    step = statistics.median(r["curve"][-1][0] / r["epochs"] / pairs for r in rows)
    ratios = [
        a["seconds"] / b["seconds"]
        for a, b in zip(rows, first, strict=True)
        if a["seconds"] is not None and b["seconds"] is not None
    ]
    told = f"{statistics.median(took):.2f} | {took[0]:.2f} to {took[-1]:.2f}" if took else "- | -"
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
    return (
        f"| {arm} | {data['rates'][arm]:g} | {len(took)} of {len(rows)} | {told} | "
        f"{statistics.median(r['epochs'] for r in rows):g} | {step * 1e3:.1f} | {ratio} |"
    )


def figure(data: Data, path: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return

    drawing, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True, sharex=True)
    conditions = dict.fromkeys(row["condition"] for row in data["runs"])
    for ax, condition in zip(axes, conditions, strict=True):
        for place, took in enumerate(order(data, condition).values()):
            ax.plot(took, [place] * len(took), "o", alpha=0.6)
            if took:
                ax.plot(statistics.median(took), place, "k|", ms=18, mew=2)
        ax.set_yticks(range(len(data["rates"])), list(data["rates"]))
        ax.invert_yaxis()
        ax.set(
            title=condition,
            xlabel=f"seconds to {data['size']['target']:.0%}; a dot a seed, the bar their median",
        )
    axes[0].set_xlim(left=0)
    axes[1].set_yticklabels([])
    drawing.savefig(path, dpi=80)
    plt.close(drawing)
