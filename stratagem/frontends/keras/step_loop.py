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

import torch
from torch import Tensor

from stratagem.compat.torch_names import TENSOR_HOOKS, adam_loop, copy_all
from stratagem.frontends.keras.planned_update import PlannedUpdate

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
