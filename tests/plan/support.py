"""Profiles and machines for the tests of the planner."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from stratagem.plan.configuration import MIRRORED, MULTI_WORKER, SERVERS, Configuration
from stratagem.plan.formulas import Calibration
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import GradientPart, Profile

#: nothing but the closed forms
IDEAL = Calibration(
    message=0.0,
    kernel=0.0,
    step=0.0,
    exchange=0.0,
    goodput=1.0,
    contention=0.0,
    sockets=1e15,
    cipher=1e15,
    cast=1e15,
    half=0.0,
    turns=0.0,
)


def profile(**changes: Any) -> Profile:
    """30 ms of computing, 8 MB of gradients in two buckets."""
    given: dict[str, Any] = {
        "name": "Net",
        "batch": 64,
        "forward": 0.01,
        "backward": 0.02,
        "optimizer": 0.001,
        "buckets": (GradientPart(4_000_000, 0.01), GradientPart(4_000_000, 0.02)),
        "shapes": ((1000, 1000), (1000, 1000)),
    }
    return Profile(**{**given, **changes})


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    forward = draw(st.floats(1e-4, 1.0))
    backward = draw(st.floats(1e-4, 1.0))
    ready = sorted(draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5)))
    rows = draw(st.lists(st.integers(1, 2000), min_size=len(ready), max_size=len(ready)))
    buckets = tuple(
        GradientPart(n * 4096, part * backward) for n, part in zip(rows, ready, strict=True)
    )
    samples = tuple(draw(st.lists(st.floats(0.5, 5.0), min_size=0, max_size=8)))
    return Profile(
        "Net",
        draw(st.integers(1, 512)),
        forward,
        backward,
        draw(st.floats(0.0, 0.1)),
        buckets,
        tuple((n, 1024) for n in rows),
        samples=samples,
        device=draw(st.sampled_from(["cpu", "cuda"])),
    )


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    return Hardware(
        hosts=draw(st.integers(1, 64)),
        per_host=draw(st.integers(1, 8)),
        link=draw(st.floats(1e6, 1e11)),
        latency=draw(st.floats(0.0, 1e-2)),
        local=draw(st.floats(1e8, 1e12)),
        update=draw(st.floats(1e8, 1e11)),
        cores=draw(st.integers(1, 64)),
    )


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    kind = draw(st.sampled_from([MIRRORED, MULTI_WORKER, SERVERS]))
    per_host = draw(st.integers(1, 8))
    if kind == MIRRORED:
        return Configuration(kind, per_host=per_host)
    hosts = draw(st.integers(2, 32))
    wire = draw(st.sampled_from([None, "bfloat16"]))
    if kind == MULTI_WORKER:
        return Configuration(kind, hosts, per_host, wire=wire, hierarchical=draw(st.booleans()))
    return Configuration(
        kind,
        hosts,
        per_host,
        draw(st.integers(1, 8)),
        draw(st.integers(0, 1)),
        wire,
    )
