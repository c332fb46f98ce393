"""The pages hold together: no dead link, no dead anchor, every public name documented."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stratagem as sg

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "benchmarks", "studies")
PAGES = sorted([*ROOT.glob("*.md"), *(p for each in FOLDERS for p in (ROOT / each).rglob("*.md"))])


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What a forge makes of headings: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in plain}


def dead_links(page: Path) -> list[str]:
    found = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = page.parent / target if target else page
        missing = not file.exists()
        if missing or (anchor and file.suffix == ".md" and anchor not in anchors(prose(file))):
            found.append(f"{target}#{anchor}" if anchor else target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    assert dead_links(page) == []


def test_dead_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Here, `code` and [a link](x)\n```sh\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# A\n[1](b.md) [2](c.md) [3](b.md#here-code-and-a-link) [4](b.md#no-heading) [5](#a)\n"
        "[6](#b) [7](https://example.org/x)\n"
    )
    assert dead_links(page) == ["c.md", "b.md#no-heading", "#b"]


def test_the_table_of_strategies_has_the_arguments_that_each_takes() -> None:
    """The last two columns of the README: whether `wire=` and `sync=` may be given."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(.*\|([^|\n]*)\|([^|\n]*)\|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} >= {"MirroredStrategy", "ShardedStrategy", "Mesh"}
    for name, *told in rows:
        takes = inspect.signature(getattr(sg, name)).parameters
        assert [cell.strip() != "-" for cell in told] == ["wire" in takes, "sync" in takes], name


def test_tests_that_a_page_names_exist() -> None:
    """`test_a.py::test_b`, in tests/strategies, or in tests/frontends and tests by their folder."""
    homes = [ROOT / "tests" / folder for folder in ("strategies", "frontends", ".")]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/model-parallel.md").read_text())
    assert len(named) > 20
    for file, name in named:
        (found,) = (home / file for home in homes if (home / file).exists())
        assert f"\ndef {name}(" in found.read_text(), f"{file}::{name}"


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs" / "index.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if name != "index.md" and f"({name})" not in listed] == []


def undocumented(names: list[str], page: str) -> list[str]:
    """Public names that the page does not have in its first column, or without a docstring."""
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) | {"__version__"}
    return [n for n in names if n not in listed or not inspect.getdoc(getattr(sg, n, None))]


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert undocumented(sg.__all__, page) == []
    gone = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) - set(sg.__all__)
    assert gone == set()
    assert undocumented(["Model", "Nonsense"], page) == ["Nonsense"]
    assert undocumented(["Model"], page.replace("| `Model` |", "")) == ["Model"]


def test_the_readme_takes_three_minutes() -> None:
    words = [each for each in (ROOT / "README.md").read_text().split() if each != "|"]
    assert len(words) < 900, "move something into docs/"


def test_what_a_ported_script_needs_is_told() -> None:
    """Printing and saving once in the README's loop, and a table for whatever else a script has."""
    assert {"strategy.print(", "if strategy.is_chief:"} <= set(
        re.findall(r"strategy\.print\(|if strategy\.is_chief:", (ROOT / "README.md").read_text())
    )
    table = (ROOT / "docs" / "own-loop.md").read_text().partition("| your script has |")[2]
    rows = "|".join(line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()[2:])
    told = ["summed loss", "class weights", "BatchNorm", "GAN", "test loader", "saving", "schedule"]
    told += ["no loader", "LSTM", "reinforcement learning", "mix-up", "printing", "squeeze"]
    assert [each for each in told if each not in rows] == []


def images(page: Path) -> list[Path]:
    return [
        page.parent / each for each in re.findall(r'<img[^>]* src="([^":]+)"', page.read_text())
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install '.[docs]'")
def test_the_site_builds() -> None:
    """In MkDocs' strict form: a warning is an error."""
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py")]
    subprocess.run(command, check=True, timeout=280)
    made = ROOT / "build" / "site"
    assert (made / "index.html").is_file() and (made / "docs" / "reference.html").is_file()
    assert "MirroredStrategy" in (made / "docs" / "reference.html").read_text()
    assert "the last share had 18 images" in (made / "examples" / "notebook.html").read_text()
    assert "test accuracy 0." in (made / "examples" / "keras.html").read_text()
    figures = [image for page in made.rglob("studies*.html") for image in images(page)]
    assert len(figures) > 3 and all(each.is_file() for each in figures)
