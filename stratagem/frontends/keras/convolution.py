"""Gradients of convolutions of images that lie channels last, by operators that are fast on ARM.

oneDNN has slow kernels there for these two gradients; the numbers are the same by others:

    of the images   a convolution of the gradient with the kernel turned around
    of the kernel   one matrix product of the gradient with what the kernel covers at each place

Which operators are taken follows from shapes alone, so that every replica, and every run, takes the
same.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: channels from which on it pays
_LEAST = 16
#: of what the kernel covers at each place, at once
_BYTES = 1 << 27
IS_FASTER = platform.machine() in ("aarch64", "arm64")
_ONE = (1, (1, 1), [1, 1])


def fits(images: Tensor, kernel: Tensor, strides: Any, padding: str, dilation: Any) -> bool:
    """Whether there is something to gain: plain float32 on a CPU, a stride of one, no groups."""
    same = padding == "same" and all(size % 2 for size in kernel.shape[:2])
    return (
        strides in _ONE
        and dilation in _ONE
        and (same or padding == "valid")
        and images.dim() == 4
        and images.device.type == "cpu"
        and images.dtype is kernel.dtype is torch.float32
        and images.is_contiguous()
        and images.shape[3] == kernel.shape[2]
        and min(kernel.shape[2:]) >= _LEAST
        and min(kernel.shape[:2]) > 1
    )


def convolved(images: Tensor, kernel: Tensor, padding: str) -> Tensor:
    """Images (rows, height, width, channels) by a kernel (height, width, channels, results)."""
    sides = [size // 2 if padding == "same" else 0 for size in kernel.shape[:2]]
    found: Tensor = ImageConvolution.apply(images, kernel, sides)  # type: ignore[no-untyped-call]
    return found


class ImageConvolution(torch.autograd.Function):
    """Forward as Keras has it; both gradients by other operators than torch's own."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: Tensor, sides: Sequence[int]) -> Tensor:
        ctx.save_for_backward(images, kernel)
        ctx.sides = sides
        return _forward(images, kernel, sides)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        images, kernel = ctx.saved_tensors
        gradient, to_images, to_kernel = gradients[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            pairs = zip(kernel.shape[:2], ctx.sides, strict=True)
            around = [size - 1 - side for size, side in pairs]
            to_images = _forward(gradient, kernel.flip(0, 1).transpose(2, 3), around)
        if ctx.needs_input_grad[1]:
            to_kernel = _to_kernel(images, gradient, kernel.shape, ctx.sides)
        return to_images, to_kernel, None


def _forward(images: Tensor, kernel: Tensor, sides: Sequence[int]) -> Tensor:
    turned = kernel.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
    found = functional.conv2d(images.permute(0, 3, 1, 2), turned, padding=tuple(sides))
    return found.permute(0, 2, 3, 1)


def _to_kernel(
    images: Tensor, gradient: Tensor, shape: Sequence[int], sides: Sequence[int]
) -> Tensor:
    """The kernel's gradient, of as many images at once as memory may be taken for."""
    height, width, channels, _ = shape
    each = gradient[0, ..., 0].numel() * height * width * channels * images.element_size()
    some = max(1, _BYTES // max(1, each))
    parts = [
        out.flatten(0, 2).t().mm(_windows(seen, shape[:2], sides))
        for seen, out in zip(torch.split(images, some), torch.split(gradient, some), strict=True)
    ]
    return sum(parts[1:], parts[0]).t().reshape(tuple(shape))


def _windows(images: Tensor, size: Sequence[int], sides: Sequence[int]) -> Tensor:
    """A row for each place of a result: what the kernel covers there."""
    if any(sides):
        images = functional.pad(images, (0, 0, sides[1], sides[1], sides[0], sides[0]))
    found = images.unfold(1, size[0], 1).unfold(2, size[1], 1)
    return found.permute(0, 1, 2, 4, 5, 3).reshape(-1, size[0] * size[1] * images.shape[3])
