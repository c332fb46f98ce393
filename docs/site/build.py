"""The documentation as a site: pages copied with what they link to, notebooks run, a reference.

python docs/site/build.py           # into build/site
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
FOLDERS = ("docs", "examples", "benchmarks", "studies")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def pages() -> list[Path]:
    """Every page of the repository that is for readers."""
    found = [
        *ROOT.glob("*.md"),
        *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md")),
    ]
    return sorted(page.relative_to(ROOT) for page in found)


def stage() -> None:
    """Copy pages, and the files that they link to, under the names that they have here."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in pages():
        text = (ROOT / page).read_text()
        target = PAGES / ("index.md" if page == Path("README.md") else page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(LINK.sub(lambda found, page=page: _link(page, found), text))
    (PAGES / "docs" / "reference.md").write_text(reference())
    for notebook in sorted(ROOT.glob("examples/*.ipynb")):
        page = PAGES / notebook.relative_to(ROOT).with_suffix(".md")
        page.write_text(rendered(notebook))


def _link(page: Path, found: re.Match[str]) -> str:
    """The link, with its file beside it; the front page has another name on the site."""
    before, target, after = found.groups()
    if "://" in target:
        return found.group()
    file = (ROOT / page.parent / target).resolve()
    if file == ROOT / "README.md":
        return f"{before}{target.removesuffix('README.md')}index.md{after}"
    if file.suffix == ".ipynb":
        return f"{before}{target.removesuffix('.ipynb')}.md{after}"
    if file.is_file() and file.suffix != ".md":
        copy = PAGES / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return found.group()


def rendered(notebook: Path) -> str:
    """The notebook as a page, with what its cells print when they are run now."""
    cells = nbformat.read(notebook, as_version=4)
    where = {"metadata": {"path": str(notebook.parent)}}
    NotebookClient(cells, timeout=300, kernel_name="python3", resources=where).execute()
    parts = []
    for cell in cells.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        printed = "".join(_text(output) for output in cell.outputs)
        parts.append(f"```python\n{cell.source}\n```")
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []
    return "\n\n".join(parts) + "\n"


def _text(output: Any) -> str:
    """What a cell has printed or returned, as plain text."""
    found = output.get("text") or output.get("data", {}).get("text/plain", "")
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|.*\r(?!\n)", "", str(found))


def reference() -> str:
    """A page with the docstring of every public name."""
    sys.path.insert(0, str(ROOT))
    import stratagem

    homes = {**stratagem._HOMES, **{home: [] for home in stratagem._MODULES.values()}}
    lines = ["# Reference", ""]
    for home, names in homes.items():
        lines += [f"::: {home}.{name}" for name in names] or [f"::: {home}"]
    return "\n\n".join(lines) + "\n"


def main() -> int:
    stage()
    config = Path(__file__).with_name("mkdocs.yml")
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "-f", str(config)]).returncode


if __name__ == "__main__":
    sys.exit(main())
