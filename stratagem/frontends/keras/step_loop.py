"""Several captured steps, each with Adam's update, in one program without Python between them.

States (of metrics, of layers) go from step to step and are written into the model's at the end.
The program is used if one step of it is the model's own step, and two at once are two, bit for bit.
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
    """Steps of a scripted graph: what is `held`, weights first, and a batch in; gradients of all
    weights and new values of what is `written` out."""

    def __init__(
        self, step: Any, weights: list[Tensor], held: list[Tensor], written: list[Tensor]
    ) -> None:
        self._step, self._weights, self._held, self._written = step, weights, held, written
        number = {id(each): i for i, each in enumerate(held)}
        self._places = [number[id(each)] for each in written]
        self._program: Any = None
        #: by threads: how long two steps take, and what is there after one
        self._foretold: dict[int, tuple[float, list[Tensor]]] = {}
        #: what it was tried with, and what it runs with
        self._given, self._threads = torch.get_num_threads(), 1

    def foretell(self, batch: list[Tensor], update: PlannedUpdate) -> None:
        """Say what the next step will do."""
        sizes = len(self._weights), len(self._held), len(batch)
        self._program = adam_loop(self._step, *sizes, self._places)
        for threads in {1, self._given}:
            self._foretold[threads] = self._trial(threads, batch, update)

    def _trial(
        self, threads: int, batch: list[Tensor], update: PlannedUpdate
    ) -> tuple[float, list[Tensor]]:
        times = []
        with _on(threads), torch.inference_mode():
            for _ in range(3):  # the first run makes the program
                one, two = self._copies(update), self._copies(update)
                begun = time.perf_counter()
                self._run(two, [batch, batch], update.settings(2))
                times.append(time.perf_counter() - begun)
                self._run(one, [batch], update.settings(1))
                foretold = [each.clone() for each in one]
                self._run(one, [batch], update.settings(1, after=1))
                if not _same(one, two):
                    raise ValueError("two steps at once give other numbers")
        return min(times), foretold

    def _copies(self, update: PlannedUpdate) -> list[Tensor]:
        """What is held, and both moments."""
        return [each.detach().clone() for each in (*self._held, *update.first, *update.second)]

    def _run(self, on: list[Tensor], batches: list[list[Tensor]], settings: Any) -> None:
        count, moments = len(self._held), len(self._weights)
        first, second = on[count : count + moments], on[count + moments :]
        _, states = self._program(on[:count], batches, first, second, *settings)
        for place, state in zip(self._places, states, strict=True):
            on[place] = state

    def told(self, update: PlannedUpdate) -> bool:
        """Whether the step has done what was foretold, with as many threads as are fastest then."""
        real, tried, self._foretold = self._copies(update), self._foretold, {}
        right = {n: took for n, (took, foretold) in tried.items() if _same(foretold, real)}
        self._threads = min(right, key=lambda n: right[n], default=1)
        return bool(right)

    def follows(self, update: PlannedUpdate) -> bool:
        """Whether the update is of these weights, nobody listens to their gradients, and threads
        are as they were."""
        heard = any(getattr(weight, kind) for weight in self._weights for kind in TENSOR_HOOKS)
        as_tried = torch.get_num_threads() == self._given
        return as_tried and not heard and update.is_of(self._weights)

    def run(self, batches: Sequence[list[Tensor]], update: PlannedUpdate) -> bool:
        """The steps of these batches; False, with nothing done, where one of them fails."""
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
    """For a small operator it takes longer to wake a second thread than to run."""
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
# once: a plan is made anew whenever somebody may have changed something. The learning rate is read
# each time.


#: settings that give `apply` something to do beside the step
_BESIDE = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "weight_decay",
    "use_ema",
    "gradient_accumulation_steps",
    "loss_scale_factor",
)


class PlannedUpdate:
    """One optimizer's step on these variables."""

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
        """None where `apply` does more, or where its fused step would not be taken."""
        own = vars(optimizer)
        other = [name for name in own if callable(getattr(type(optimizer), name, None))]
        if other != [STEP] or not optimizer.built or not variables:
            return None
        if any(getattr(optimizer, name, None) not in (None, False) for name in _BESIDE):
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
        """Make the step; False, with nothing done, where that is for the optimizer to do."""
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
        """Whether it updates these, and nobody else makes the update."""
        alike = all(a is b for a, b in zip(self._tensors, weights, strict=True))
        return alike and "apply" not in vars(self._optimizer)

    @property
    def states(self) -> list[Tensor]:
        """What the optimizer writes beside the weights."""
        return [*self.first, *self.second, self._count]

    def settings(self, steps: int, after: int = 0) -> Any:
        """Of so many steps from now, or after some: step numbers, rate, betas, epsilons."""
        adam, time = self._optimizer, int(self._count) + 1 + after
        numbers = range(time, time + steps)
        times = torch.arange(time, time + steps).to(self._time)
        epsilons = [epsilon_of(adam, number) for number in numbers]
        return list(times.unbind()), float(self._rate), adam.beta_1, adam.beta_2, epsilons

    def count(self, steps: int) -> None:
        """So many steps were made."""
        self._count.add_(steps)
