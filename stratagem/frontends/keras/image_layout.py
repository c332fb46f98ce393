"""Images stay as they lie, channels last, while a copy of a model trains on CPUs.

Keras on torch copies images to channels first before each convolution and each pooling, and for a
convolution back again. torch's operators take a view of them as well: the same numbers, and none of
the copies, nor those that gradients of another layout need. Sums over rows and pixels (of a bias'
gradient) go in another order, so their last bits may differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stratagem.compat.keras_names import TO_CHANNELS_FIRST, torch_operators

_CHANNELS_FIRST = (0, 3, 1, 2)
_here = threading.local()


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
