"""A GPT-2-sized model (124 M) in bf16 under torch.compile on one GPU, bare and through a strategy.

    python benchmarks/gpt2/bench.py [--rounds 5] [--tiny]     # --tiny: a trial on a CPU

The bare loop and ours run in one process and take turns; both have the same compiled model, the
same tokens and fused AdamW. Printed: tokens per second, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg


@dataclass(frozen=True)
class Size:
    vocabulary: int = 50304
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    batch: int = 16


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before = nn.LayerNorm(size.width)
        self.mix = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.after = nn.LayerNorm(size.width)
        self.wide = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(F.gelu(self.wide(self.after(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Decoder with tied embeddings; returns the loss of the next tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.apply(self._small)

    @staticmethod
    def _small(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        place = torch.arange(text.shape[1], device=text.device)
        x = self.norm(self.blocks(self.tokens(text) + self.places(place)))
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


class Texts:
    """Fixed random tokens on the device."""

    def __init__(self, size: Size, device: str, steps: int) -> None:
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
        self.steps = steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.steps):
            yield self.tokens[:, :-1], self.tokens[:, 1:]


def arm(
    size: Size, net: nn.Module, device: str, strategy: sg.Strategy | None
) -> Callable[[int], None]:
    kind = device.partition(":")[0]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    if strategy is not None:
        net, optimizer, _ = strategy.prepare(net, optimizer)
    run = torch.compile(net)

    def steps(count: int) -> None:
        for text, following in Texts(size, device, count):
            with torch.autocast(kind, torch.bfloat16):
                loss = run(text, following)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if kind == "cuda":
            torch.cuda.synchronize()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    size = Size(512, 32, 2, 2, 32, 4) if args.tiny else Size()
    base = Gpt(size).to(device)
    count = sum(p.numel() for p in base.parameters())
    arms = {
        "bare": arm(size, copy.deepcopy(base), device, None),
        "stratagem": arm(size, base, device, sg.MirroredStrategy([device])),
    }
    tokens = size.batch * size.context * args.steps
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(args.rounds + 1):
        for name in list(arms) if number % 2 else list(reversed(arms)):
            started = time.perf_counter()
            arms[name](args.steps)
            if number:  # the first round compiles
                speeds[name].append(tokens / (time.perf_counter() - started))
    where = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    print(
        f"{where}, torch {torch.__version__}, {count / 1e6:.0f} M parameters, batch "
        f"{size.batch} x {size.context}, bf16 autocast, torch.compile"
    )
    for name, values in speeds.items():
        print(f"{name:10} {statistics.median(values):12,.0f} tokens/s")
    ratio = statistics.median(
        a / b for a, b in zip(speeds["stratagem"], speeds["bare"], strict=True)
    )
    print(f"ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
