"""Write the tables of README.md here, and of the project's, from result.json.

python benchmarks/same_answer/pages.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import peers  # noqa: E402
from comparing import Cell  # noqa: E402

REPLICAS = (2, 3)
#: the rows and columns of the project's README
ROWS = ("short", "few", "ignored", "accumulated", "weighted")
PEERS = ("ddp", "accelerate_loop", "lightning_trainer", "hf_trainer", "keras_parallel", "own_loop")

#: by case, then by number of processes: a cell for each way, the best first. "1" is one process
#: against a loop by hand.
Table = dict[str, dict[str, list[Cell]]]


def tables_of(result: dict[str, Any]) -> dict[str, Table]:
    """The cells of each peer."""
    return {
        peer: {
            name: {count: [Cell(**cell) for cell in cells] for count, cells in counts.items()}
            for name, counts in table.items()
        }
        for peer, table in result["cells"].items()
    }


def text(cells: Sequence[Cell], notes: list[str]) -> str:
    """The cells of 2 and of 3 processes as one of the table's; errors become notes."""
    if all(cell.status == "equal" for cell in cells):
        return str(max(cells, key=lambda cell: cell.amount))
    if all(cell.status == "different" for cell in cells):
        return "**off by " + ", ".join(f"{cell.amount:.1%}" for cell in cells) + "**"
    said = []
    for cell in cells:
        notes += [cell.words] if cell.status == "error" and cell.words not in notes else []
        note = f" [{notes.index(cell.words) + 1}]" if cell.status == "error" else ""
        said.append(str(cell) if cell.status == "equal" else f"**{cell}**{note}")
    return ", ".join(dict.fromkeys(said))


def best(table: Table, name: str) -> list[Cell]:
    return [table[name][str(count)][0] for count in REPLICAS]


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def full_table(result: dict[str, Any]) -> str:
    """Every case and peer, then each way of a peer that has several."""
    notes: list[str] = []
    tables = tables_of(result)
    lines = [line("case", *result["peers"].values()), line(*["---"] * (len(tables) + 1))]
    for name, title in result["cases"].items():
        lines.append(line(title, *(text(best(t, name), notes) for t in tables.values())))
    lines += ["", *(f"{i}. `{words}`" for i, words in enumerate(notes, 1)), "", "## Each case"]
    for name, title in result["cases"].items():
        lines += ["", f"### {title[0].upper()}{title[1:]}", "", line("peer", "way", "2", "3")]
        lines.append(line(*["---"] * 4))
        for peer, table in tables.items():
            for way in peers.peer(peer).ways_of(name):
                cells = [c for n in REPLICAS for c in table[name][str(n)] if c.way == way]
                mark = f"`{way}`" if way else "-"
                lines.append(line(result["peers"][peer], mark, *map(str, cells)))
    ran = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"{ran}; {result['machine']}."])


def short_table(result: dict[str, Any]) -> str:
    """Some cases for the project's README, each cell with a link to its case."""
    tables = tables_of(result)
    names = [result["peers"][peer].split(",")[0] for peer in PEERS]
    lines = [line("on 2 and on 3 processes", *names), line(*["---"] * (len(PEERS) + 1))]
    for name in ROWS:
        title = result["cases"][name]
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        target = f"benchmarks/same_answer/README.md#{anchor}"
        cells = [text(best(tables[peer], name), []) for peer in PEERS]
        cells = [cell.partition(" (")[0] if "equal" in cell else cell for cell in cells]
        lines.append(line(title, *(f"[{cell}]({target})" for cell in cells)))
    return "\n".join(lines)


def put(page: Path, mark: str, table: str) -> None:
    """Replace what stands in a page between two comments."""
    before, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    after = rest.partition("<!-- its end -->")[2]
    page.write_text(f"{before}{begin}\n{table}\n\n<!-- its end -->{after}")


def write(result: dict[str, Any]) -> None:
    """Keep a result, and write the pages."""
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    put(HERE / "README.md", "the table", full_table(result))
    put(HERE.parents[1] / "README.md", "the same answer", short_table(result))


if __name__ == "__main__":
    write(json.loads((HERE / "result.json").read_text()))
