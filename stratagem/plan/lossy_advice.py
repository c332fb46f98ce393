"""Compare compressions with the best exact wire on the same replicas, and say if they pay."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from stratagem.plan.choose import CLOSE, Plan
from stratagem.plan.configuration import MULTI_WORKER, Configuration
from stratagem.plan.cost import Prediction
from stratagem.plan.hardware import say_rate, say_seconds
from stratagem.plan.lossy import sent
from stratagem.plan.profile import Profile


@dataclass(frozen=True)
class LossyRow:
    """One wire of the comparison; `gain` is its speed relative to the best exact wire."""

    prediction: Prediction
    #: bytes that are sent, as a fraction of those in fp32
    part: float
    #: seconds of a step for encoding and decoding
    encoding: float
    gain: float


def compared(plan: Plan) -> list[LossyRow]:
    """Compare the best exact wire, compressions and fewer meetings on several hosts."""
    row = [each for each in plan.predictions if _at(each, _place(plan))]
    exact = [each for each in row if not each.configuration.inexact]
    if not exact or len(exact) == len(row):
        return []
    best = min(exact, key=lambda each: each.step)
    rows = [best, *(each for each in row if each.configuration.inexact)]
    replicas = best.configuration.replicas
    encoding = {each.wire: each.among(replicas) for each in plan.profile.codecs}
    return [
        LossyRow(
            each,
            _part(plan.profile, each.configuration),
            encoding.get(each.configuration.wire or "", 0.0),
            best.step / each.step,
        )
        for each in rows
    ]


def _place(plan: Plan) -> tuple[int, int]:
    """(hosts, replicas per host) of the recommendation, or else the most that were tried."""
    cfg = plan.recommendation.configuration
    if cfg.hosts > 1 and cfg.strategy == MULTI_WORKER:
        return cfg.hosts, cfg.per_host
    placed = [c for c in plan.tried if c.inexact]
    most = max(placed, key=lambda c: (c.hosts, c.replicas), default=cfg)
    return most.hosts, most.per_host


def _at(each: Prediction, place: tuple[int, int]) -> bool:
    cfg = each.configuration
    return cfg.strategy == MULTI_WORKER and (cfg.hosts, cfg.per_host) == place


def _part(profile: Profile, cfg: Configuration) -> float:
    if not cfg.lossy or cfg.wire is None:
        return cfg.travelling / cfg.every
    goes = sent(cfg.wire, profile.shapes, profile.itemsize, cfg.replicas)
    return goes.bytes(cfg.replicas) / (2 * (cfg.replicas - 1) / cfg.replicas * profile.dense_bytes)


def lossy_sentence(plan: Plan) -> str:
    """Say what compressions gain on these links; empty if they were not asked for."""
    if not plan.lossy:
        return ""
    rows = compared(plan)
    if not rows:
        return "Compressions are for replicas on several hosts, and none were planned."
    (exact, *rest), link = rows, say_rate(plan.hardware.link)
    many = f"{exact.prediction.configuration.replicas} replicas"
    plain = f"plain {_name(exact.prediction.configuration)}"
    wires = [row for row in rest if row.prediction.configuration.lossy]
    seldom = [row for row in rest if row not in wires and row.gain >= 1 / CLOSE]
    also = [f"{_name(row.prediction.configuration)} {row.gain:.1f}x" for row in seldom]
    top = max(wires or rest, key=lambda row: row.gain)
    name = _name(top.prediction.configuration)
    if top.gain < 1 / CLOSE:
        but = f", though fewer meetings would: {also[0]}" if also else ""
        return (
            f"At {link} nothing of this pays{but}: on {many} the best of them, {name}, is "
            f"{top.gain:.2f}x as fast as {plain}."
        )
    beside = f" ({also[0]})" if also and name not in also[0] else ""
    return (
        f"At {link} {name} makes a step of {many} {top.gain:.1f}x as fast as {plain}{beside}; "
        "weights are then no longer those of one device, so compare the accuracy "
        "(docs/fewer-bytes.md, docs/fewer-meetings.md)."
    )


def _name(cfg: Configuration) -> str:
    if cfg.every > 1:
        return cfg.meeting
    return f"sg.{cfg.wire}" if cfg.lossy else "bf16" if cfg.wire else "fp32"


def lossy_table(plan: Plan) -> Table:
    """The comparison as a table: wire, bytes, encoding, step and gain."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("wire", no_wrap=True)
    for head in ("bytes", "encoding", "step", "times as fast"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in compared(plan):
        table.add_row(
            _name(row.prediction.configuration),
            f"{row.part:.3g}",
            say_seconds(row.encoding, 3) if row.encoding else "",
            say_seconds(row.prediction.step, 3),
            f"{row.gain:.2f}",
        )
    return table
