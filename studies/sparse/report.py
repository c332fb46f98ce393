"""Tables and the figure of the study, from its data alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import common

Data = dict[str, Any]
NAMES = {"dense": "dense", "sparse": "sparse", "needed": "sparse, needed rows only"}


def tables(data: Data) -> None:
    """Everything that the README says, in Markdown."""
    machine, size, sent = data["machine"], data["size"], data["traffic"]
    print(
        f"{machine['kind']}, {machine['cores']} cores, torch {machine['torch']}, load "
        f"{machine['load before']:.1f} before and {machine['load after']:.1f} after; "
        f"{size['rows']} rows of {size['width']}, {size['words']} words an example, batch "
        f"{size['batch']}, medians of {size['rounds']} rounds.\n"
    )
    print(
        f"Rows touched by a batch: {sent['rows by formula']:.0f} by the formula, "
        f"{sent['rows counted']:.0f} counted. Bytes of a gradient: {sent['sparse'] / 1e3:.0f} kB "
        f"sparse, {sent['dense'] / 1e3:.0f} kB dense, {sent['dense'] / sent['sparse']:.0f} "
        "times as many.\n"
    )
    _real(data)
    _tables(data)
    _predicted(data)
    _knees(data)


def _real(data: Data) -> None:
    arms = data["real"]["arms"]
    print(
        "| way | rule | workers | servers | sparse, updates/s | dense | ratio | sparse, accuracy "
        "| dense | sparse from one device | dense |\n" + "| --- " * 11 + "|"
    )
    for a in (arm for arm in arms if arm["kind"] == "sparse"):
        b = twin(arms, a)
        print(
            f"| {a['way']} | {a['rule']} | {a['workers']} | {a['servers']} | "
            f"{a['updates_per_s']:.1f} | {b['updates_per_s']:.1f} | "
            f"**{a['updates_per_s'] / b['updates_per_s']:.2f}** | {a['accuracy']:.3f} | "
            f"{b['accuracy']:.3f} | {a['apart']:.1e} | {b['apart']:.1e} |"
        )
    one = data["real"]["one device"]
    print(f"\nOne device: accuracy {one['sparse']:.3f} sparse, {one['dense']:.3f} dense.\n")


def _tables(data: Data) -> None:
    size = data["size"]
    print(
        "| way | rows of the table | MB | sparse, updates/s | dense | ratio |\n"
        + "| --- " * 6
        + "|"
    )
    rows = data["real"]["tables"] + [
        a
        for a in data["real"]["arms"]
        if (a["rule"], a["workers"], a["servers"]) == ("asynchronous", 1, 1)
    ]
    speeds = {(r["way"], r.get("rows", size["rows"]), r["kind"]): r["updates_per_s"] for r in rows}
    for way, count in sorted({key[:2] for key in speeds}):
        a, b = speeds[way, count, "sparse"], speeds[way, count, "dense"]
        print(
            f"| {way} | {count} | {count * size['width'] * 4 / 1e6:g} | {a:.1f} | {b:.1f} | "
            f"**{a / b:.2f}** |"
        )
    print()


def twin(arms: list[Data], arm: Data) -> Data:
    """The dense run beside a sparse one."""
    same = ("way", "rule", "workers", "servers")
    return next(b for b in arms if b["kind"] == "dense" and all(b[k] == arm[k] for k in same))


def _predicted(data: Data) -> None:
    rows, costs = data["predicted"], data["real"]["overhead"]
    said = ", ".join(
        f"{name} {value * 1e9 if 'byte' in name else value * 1e3:.2f}"
        for name, value in costs.items()
    )
    print(f"Overhead in ms (of a byte in ns): {said}.\n")
    heads = [key for key in rows[0] if key.startswith("error")]
    print(
        "| runs | count | "
        + " | ".join(f"{head}: median (worst)" for head in heads)
        + " |\n"
        + "| --- " * (2 + len(heads))
        + "|"
    )
    groups: dict[str, list[Data]] = {}
    for row in sorted(rows, key=lambda r: (r["rule"], r["workers"], r["servers"])):
        name = f"{row['rule']}, {row['workers']} on {row['servers']}"
        groups.setdefault(name, []).append(row)
    for name, members in {**groups, "all": rows}.items():
        cells = [
            f"{statistics.median(row[head] for row in members):+.0%} "
            f"({max((row[head] for row in members), key=abs):+.0%})"
            for head in heads
        ]
        print(f"| {name} | {len(members)} | " + " | ".join(cells) + " |")
    print()


def _knees(data: Data) -> None:
    rows = data["knees"]
    last = max(row["workers"] for row in data["simulated"])
    print(
        f"Simulated, 1 to {last} workers, a step of {data['compute'] * 1e3:.0f} ms. Best speedup "
        "(workers that reach 95% of it; most workers at an efficiency of a half):\n"
    )
    print("| rule | link | servers | " + " | ".join(NAMES.values()) + " |\n" + "| --- " * 6 + "|")
    for rule, link, servers in dict.fromkeys((r["rule"], r["link"], r["servers"]) for r in rows):
        cells = []
        for kind in NAMES:
            row = next(
                r
                for r in rows
                if (r["rule"], r["link"], r["servers"], r["kind"]) == (rule, link, servers, kind)
            )
            cells.append(f"{row['best']:.1f} ({row['saturates']}; {row['half']})")
        print(f"| {rule} | {link} | {servers} | " + " | ".join(cells) + " |")


def figure(data: Data, path: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return

    drawing, axes = plt.subplots(1, 3, figsize=(13, 4.7), constrained_layout=True)
    _bars(axes[0], data)
    for ax, link in zip(axes[1:], dict.fromkeys(r["link"] for r in data["knees"]), strict=True):
        _curves(ax, data, link)
    drawing.legend(
        *axes[1].get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower right"
    )
    drawing.savefig(path, dpi=68)
    plt.close(drawing)


def _bars(ax: Any, data: Data) -> None:
    arms = data["real"]["arms"]
    pairs = [(a, twin(arms, a)) for a in arms if a["kind"] == "sparse"]
    ratios = [a["updates_per_s"] / b["updates_per_s"] for a, b in pairs]
    labels = [
        f"{a['way'].split()[-1]}, {a['rule'][:-7]}., {_count(a['workers'], 'worker')}, "
        f"{_count(a['servers'], 'server')}"
        for a, _ in pairs
    ]
    ax.barh(labels, ratios, color="tab:green")
    ax.axvline(1, color="black", lw=1)
    ax.tick_params(axis="y", labelsize=7)
    ax.set_xlabel("updates/s, sparse / dense; line: alike")
    ax.set_title(f"measured on {data['machine']['cores']} cores")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _curves(ax: Any, data: Data, link: str) -> None:
    servers = sorted({row["servers"] for row in data["simulated"]})
    colours = dict(zip(NAMES, ("tab:red", "tab:green", "tab:blue"), strict=True))
    for kind, colour in colours.items():
        for count, style in ((servers[0], ":"), (servers[-1], "-")):
            rows = [
                r
                for r in data["simulated"]
                if r["rule"] == "asynchronous"
                and (r["link"], r["servers"], r["kind"]) == (link, count, kind)
            ]
            ax.plot(
                [r["workers"] for r in rows],
                [r["speedup"] for r in rows],
                style,
                color=colour,
                label=f"{NAMES[kind]}, {_count(count, 'server')}",
            )
    most = max(row["workers"] for row in data["simulated"])
    ax.plot([1, most], [1, most], color="black", lw=0.7, ls="--", label="nothing lost")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="workers",
        ylabel="speedup",
        title=f"simulated, asynchronous, {link}",
    )
