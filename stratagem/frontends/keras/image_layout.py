"""Images stay as they lie, channels last, while a copy of a model trains on CPUs.

Keras on torch copies images to channels first before each convolution and each pooling, and for a
convolution back again. torch's operators take a view of them as well: the same numbers, and none of
the copies, nor those that gradients of another layout need. Sums over rows and pixels (of a bias'
gradient) go in another order, so their last bits may differ.

A convolution keeps its input for backward. Keras' own layers never write into it; those of the user
may, so that models with code of theirs keep the copies.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from torch import Tensor

from stratagem.compat.keras_names import TO_CHANNELS_FIRST, torch_operators
from stratagem.compat.torch_names import MODULE_HOOKS, has_global_hooks
from stratagem.frontends.keras import convolution

_CHANNELS_FIRST = (0, 3, 1, 2)
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, partial)
_WRAPS = (keras.layers.Lambda, keras.layers.TorchModuleWrapper)
_here = threading.local()


def all_keras(model: Any) -> bool:
    """Whether only code of Keras' own sees the images: no layer, function or hook of the user."""
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
    """The step, with images as they lie in whatever it calls."""
    _install(torch_operators())

    def run(data: Any) -> Any:
        before, _here.training = getattr(_here, "training", False), True
        try:
            return step(data)
        finally:
            _here.training = before

    return run


def _install(operators: Any) -> None:
    """Once a process; outside of such steps nothing changes."""
    plain = getattr(operators, TO_CHANNELS_FIRST)
    if hasattr(plain, "plain"):
        return

    def to_channels_first(images: Tensor) -> Tensor:
        lies = images.dim() == len(_CHANNELS_FIRST) and images.is_contiguous()
        if lies and images.device.type == "cpu" and getattr(_here, "training", False):
            return images.permute(_CHANNELS_FIRST)
        found: Tensor = plain(images)
        return found

    to_channels_first.plain = plain  # type: ignore[attr-defined]
    setattr(operators, TO_CHANNELS_FIRST, to_channels_first)
    if convolution.IS_FASTER:
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
            if convolution.fits(inputs, weights, strides, padding, dilation_rate):
                return convolution.convolved(inputs, weights, padding)
        return plain(inputs, kernel, strides, padding, data_format, dilation_rate)

    return conv
