"""Whether tensors are alike, without a copy of either."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def digest(tensor: Tensor) -> list[int]:
    """Sums of its bits, of all and of some of them; another one after a change, but for chance."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(bits) - len(bits) % 4
    words = bits[:whole].view(torch.int32)
    sums = [words.sum(), words[: len(words) // 2].sum(), words[::2].sum(), bits[whole:].sum()]
    found: list[int] = torch.stack(sums).tolist()
    return found
