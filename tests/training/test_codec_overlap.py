"""A compression of a bucket begins when its gradients are ready, during backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stratagem.codecs.feedback import Memory
from stratagem.codecs.low_rank import LowRank
from stratagem.training import exchange
from tests.strategies.test_compressed import RECORDS, in_a_loop, moved_from, sgd
from tests.support import data, mlp, strategy

pytestmark = pytest.mark.timeout(120)


def in_buckets(made: Any, size: int) -> tuple[list[torch.Tensor], list[bool]]:
    """Weights of a loop with buckets of so many bytes; and of each step, whether a bucket was taken
    before the first layer had its gradient."""
    begun, waited, plain = threading.Event(), [], LowRank._reduce
    before, exchange.BUCKET_BYTES = exchange.BUCKET_BYTES, size

    def reduce(self: LowRank, memory: Memory, weight: float) -> None:
        begun.set()
        plain(self, memory, weight)

    LowRank._reduce = reduce  # type: ignore[method-assign]
    try:
        module = mlp().double()
        model, optimizer, _ = made.prepare(module, sgd(module.parameters()))
        module[0].weight.register_hook(lambda g: waited.append(begun.wait(20 if size < 999 else 0)))
        x, y = data(16)
        for _ in range(3):
            begun.clear()
            F.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        exchange.BUCKET_BYTES, LowRank._reduce = before, plain  # type: ignore[method-assign]
    return [p.detach().clone() for p in model.parameters()], waited


def test_a_bucket_is_encoded_while_backward_goes_on() -> None:
    """The result of PowerSGD for a matrix does not depend on its bucket."""
    with strategy(2, cross_device_ops="ring", wire=RECORDS["power"]) as made:
        (parts, early), (others, _) = made.run(in_buckets, made, 256)
        (whole, late), _ = made.run(in_buckets, made, 1 << 20)
    assert early == [True] * 3 and late == [False] * 3
    assert all(map(torch.equal, parts, others))
    pairs = zip(parts, whole, strict=True)
    assert moved_from(parts) and max(float((a - b).abs().max()) for a, b in pairs) < 1e-12


def spoilt(made: Any) -> dict[str, Any]:
    before, exchange.BUCKET_BYTES = exchange.BUCKET_BYTES, 256
    try:
        return in_a_loop(made, 6, 4)
    finally:
        exchange.BUCKET_BYTES = before


@pytest.mark.parametrize("name", ["int8", "dgc"])
def test_the_same_bits_and_a_nan_for_all_in_buckets(name: str) -> None:
    with strategy(2, cross_device_ops="ring", wire=RECORDS[name]) as made:
        first, second = made.run(spoilt, made)
    assert first["bad"] == second["bad"] == [[number == 4] * 4 for number in range(6)]
    assert moved_from(first["weights"])
    assert all(map(torch.equal, first["weights"], second["weights"]))
