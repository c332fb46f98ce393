"""Draw a plan as a self-contained HTML page, or as a part of one."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from stratagem.plan.advice import code, sentence
from stratagem.plan.choose import Plan
from stratagem.plan.cost import Prediction
from stratagem.plan.hardware import say_bytes
from stratagem.plan.report import heading, shown, warnings

_WIDTH, _HEIGHT, _LEFT, _LOW, _RIGHT = 1030, 420, 52, 40, 350  # margins: axes, and names of lines
_DOT, _LINE = 10, 16  # pixels between two points, and between two names
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5cb8", "#c77d0a", "#00798c", "#7a7a7a", "#b03a86")
_LINES = 8

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;
color:#222;background:#fff}
#tip{position:fixed;display:none;background:#fff;border:1px solid #999;padding:.4em .6em;
font-size:13px;white-space:pre;pointer-events:none;box-shadow:0 1px 4px #0003}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}#tip{background:#222}}"""

#: also for notebooks of any style: translucent grey is visible on white and on black
_OWN_STYLE = """.sgplan pre{background:#8882;color:inherit;padding:.8em;overflow-x:auto}
.sgplan svg{max-width:100%;min-width:420px;height:auto}.sgplan div{overflow-x:auto}
.sgplan text{fill:currentColor}.sgplan circle{cursor:pointer}
.sgplan circle:hover{stroke:currentColor;stroke-width:2}
.sgplan table{border-collapse:collapse;font-size:13px;margin:1em 0}
.sgplan th,.sgplan td{padding:.2em .6em;border-bottom:1px solid #8884;text-align:right}
.sgplan th:first-child,.sgplan td:first-child,.sgplan .why{text-align:left}
.sgplan caption{text-align:left}.sgplan mark{background:#8884;color:inherit;font-weight:bold}"""

#: the tooltip describes all dots under the pointer, the topmost first
_SCRIPT = """const tip=document.getElementById('tip');
for(const dot of document.querySelectorAll('circle')){
 dot.addEventListener('pointermove',e=>{
  const here=document.elementsFromPoint(e.clientX,e.clientY).filter(d=>d.dataset.say);
  tip.textContent=here.map(d=>d.dataset.say).join('\\n\\n');tip.style.display='block';
  tip.style.left=Math.max(8,Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8))+'px';
  tip.style.top=Math.max(8,Math.min(e.clientY+14,innerHeight-tip.offsetHeight-8))+'px'});
 dot.addEventListener('pointerleave',()=>tip.style.display='none')}"""


def page(plan: Plan) -> str:
    """Return the plan as an HTML document."""
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{html.escape(plan.profile.name)}: how many replicas?</title>"
        f"<style>{_STYLE}</style>\n{fragment(plan, titles=False)}<div id=tip></div>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def fragment(plan: Plan, titles: bool = True) -> str:
    """Return the plan as an HTML fragment, for notebooks.

    titles: tooltips without a script, which notebooks may not run.
    """
    say = html.escape
    notes = "".join(f"<p>Note: {say(each)}</p>" for each in warnings(plan.profile))
    return (
        f"<style>{_OWN_STYLE}</style><section class=sgplan>"
        f"<h2>{say(plan.profile.name)}: how many replicas?</h2>"
        f"<p>{say(heading(plan.profile))}; on {say(str(plan.hardware))}.</p>{notes}"
        f"<p><b>{say(sentence(plan))}</b></p><pre>{say(code(plan))}</pre>"
        f"<div>{svg(plan, titles)}</div><div>{_table(plan)}</div></section>"
    )


def svg(plan: Plan, titles: bool = True) -> str:
    """Draw speedup over the number of replicas, on logarithmic axes."""
    rows = [(name, row) for name, row, _ in shown(plan)[:_LINES]]
    most = max(each.configuration.replicas for _, row in rows for each in row)
    least = min(0.5, *(each.speedup for _, row in rows for each in row))
    axes = _Axes(math.log2(max(most, 2)), math.floor(math.log2(max(least, 1 / 64))))
    best = plan.recommendation.configuration
    places = _without_overlap(
        [
            [(axes.x(p.configuration.replicas), axes.y(max(p.speedup, 1 / 64))) for p in row]
            for _, row in rows
        ]
    )
    lines = "".join(
        reversed(
            [  # the first is the best, and is drawn last
                _curve(row, points, colour, best.replicas if name == best.family else 0, titles)
                for (name, row), points, colour in zip(rows, places, _COLOURS, strict=False)
            ]
        )
    )
    names = _names([name for name, _ in rows], [points[-1] for points in places])
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img '
        f'aria-label="speedup by number of replicas">{axes.grid()}{lines}{names}</svg>'
    )


class _Axes:
    """Two axes with powers of two."""

    def __init__(self, top: float, low: int) -> None:
        self.top, self.low = top, low

    def x(self, n: float) -> float:
        return _LEFT + math.log2(n) / self.top * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        part = (math.log2(value) - self.low) / (self.top - self.low)
        return _HEIGHT - _LOW - part * (_HEIGHT - _LOW - 20)

    def grid(self) -> str:
        found = []
        for i in range(int(self.top) + 1):
            x = self.x(2**i)
            found.append(
                f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{_HEIGHT - _LOW}" '
                f'stroke="#8884"/><text x="{x:.1f}" y="{_HEIGHT - _LOW + 18}" '
                f'font-size="12" text-anchor="middle">{2**i}</text>'
            )
        for i in range(self.low, int(self.top) + 1):
            y = self.y(2.0**i)
            name = str(2**i) if i >= 0 else f"1/{2**-i}"
            found.append(
                f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" '
                f'stroke="#8884"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" '
                f'font-size="12" text-anchor="end">{name}</text>'
            )
        found.append(
            f'<line x1="{self.x(1):.1f}" y1="{self.y(1):.1f}" '
            f'x2="{self.x(2**self.top):.1f}" y2="{self.y(2**self.top):.1f}" '
            'stroke="#888" stroke-dasharray="4 4"/>'
        )
        found.append(
            f'<text x="{(_WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" font-size="13" '
            f'text-anchor="middle">replicas</text><text x="{_LEFT - 20}" '
            'y="10" font-size="13">times one device (dashed: as many as there are '
            "replicas)</text>"
        )
        return "".join(found)


def _without_overlap(
    rows: Sequence[Sequence[tuple[float, float]]],
) -> list[list[tuple[float, float]]]:
    """Move overlapping points sideways, so that each is visible."""
    taken: list[tuple[float, float]] = []
    found = []
    for row in rows:
        moved = []
        for x, y in row:
            aside = (0, *(sign * _DOT * i for i in range(1, 2 * _LINES) for sign in (1, -1)))
            free = (
                x + by
                for by in aside
                if x + by >= _LEFT
                and not any(math.hypot(x + by - a, y - b) < _DOT for a, b in taken)
            )
            taken.append((next(free, x), y))
            moved.append(taken[-1])
        found.append(moved)
    return found


def _names(names: Sequence[str], ends: Sequence[tuple[float, float]]) -> str:
    """Write the name of each line at the right, joined to its end, without overlap."""
    order = sorted(range(len(names)), key=lambda i: ends[i][1])
    at, low = dict[int, float](), 10.0
    for i in order:
        at[i] = low = max(ends[i][1], low + _LINE)
    over = max(0.0, low - (_HEIGHT - 8))
    left = _WIDTH - _RIGHT + 24
    return "".join(
        f'<path d="M{ends[i][0] + 6:.1f},{ends[i][1]:.1f} L{left - 4},{at[i] - over:.1f}" '
        f'fill="none" stroke="{_COLOURS[i % len(_COLOURS)]}" stroke-dasharray="1 3"/>'
        f'<text x="{left}" y="{at[i] - over + 4:.1f}" font-size="12">'
        f'<tspan style="fill:{_COLOURS[i % len(_COLOURS)]}">&#9632;</tspan> '
        f"{html.escape(names[i])}</text>"
        for i in order
    )


def _table(plan: Plan) -> str:
    """Return the table of speedups, with the limit of each strategy and its reason."""
    best, rows = plan.recommendation, shown(plan)
    counts = sorted({each.configuration.replicas for _, row, _ in rows for each in row})
    head = "".join(f"<th>{n}</th>" for n in counts)
    lines = []
    for name, row, at in rows:
        by = {each.configuration.replicas: each for each in row}
        cells = [f"{by[n].speedup:.1f}" if n in by else "" for n in counts]
        marked = [
            f"<mark>{cell}</mark>" if by.get(n) is best else cell
            for cell, n in zip(cells, counts, strict=True)
        ]
        lines.append(
            f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in marked)}"
            f"<td>{at.replicas}</td><td class=why>{html.escape(at.reason)}</td></tr>"
        )
    return (
        "<table><caption>times one device, by number of replicas</caption><tr><th>strategy</th>"
        f"{head}<th>worth it to</th><th class=why>then binds</th></tr>{''.join(lines)}</table>"
    )


def _curve(
    row: Sequence[Prediction],
    points: Sequence[tuple[float, float]],
    colour: str,
    marked: int,
    titles: bool,
) -> str:
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{8 if p.configuration.replicas == marked else 5}" '
        f'fill="{colour}" data-say="{html.escape(_tooltip(p))}">'
        f"{f'<title>{html.escape(_tooltip(p))}</title>' if titles else ''}</circle>"
        for (x, y), p in zip(points, row, strict=True)
    )
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _tooltip(of: Prediction) -> str:
    parts = "\n".join(f"  {name} {each * 1e3:.3g} ms" for name, each in of.parts.items() if each)
    return (
        f"{of.configuration}\n{of.speedup:.2f}x one device, {of.efficiency:.0%} of each\n"
        f"{of.rate:,.0f} examples/s, {of.step * 1e3:.3g} ms a step:\n{parts}{_memory_line(of)}"
    )


def _memory_line(of: Prediction) -> str:
    if of.memory is None:
        return ""
    return f"\n{say_bytes(of.memory)} on each device{'' if of.fits else ', which do not fit'}"
