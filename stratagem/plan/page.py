"""The plan as one HTML page that needs nothing else: drawn lines, and figures under the pointer."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from stratagem.plan.advice import code, sentence
from stratagem.plan.choose import Plan
from stratagem.plan.cost import Prediction
from stratagem.plan.report import heading, shown, warnings

_WIDTH, _HEIGHT, _LEFT, _LOW = 760, 420, 52, 40
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5cb8", "#c77d0a", "#00798c", "#7a7a7a", "#b03a86")
_LINES = 8

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;
color:#222;background:#fff}
#tip{position:fixed;display:none;background:#fff;border:1px solid #999;padding:.4em .6em;
font-size:13px;white-space:pre;pointer-events:none;box-shadow:0 1px 4px #0003}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}#tip{background:#222}}"""

#: of what a notebook shows, too, whatever its own style: half-grey is seen on white and on black
_OWN_STYLE = """.sgplan pre{background:#8882;color:inherit;padding:.8em;overflow-x:auto}
.sgplan svg{max-width:100%;min-width:420px;height:auto}.sgplan div{overflow-x:auto}
.sgplan text{fill:currentColor}.sgplan circle{cursor:pointer}
.sgplan circle:hover{stroke:currentColor;stroke-width:2}
.sgplan ul{padding:0;margin:.5em 0;columns:22em 2}
.sgplan li{list-style:none;font-size:13px;break-inside:avoid}
.sgplan li span{display:inline-block;width:1em;height:.25em;vertical-align:middle;
margin-right:.4em}"""

#: dots that lie on each other are told together, those of the line on top first
_SCRIPT = """const tip=document.getElementById('tip');
for(const dot of document.querySelectorAll('circle')){
 dot.addEventListener('pointermove',e=>{
  const here=document.elementsFromPoint(e.clientX,e.clientY).filter(d=>d.dataset.say);
  tip.textContent=here.map(d=>d.dataset.say).join('\\n\\n');tip.style.display='block';
  tip.style.left=Math.max(8,Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8))+'px';
  tip.style.top=Math.max(8,Math.min(e.clientY+14,innerHeight-tip.offsetHeight-8))+'px'});
 dot.addEventListener('pointerleave',()=>tip.style.display='none')}"""


def page(plan: Plan) -> str:
    """A whole document."""
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{html.escape(plan.profile.name)}: how many replicas?</title>"
        f"<style>{_STYLE}</style>\n{fragment(plan, titles=False)}<div id=tip></div>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def fragment(plan: Plan, titles: bool = True) -> str:
    """The same without what makes it a document, for notebooks.

    titles: figures under the pointer without a script, which notebooks may not run.
    """
    say = html.escape
    rows = shown(plan)[:_LINES]
    notes = "".join(f"<p>Note: {say(each)}</p>" for each in warnings(plan.profile))
    return (
        f"<style>{_OWN_STYLE}</style><section class=sgplan>"
        f"<h2>{say(plan.profile.name)}: how many replicas?</h2>"
        f"<p>{say(heading(plan.profile))}; on {say(str(plan.hardware))}.</p>{notes}"
        f"<p><b>{say(sentence(plan))}</b></p><pre>{say(code(plan))}</pre>"
        f"<div>{drawing(plan, titles)}</div>{_key([name for name, _, _ in rows])}</section>"
    )


def drawing(plan: Plan, titles: bool = True) -> str:
    """Speedup over replicas, both doubling from line to line."""
    rows = [(name, row) for name, row, _ in shown(plan)[:_LINES]]
    most = max(each.configuration.replicas for _, row in rows for each in row)
    least = min(0.5, *(each.speedup for _, row in rows for each in row))
    axes = _Axes(math.log2(max(most, 2)), math.floor(math.log2(max(least, 1 / 64))))
    best = plan.recommendation.configuration
    lines = "".join(reversed([  # the first is the best: it lies on top
        _curve(row, axes, colour, best.replicas if name == best.family else 0, titles)
        for (name, row), colour in zip(rows, _COLOURS, strict=False)
    ]))  # fmt: skip
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img '
        f'aria-label="speedup by number of replicas">{axes.grid()}{lines}</svg>'
    )


class _Axes:
    """Powers of two both ways."""

    def __init__(self, top: float, low: int) -> None:
        self.top, self.low = top, low

    def x(self, n: float) -> float:
        return _LEFT + math.log2(n) / self.top * (_WIDTH - _LEFT - 20)

    def y(self, value: float) -> float:
        part = (math.log2(value) - self.low) / (self.top - self.low)
        return _HEIGHT - _LOW - part * (_HEIGHT - _LOW - 20)

    def grid(self) -> str:
        found = []
        for i in range(int(self.top) + 1):
            x = self.x(2**i)
            found.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{_HEIGHT - _LOW}" '
                         f'stroke="#8884"/><text x="{x:.1f}" y="{_HEIGHT - _LOW + 18}" '
                         f'font-size="12" text-anchor="middle">{2**i}</text>')  # fmt: skip
        for i in range(self.low, int(self.top) + 1):
            y = self.y(2.0**i)
            name = str(2**i) if i >= 0 else f"1/{2**-i}"
            found.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 20}" y2="{y:.1f}" '
                         f'stroke="#8884"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" '
                         f'font-size="12" text-anchor="end">{name}</text>')  # fmt: skip
        found.append(f'<line x1="{self.x(1):.1f}" y1="{self.y(1):.1f}" '
                     f'x2="{self.x(2**self.top):.1f}" y2="{self.y(2**self.top):.1f}" '
                     'stroke="#888" stroke-dasharray="4 4"/>')  # fmt: skip
        found.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" font-size="13" '
                     f'text-anchor="middle">replicas</text><text x="{_LEFT - 20}" '
                     'y="10" font-size="13">times one device (dashed: as many as there are '
                     'replicas)</text>')  # fmt: skip
        return "".join(found)


def _curve(
    row: Sequence[Prediction], axes: _Axes, colour: str, marked: int, titles: bool
) -> str:
    points = [(axes.x(p.configuration.replicas), axes.y(max(p.speedup, 1 / 64)), p) for p in row]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{8 if p.configuration.replicas == marked else 5}" '
        f'fill="{colour}" data-say="{html.escape(_told(p))}">'
        f"{f'<title>{html.escape(_told(p))}</title>' if titles else ''}</circle>"
        for x, y, p in points
    )
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _told(of: Prediction) -> str:
    parts = "\n".join(f"  {name} {each * 1e3:.3g} ms" for name, each in of.parts.items() if each)
    return (
        f"{of.configuration}\n{of.speedup:.2f}x one device, {of.efficiency:.0%} of each\n"
        f"{of.rate:,.0f} examples/s, {of.step * 1e3:.3g} ms a step:\n{parts}"
    )


def _key(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><span style="background:{_COLOURS[i % len(_COLOURS)]}"></span>'
        f"{html.escape(name)}</li>"
        for i, name in enumerate(names)
    )
    return f"<ul>{items}</ul>"
