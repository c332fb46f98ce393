"""What a call's callbacks may look at, or change, between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class Needs:
    """Exact numbers of single steps, and attributes that may be changed between them."""

    train_logs: bool = False
    test_logs: bool = False
    attributes: bool = False
    #: whether something may be looked at, or changed, between two steps of a training
    steps: bool = False
    #: whether it is a call of one step, which ends when the step is done
    single: bool = False

    def joined(self, other: Needs) -> Needs:
        return Needs(
            self.train_logs or other.train_logs, self.test_logs or other.test_logs,
            self.attributes or other.attributes, self.steps or other.steps,
            self.single or other.single,
        )  # fmt: skip

    @classmethod
    def of(cls, callbacks: Any) -> Needs:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        each = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        needs = cls()
        for callback in each:
            if callback is not None:
                needs = needs.joined(_needs(callback))
        return needs


def _needs(callback: Any) -> Needs:
    """Keras' own callbacks look at epochs, but for a few; anybody else's may do anything."""
    kinds = keras.callbacks
    lambdas = isinstance(callback, kinds.LambdaCallback)
    if type(callback).__module__.startswith("keras.") and not lambdas:
        steps = (
            isinstance(callback, kinds.TerminateOnNaN)
            or (isinstance(callback, kinds.ModelCheckpoint) and callback.save_freq != "epoch")
            or (isinstance(callback, kinds.TensorBoard) and callback.update_freq != "epoch")
        )
        return Needs(train_logs=steps, test_logs=steps, steps=steps)

    def overridden(*names: str) -> bool:
        return any(
            name in callback.__dict__
            or getattr(type(callback), name, None) is not getattr(kinds.Callback, name)
            for name in names
        )

    after = overridden("on_train_batch_end", "on_batch_end")
    before = overridden("on_train_batch_begin", "on_batch_begin")
    return Needs(after, overridden("on_test_batch_end"), True, after or before)


#: a call of one step, after and before which anything may be looked at and changed
ONE_STEP = Needs(True, True, True, True, single=True)
