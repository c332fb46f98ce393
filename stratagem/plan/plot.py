"""The plan as a picture; matplotlib is an extra."""

from __future__ import annotations

import io
from typing import Any

from stratagem.errors import UsageError
from stratagem.plan.choose import Plan
from stratagem.plan.report import shown

_LINES = 8
_DOTS = {"marker": "o", "markersize": 3}
#: over a line of the same speedups, which is seen between the dashes and in the rings
_OVER = {"marker": "o", "markersize": 6, "markerfacecolor": "none", "linestyle": "--"}


def library() -> Any:
    """matplotlib, or a sentence that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError(
            "a PNG needs matplotlib, which is not installed: pip install 'stratagem[plots]', or "
            "ask for --html, which needs nothing."
        ) from None
    matplotlib.use("Agg", force=False)
    return matplotlib


def png(plan: Plan) -> bytes:
    """The drawing, for a file."""
    out = io.BytesIO()
    drawing(plan).savefig(out, format="png")
    return out.getvalue()


def drawing(plan: Plan) -> Any:
    """Speedup over replicas, and where the time of a step goes at the recommended size."""
    library()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _speedups(plan, left)
    _parts(plan, right)
    return figure


def _speedups(plan: Plan, axes: Any) -> None:
    rows = shown(plan)[:_LINES]
    drawn: set[tuple[int, float]] = set()
    for name, row, _ in rows:
        xs = [each.configuration.replicas for each in row]
        ys = [each.speedup for each in row]
        places = {(x, round(y, 2)) for x, y in zip(xs, ys, strict=True)}
        axes.plot(xs, ys, label=name, **(_OVER if places & drawn else _DOTS))
        drawn |= places
    most = max(each.configuration.replicas for _, row, _ in rows for each in row)
    axes.plot([1, most], [1, most], linestyle=":", color="0.6",
              label="as many as there are replicas")  # fmt: skip
    best = plan.recommendation
    axes.plot([best.configuration.replicas], [best.speedup], marker="o", markersize=10,
              markerfacecolor="none", color="black", linestyle="none",
              label="recommended")  # fmt: skip
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("replicas")
    axes.set_ylabel("times one device")
    axes.set_title(f"{plan.profile.name} on {plan.hardware}", fontsize=9)
    axes.grid(True, color="0.92")
    axes.legend(fontsize=7)


def _parts(plan: Plan, axes: Any) -> None:
    """One bar for each number of replicas of the recommended kind."""
    row = plan.families.get(plan.recommendation.configuration.family, [plan.recommendation])
    names = list(dict.fromkeys(name for each in row for name in each.parts))
    low = [0.0] * len(row)
    for name in names:
        high = [each.parts.get(name, 0.0) * 1e3 for each in row]
        axes.bar(range(len(row)), high, bottom=low, label=name)
        low = [a + b for a, b in zip(low, high, strict=True)]
    axes.set_xticks(range(len(row)), [str(each.configuration.replicas) for each in row])
    axes.set_xlabel("replicas")
    axes.set_ylabel("ms a step")
    axes.set_title(plan.recommendation.configuration.family, fontsize=9)
    axes.set_ylim(0, max(low) * (1.1 + 0.07 * len(names)))  # the legend covers no bar
    axes.legend(fontsize=7, loc="upper left", reverse=True)
