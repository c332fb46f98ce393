"""Closed forms of the measured steps: as written down before, and with what was found on the way.

    facts     2(N-1)/N * S/B for a ring, 2 max(S/B, N*S_k/B) for servers, after the computation
    terms     the same with goodput, overlap as it happens, and what each strategy does besides

Times in seconds, sizes in bytes, rates in bytes a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from task import FORWARD, LAYERS

#: of 1514 bytes on a cable 1448 are the tensor's: Ethernet, IP, TCP with timestamps
GOODPUT = 1448 / 1514
#: gradients that leave together, and no earlier (stratagem.training.exchange)
BUCKET = 8 << 20
#: by hosts: the two moves of a 16-bit sum (pieces to all, sums to all) relative to 2(N-1)/N * S/B.
#: Read off the same grid; several send to one host at the same time.
HALF = {2: 1.0, 3: 1.12, 4: 1.18}
#: rounding to 16 bits, adding up in fp32, rounding back: bytes of fp32 a second
CAST = 1.0e9
#: servers send values to one group of workers after the other: how far the first have pushed, in
#: the other direction, when the last come to it
TURNS = 0.9
#: ticket, push, answers: seconds a step with servers
TALK = 0.002
#: what TLS adds to a pull, in bytes a second
CIPHER = 2.0e9

Row = Mapping[str, Any]


def travelling(row: Row) -> float:
    """Bytes of one gradient on the wire."""
    return float(row["bytes"]) * (0.5 if row["wire"] == "bfloat16" else 1.0)


def facts(row: Row) -> float:
    """The step without any overlap, with the link's nominal speed."""
    n, size, rate = row["hosts"], travelling(row), row["link_bits"] / 8
    if row["strategy"] == "one":
        return float(row["compute_s"])
    if row["strategy"] == "ring":
        return float(row["compute_s"] + 2 * (n - 1) / n * size / rate)
    each = max(size / rate, n * size / row["servers"] / rate)
    if row["strategy"] == "sync":
        return float(row["compute_s"] + 2 * each)
    return float(max(row["compute_s"] + 2 * size / rate, each))


def terms(row: Row, loop: float) -> float:
    """The step with everything that was found; `loop` is what one host takes besides computing."""
    if row["strategy"] == "one":
        return float(row["compute_s"] + loop)
    return {"ring": _ring, "sync": _sync, "async": _async}[row["strategy"]](row, loop)


def _ready(row: Row, loop: float) -> list[float]:
    """When each layer's gradient is there."""
    whole = row["compute_s"] + loop
    return [whole * (FORWARD + (1 - FORWARD) * (i + 1) / LAYERS) for i in range(LAYERS)]


def _ring(row: Row, loop: float) -> float:
    """Buckets leave when they are full, the last one when backward has ended."""
    n, rate = row["hosts"], row["link_bits"] / 8 * GOODPUT
    half = row["wire"] == "bfloat16"
    layer = row["bytes"] / LAYERS
    together = max(1, int(BUCKET // layer))
    ready = _ready(row, loop)
    done = 0.0
    for first in range(0, LAYERS, together):
        members = ready[first : first + together]
        size = layer * len(members) * (0.5 if half else 1.0)
        took = 2 * (n - 1) / n * size / rate
        if half:
            took = took * HALF.get(n, 1 + 0.35 * (1 - 2 / n)) + 2 * size / CAST
        done = max(done, members[-1]) + took
    return done


def _pushed(ready: list[float], took: float) -> float:
    """When the last layer has been handed in, if all of them take so long."""
    done = 0.0
    for moment in ready:
        done = max(done, moment) + took / LAYERS
    return done


def _sync(row: Row, loop: float) -> float:
    """Values come in turn, to as many workers at a time as there are servers; layers leave as they
    are made, beside those of the same group."""
    n, k, size = row["hosts"], row["servers"], travelling(row)
    rate = row["link_bits"] / 8 * GOODPUT
    group = math.ceil(n / max(1, n // k))
    at_once = group + (n - group) * (1 - TURNS)
    pull = max(size / rate, n * size / k / rate) + size / CIPHER
    push = max(size / rate, at_once * size / k / rate)
    return _pushed(_ready(row, loop), push) + pull + TALK


def _async(row: Row, loop: float) -> float:
    """N workers in a circle past a server's link in and its link out.

    One server has them in turn: nobody waits, or the link is never idle. At several, mean value
    analysis: who comes meets as many as there are on average with one worker less.
    """
    size, rate = travelling(row), row["link_bits"] / 8 * GOODPUT
    ready, cycle, there = _ready(row, loop), 0.0, 0.0
    if row["servers"] == 1:
        alone = _pushed(ready, size / rate) + size / rate + size / CIPHER + TALK
        return max(alone, row["hosts"] * size / rate)
    for n in range(1, row["hosts"] + 1):
        took = max(size / rate, size / row["servers"] / rate * (1 + there))
        cycle = _pushed(ready, took) + took + size / CIPHER + TALK
        there = n * took / cycle
    return cycle
