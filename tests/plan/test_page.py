"""The page: self-contained, with a tooltip for every point."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from stratagem.plan.choose import Plan, choose
from stratagem.plan.hardware import Hardware
from stratagem.plan.page import fragment, page
from stratagem.plan.report import shown
from tests.plan.support import profile


@pytest.fixture(scope="module")
def plan() -> Plan:
    return choose(profile(name="<Net> & co"), Hardware(hosts=8, link=1.25e8, cores=2), most=8)


class Reader(HTMLParser):
    """Collects what a browser would load, and the dots."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.dots: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [value for key, value in given.items() if key in ("src", "href") and value]
        if tag == "circle":
            self.dots.append(given["data-say"] or "")


def test_nothing_is_loaded(plan: Plan) -> None:
    text = page(plan)
    assert Reader(text).loads == [] and not re.search(r"https?://|@import|url\(", text)
    assert "<Net>" not in text and "&lt;Net&gt; &amp; co" in text


def test_every_point_has_its_figures(plan: Plan) -> None:
    dots = Reader(page(plan)).dots
    assert len(dots) == sum(len(row) for _, row, _ in shown(plan)[:8])
    assert all("examples/s" in dot and "compute" in dot and "x one device" in dot for dot in dots)


def test_points_lie_inside_the_drawing(plan: Plan) -> None:
    found = re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)"', page(plan))
    assert found
    for x, y in found:
        assert 50 <= float(x) <= 745 and 15 <= float(y) <= 385


def test_no_point_lies_on_another() -> None:
    """Central storage is as fast as mirrored replicas; the pointer reaches the points of both."""
    alike = choose(profile(), Hardware(hosts=8, per_host=2, link=1.25e8, cores=2))
    found = re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)"', page(alike))
    dots = [(float(x), float(y)) for x, y in found]
    assert len(dots) > 12
    assert min(math.dist(a, b) for a, b in itertools.combinations(dots, 2)) > 9.5


def test_every_line_has_its_name_at_its_end(plan: Plan) -> None:
    """Joined to its last point, in its colour, without overlap.

    A browser needs 6.2 pixels for a letter of this size.
    """
    text = fragment(plan)
    named = re.findall(
        r'<path d="M([\d.]+),([\d.]+) L[\d.]+,([\d.]+)" fill="none" stroke="(#\w+)"[^>]*/>'
        r'<text x="(\d+)" y="([\d.]+)" font-size="12"><tspan style="fill:\4">[^<]*</tspan>'
        " ([^<]+)<",
        text,
    )
    assert sorted(name for *_, name in named) == sorted(name for name, _, _ in shown(plan)[:8])
    heights = sorted(float(y) for *_, y, _ in named)
    assert min(b - a for a, b in itertools.pairwise(heights)) > 15
    width = float(re.findall(r'viewBox="0 0 (\d+) ', text)[0])
    for x, y, _, colour, left, _, name in named:
        dots = re.findall(rf'<circle cx="([\d.]+)" cy="([\d.]+)" r="\d" fill="{colour}"', text)
        assert dots[-1] == (f"{float(x) - 6:.1f}", y)
        assert float(left) + 6.2 * (len(name) + 2) < width, name


def test_the_page_has_a_table(plan: Plan) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", page(plan))
    told = [re.sub(r"<[^>]+>", "|", row) for row in rows]
    assert len(told) == 1 + len(shown(plan))
    for (name, row, at), line in zip(shown(plan), told[1:], strict=True):
        assert f"|{name}|" in line and at.reason.replace("'", "&#x27;") in line
        assert all(f"|{each.speedup:.1f}|" in line for each in row)
    best = f"{plan.recommendation.speedup:.1f}"
    assert re.findall(r"<mark>([^<]*)</mark>", page(plan)) == [best]


def test_notebooks_have_the_figures_without_a_script(plan: Plan) -> None:
    """The page, whose script shows them, does not show them twice."""
    text = fragment(plan)
    assert "<script" not in text and text.count("<title>") == text.count("<circle ")
    assert page(plan).count("<title>") == 1 and "elementsFromPoint" in page(plan)


def test_no_colour_of_text_is_fixed(plan: Plan) -> None:
    """Notebooks and browsers may be dark."""
    assert "fill:currentColor" in fragment(plan) and "prefers-color-scheme:dark" in page(plan)
    assert not re.search(r"<text [^>]*fill=", fragment(plan))


def test_the_recommended_line_lies_on_top(plan: Plan) -> None:
    best = plan.recommendation.configuration
    assert Reader(page(plan)).dots[-1].startswith(best.family)


def test_one_replica_can_be_drawn() -> None:
    alone = choose(profile(), Hardware(), most=1)
    assert "Stay on one device" in fragment(alone)
