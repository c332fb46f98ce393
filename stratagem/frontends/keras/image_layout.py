"""Keeps images channels last while a copy of a model trains on CPUs.

Keras on torch copies images to channels first before each convolution and each pooling, and for a
convolution back again. torch's operators also take a view: the numbers are the same, and neither
images nor gradients are copied. Sums over rows and pixels (the gradient of a bias) are made in
another order, so their last bits may differ.

A convolution keeps its input for backward. Keras' own layers never write into it, but the user's
may, so models with code of the user keep the copies.
"""

from __future__ import annotations

import platform
import threading
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor
from torch.nn import functional

from stratagem.compat.keras_names import TO_CHANNELS_FIRST, torch_operators
from stratagem.compat.torch_names import MODULE_HOOKS, has_global_hooks

_CHANNELS_FIRST = (0, 3, 1, 2)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_WRAPS = (keras.layers.Lambda, keras.layers.TorchModuleWrapper)
_here = threading.local()


def all_keras(model: Any) -> bool:
    """Whether no layer, function or hook of the user sees the images."""
    layers = list(model._flatten_layers())
    graphs = [getattr(each, "_functional", each) for each in layers]
    operations = [each for graph in graphs for each in getattr(graph, "operations", ())]
    return not has_global_hooks() and all(map(_is_keras, {*layers, *operations}))


def _is_keras(part: Any) -> bool:
    called: list[Any] = [v for v in vars(part).values() if isinstance(v, _CALLED)]
    called = [each.func if isinstance(each, partial) else each for each in called]
    homes = [str(getattr(each, "__module__", None)) for each in (type(part), *called)]
    hooks = any(vars(part).get(kind) for kind in MODULE_HOOKS)
    own = all(home.startswith(("keras.", "stratagem.")) for home in homes)
    return own and not hooks and not isinstance(part, _WRAPS)


def without_copies(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the step, with images channels last in all that it calls."""
    _install(torch_operators())

    def run(data: Any) -> Any:
        before, _here.training = getattr(_here, "training", False), True
        try:
            return step(data)
        finally:
            _here.training = before

    return run


def _install(operators: Any) -> None:
    """Patch Keras once a process; outside of such steps nothing changes."""
    plain = getattr(operators, TO_CHANNELS_FIRST)
    if hasattr(plain, "plain"):
        return

    def to_channels_first(images: Tensor) -> Tensor:
        is_plain = images.dim() == len(_CHANNELS_FIRST) and images.is_contiguous()
        if is_plain and images.device.type == "cpu" and getattr(_here, "training", False):
            return images.permute(_CHANNELS_FIRST)
        found: Tensor = plain(images)
        return found

    to_channels_first.plain = plain  # type: ignore[attr-defined]
    setattr(operators, TO_CHANNELS_FIRST, to_channels_first)
    if IS_FASTER:
        operators.conv = _with_fast_gradients(operators.conv)


def _with_fast_gradients(plain: Callable[..., Any]) -> Callable[..., Any]:
    def conv(
        inputs: Any,
        kernel: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: Any = 1,
    ) -> Any:
        last = (data_format or keras.config.image_data_format()) == "channels_last"
        if last and getattr(_here, "training", False) and isinstance(inputs, Tensor):
            weights = kernel.value if isinstance(kernel, keras.Variable) else kernel
            if fits(inputs, weights, strides, padding, dilation_rate):
                return convolved(inputs, weights, padding)
        return plain(inputs, kernel, strides, padding, data_format, dilation_rate)

    return conv


# --- gradients of convolutions by operators that are fast on ARM ----------------------------------
#
# oneDNN's kernels for these two gradients are slow there. The same numbers are computed as
#
#     of the images   a convolution of the gradient with the flipped kernel
#     of the kernel   one matrix product of the gradient with the window at each pixel
#
# The choice depends on shapes alone, so that all replicas and runs make the same.


#: the least number of channels that gains
_LEAST = 16
#: bytes of windows that are made at once
_BYTES = 1 << 27
IS_FASTER = platform.machine() in ("aarch64", "arm64")
_ONE = (1, (1, 1), [1, 1])


def fits(images: Tensor, kernel: Tensor, strides: Any, padding: str, dilation: Any) -> bool:
    """Whether the fast gradients apply: float32 on a CPU, a stride of one, no groups."""
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
    """Convolve images (rows, height, width, channels) with a kernel (height, width, in, out)."""
    sides = [size // 2 if padding == "same" else 0 for size in kernel.shape[:2]]
    found: Tensor = ImageConvolution.apply(images, kernel, sides)  # type: ignore[no-untyped-call]
    return found


class ImageConvolution(torch.autograd.Function):
    """A convolution as Keras makes it, with faster operators for both gradients."""

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
    """Compute the kernel's gradient, of as many images at once as `_BYTES` allows."""
    height, width, channels, _ = shape
    each = gradient[0, ..., 0].numel() * height * width * channels * images.element_size()
    some = max(1, _BYTES // max(1, each))
    parts = [
        out.flatten(0, 2).t().mm(_windows(seen, shape[:2], sides))
        for seen, out in zip(torch.split(images, some), torch.split(gradient, some), strict=True)
    ]
    return sum(parts[1:], parts[0]).t().reshape(tuple(shape))


def _windows(images: Tensor, size: Sequence[int], sides: Sequence[int]) -> Tensor:
    """Return the window that the kernel covers, as a row for each pixel of the result."""
    if any(sides):
        images = functional.pad(images, (0, 0, sides[1], sides[1], sides[0], sides[0]))
    found = images.unfold(1, size[0], 1).unfold(2, size[1], 1)
    return found.permute(0, 1, 2, 4, 5, 3).reshape(-1, size[0] * size[1] * images.shape[3])
