"""Several captured steps, each with Adam's update, as one program of TorchScript.

States of metrics and layers go from step to step and are written into the model's at the end. The
program is used if one step of it equals Keras' step, and two at once equal two, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.compat.torch_names import TENSOR_HOOKS, adam_loop, copy_all
from stratagem.state.keras_stepper import STEP, epsilon_of, fused_step_of, is_plain

log = logging.getLogger("stratagem")
#: bytes of weights and states, which are copied; larger steps have little Python in them
SMALL = 1 << 20


class StepLoop:
    """Repeats a scripted step: from the tensors `held`, weights first, and a batch to the gradients
    of all weights and the new values of the tensors `written`."""

    def __init__(
        self, step: Any, weights: list[Tensor], held: list[Tensor], written: list[Tensor]
    ) -> None:
        self._step, self._weights, self._held, self._written = step, weights, held, written
        number = {id(each): i for i, each in enumerate(held)}
        self._places = [number[id(each)] for each in written]
        self._program: Any = None
        #: by number of threads: how long two steps take, and all tensors after one
        self._predicted: dict[int, tuple[float, list[Tensor]]] = {}
        #: the number of threads of the process at the trial, and of the program
        self._given, self._threads = torch.get_num_threads(), 1

    def predict(self, batch: list[Tensor], update: PlannedUpdate) -> None:
        """Make the next step on copies, with one thread and with all."""
        sizes = len(self._weights), len(self._held), len(batch)
        self._program = adam_loop(self._step, *sizes, self._places)
        for threads in {1, self._given}:
            self._predicted[threads] = self._trial(threads, batch, update)

    def _trial(
        self, threads: int, batch: list[Tensor], update: PlannedUpdate
    ) -> tuple[float, list[Tensor]]:
        times = []
        with _on(threads), torch.inference_mode():
            for _ in range(3):  # TorchScript optimizes the program after the first run
                one, two = self._copies(update), self._copies(update)
                begun = time.perf_counter()
                self._run(two, [batch, batch], update.settings(2))
                times.append(time.perf_counter() - begun)
                self._run(one, [batch], update.settings(1))
                predicted = [each.clone() for each in one]
                self._run(one, [batch], update.settings(1, after=1))
                if not _same(one, two):
                    raise ValueError("two steps at once give other numbers")
        return min(times), predicted

    def _copies(self, update: PlannedUpdate) -> list[Tensor]:
        """Copy weights, states and both moments."""
        return [each.detach().clone() for each in (*self._held, *update.first, *update.second)]

    def _run(self, on: list[Tensor], batches: list[list[Tensor]], settings: Any) -> None:
        count, moments = len(self._held), len(self._weights)
        first, second = on[count : count + moments], on[count + moments :]
        _, states = self._program(on[:count], batches, first, second, *settings)
        for place, state in zip(self._places, states, strict=True):
            on[place] = state

    def was_right(self, update: PlannedUpdate) -> bool:
        """Whether Keras' step has done what was predicted; takes the fastest number of threads that
        was right."""
        real, tried, self._predicted = self._copies(update), self._predicted, {}
        right = {n: took for n, (took, predicted) in tried.items() if _same(predicted, real)}
        self._threads = min(right, key=lambda n: right[n], default=1)
        return bool(right)

    def is_usable(self, update: PlannedUpdate) -> bool:
        """Whether the update is of these weights, they have no hooks, and the process has as many
        threads as in the trial."""
        hooked = any(getattr(weight, kind) for weight in self._weights for kind in TENSOR_HOOKS)
        as_tried = torch.get_num_threads() == self._given
        return as_tried and not hooked and update.is_of(self._weights)

    def run(self, batches: Sequence[list[Tensor]], update: PlannedUpdate) -> bool:
        """Make the steps of these batches; returns False, with all put back, if one fails."""
        moving = [*self._weights, *self._written, *update.states]
        settings = update.settings(len(batches))
        with _on(self._threads), torch.inference_mode():  # no operator looks for autograd
            before = [each.clone() for each in moving]
            try:
                gradients, states = self._program(
                    self._held, batches, update.first, update.second, *settings
                )
                copy_all(self._written, states)
                update.count(len(batches))
            except BaseException as error:
                for each, value in zip(moving, before, strict=True):  # of several types
                    each.copy_(value)
                if not isinstance(error, Exception):  # Ctrl-C, which waits for the program's end
                    raise
                # a label out of bounds: the step that has it says so
                log.debug("training steps run one by one: %s", error)
                return False
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient.clone()
        return True


@contextmanager
def _on(threads: int) -> Iterator[None]:
    """Run with so many threads: waking a second one takes longer than a small operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# --- Keras' Adam on fixed lists of tensors --------------------------------------------------------
#
# The numbers are those of `Optimizer.apply` with the fused step, bit for bit. What `apply` asks
# each time (is a gradient clipped, a weight decayed or constrained, are averages kept?) is asked
# once: a plan is made again whenever the model may have been changed. The learning rate is read
# each time.


#: settings with which `apply` does more than the step
_MORE_THAN_STEP = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "weight_decay",
    "use_ema",
    "gradient_accumulation_steps",
    "loss_scale_factor",
)


class PlannedUpdate:
    """The step of Keras' Adam on fixed variables."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        places = [optimizer._get_variable_index(v) for v in variables]
        self._optimizer = optimizer
        self._tensors = [v.value for v in variables]
        self.first = [optimizer._momentums[i].value for i in places]
        self.second = [optimizer._velocities[i].value for i in places]
        self._count, self._rate = optimizer.iterations.value, optimizer._learning_rate.value
        self._time = torch.zeros((), device=self._tensors[0].device)
        self._times = [self._time] * len(places)

    @classmethod
    def of(cls, optimizer: Any, variables: Sequence[Any]) -> PlannedUpdate | None:
        """Return None if `apply` would do more, or would not take the fused step."""
        own = vars(optimizer)
        other = [name for name in own if callable(getattr(type(optimizer), name, None))]
        if other != [STEP] or not optimizer.built or not variables:
            return None
        if any(getattr(optimizer, name, None) not in (None, False) for name in _MORE_THAN_STEP):
            return None
        known = optimizer._trainable_variables_indices
        if any(id(v) not in known for v in variables):
            return None  # `apply` says so
        if not isinstance(optimizer._learning_rate, keras.Variable):
            return None
        if any(v.constraint is not None or v.overwrite_with_gradient for v in variables):
            return None
        return cls(optimizer, variables) if is_plain([v.value for v in variables]) else None

    def apply(self, gradients: list[Tensor | None]) -> bool:
        """Make the step; returns False, with nothing done, if the optimizer has to make it."""
        if "apply" in vars(self._optimizer) or not is_plain(gradients):
            return False
        time = int(self._count) + 1
        self._time.fill_(time)
        lists: Any = (self._tensors, gradients, self.first, self.second, [], self._times)
        fused_step_of(self._optimizer, lists, float(self._rate), time)
        self._count.add_(1)
        return True

    # --- several steps in one program ---------------------------------------------------------

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether it updates these weights, and `apply` is the optimizer's own."""
        alike = all(a is b for a, b in zip(self._tensors, weights, strict=True))
        return alike and "apply" not in vars(self._optimizer)

    @property
    def states(self) -> list[Tensor]:
        """The optimizer's state: both moments and the number of steps."""
        return [*self.first, *self.second, self._count]

    def settings(self, steps: int, after: int = 0) -> Any:
        """Step numbers, rate, betas and epsilons of so many steps, the first `after` some more."""
        adam, time = self._optimizer, int(self._count) + 1 + after
        numbers = range(time, time + steps)
        times = torch.arange(time, time + steps).to(self._time)
        epsilons = [epsilon_of(adam, number) for number in numbers]
        return list(times.unbind()), float(self._rate), adam.beta_1, adam.beta_2, epsilons

    def count(self, steps: int) -> None:
        """Note that so many steps were made."""
        self._count.add_(steps)
