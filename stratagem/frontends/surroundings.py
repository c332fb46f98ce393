"""What is about a call of `fit` and does not reach other replicas, which refuse it.

    memory      that two parameters share, without being the same one
    autocast    that the caller has switched on
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stratagem.errors import NotDistributable, UsageError


def refuse_autocast() -> None:
    """Refuse a fit inside of torch.autocast, in which the other replicas would not be."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            "fit was called inside of torch.autocast, which the other replicas know nothing of; "
            'call it outside, and say compile(..., precision="bfloat16").'
        )


def refuse_shared(module: nn.Module) -> None:
    """Refuse a trained parameter that lies in the memory of another, or of a buffer: replicas
    would part them. What is only read may share."""
    whose = {False: (0, ""), True: (0, "")}  # the furthest end so far, by whether it is trained
    for start, end, trained, name in sorted(_spans(module)):
        reach, other = max(whose.values()) if trained else whose[True]
        if start < reach:
            raise NotDistributable(
                f"{other!r} and {name!r} share memory without being the same parameter, and "
                "replicas keep each of them apart; use one parameter in both places, and transpose "
                "or cut it in forward, or a loop of your own with strategy.prepare."
            )
        whose[trained] = max(whose[trained], (end, name))


def _spans(module: nn.Module) -> Iterator[tuple[int, int, bool, str]]:
    """First and one past the last address of each, and whether it is trained; a tied parameter
    counts once."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if _has_memory(tensor):
            length = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            end = start + (length + 1) * tensor.element_size()
            yield start, end, tensor.requires_grad, name


def _has_memory(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and tensor.numel() > 0 and tensor.data_ptr() != 0
