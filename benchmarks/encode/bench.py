"""What encoding a gradient costs: processor time of each codec, and of finding the largest 1%.

    python benchmarks/encode/bench.py [--rounds 7] [--megabytes 4 16 50]

One process and one thread; all arms take turns within a round, on the same gradient. Printed, for
each size: milliseconds of processor time per MB of float32, the least of the rounds, and how many
times as long `torch.topk` takes as the threshold of `TopK`, the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from stratagem.codecs.codec import CastCodec
from stratagem.codecs.compression import Compression
from stratagem.codecs.int8 import Int8
from stratagem.codecs.low_rank import PowerSGD
from stratagem.codecs.pushed import PushFeedback, decode_piece, piece_bytes
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK, largest
from stratagem.wire.freed_memory import keep_freed_memory

RECORDS: list[Compression] = [Int8(), TopK(0.01), Sign(), PowerSGD(4)]
OURS, PEER = "largest 1%, threshold", "largest 1%, torch.topk"
WIDE = 1024  # columns of the gradient, which PowerSGD takes as a matrix


class Arms:
    """What is timed, on a gradient of some rows."""

    def __init__(self, rows: int) -> None:
        self.gradient = torch.zeros(rows, WIDE)
        self.shape, self.flat = (rows, WIDE), self.gradient.view(-1)
        self.into, self.half = torch.zeros_like(self.flat), self.flat.bfloat16()
        self.few = len(self.flat) // 100

    def round(self, seed: int) -> dict[str, float]:
        """Seconds of processor time by arm, with another gradient each round."""
        self.gradient.normal_(generator=torch.Generator().manual_seed(seed))
        cast = CastCodec(torch.bfloat16)
        found = {
            "copy": spent(lambda: self.into.copy_(self.flat)),
            PEER: spent(lambda: self.flat.abs().topk(self.few, sorted=False).indices),
            OURS: spent(lambda: largest(self.flat, self.few)),
            "bfloat16": spent(lambda: cast.encode(self.flat, self.half)),
            "bfloat16, decoded": spent(lambda: cast.decode(self.half, self.into)),
        }
        for record in RECORDS:
            found |= self.record(record)
        return found

    def record(self, record: Compression) -> dict[str, float]:
        feedback = PushFeedback(record, ["w"], [self.gradient])
        wire = torch.zeros(piece_bytes(record, self.shape, 4), dtype=torch.uint8)
        feedback.charge(0, self.flat)
        return {
            f"{record!r}": spent(partial(feedback.encode, 0, 0, self.shape, wire)),
            f"{record!r}, decoded": spent(
                partial(decode_piece, record, wire, self.shape, self.into)
            ),
        }


def spent(act: Callable[[], object]) -> float:
    begun = time.thread_time()
    act()
    return time.thread_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 16, 50])
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a process that trains does
    print(f"{platform.machine()}, torch {torch.__version__}, one thread, {given.rounds} rounds\n")
    columns: dict[int, dict[str, list[float]]] = {}
    for megabytes in given.megabytes:
        arms = Arms(megabytes * 1_000_000 // (4 * WIDE))
        arms.round(0)  # memory is touched
        rounds = [arms.round(number) for number in range(1, given.rounds + 1)]
        columns[megabytes] = {name: [each[name] for each in rounds] for name in rounds[0]}
    print("| ms per MB | " + " | ".join(f"{size} MB" for size in columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    for name in next(iter(columns.values())):
        cells = (f"{1e3 * min(times[name]) / size:.2f}" for size, times in columns.items())
        print(f"| {name} | {' | '.join(cells)} |")
    for size, times in columns.items():
        ratios = [peer / ours for peer, ours in zip(times[PEER], times[OURS], strict=True)]
        print(
            f"\n{size} MB: torch.topk takes {statistics.median(ratios):.1f} times as long as the "
            f"threshold ({min(ratios):.1f} to {max(ratios):.1f})."
        )


if __name__ == "__main__":
    main()
