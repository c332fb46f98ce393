"""Custom loops over processes that share one model: the first process runs it and leads the others.

    model(x)          forward through all processes; returns the output of the whole batch
    loss.backward()   backward through all processes, from the gradient of that output
    optimizer.step()  every process updates its own part

The first process sends commands to the other processes. The loss is computed from whole outputs, so
it is that of one device. The loop sees whole parameters, gradients and optimizer state, and may
clip or change them. A forward without gradients runs in the first process alone.
"""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.data.shares import rows_of, tensors_in, with_tensors
from stratagem.errors import NotDistributable, UsageError
from stratagem.training.loop_process import (
    LoopProcess,
    LoopWatch,
    Mode,
    refuse_other_backwards,
)
from stratagem.training.replica import END, Replica
from stratagem.training.step_figures import figures_of


class _Head(torch.autograd.Function):
    """The model as one autograd function: the outputs of all processes, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loop: LedLoop, x: dict[str, Any], told: Any, *params: Tensor
    ) -> Any:
        number, told[0], trained = loop.lead_forward(x)
        tensors = list(tensors_in(told[0]))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, is_so in zip(tensors, trained, strict=True) if not is_so)
        )
        ctx.loop, ctx.number, ctx.params = loop, number, len(params)
        weakref.finalize(ctx, loop.dropped.append, number).atexit = False
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.loop.lead_backward(ctx.number, grads)
        return (None,) * (4 + ctx.params)


class _Forward:
    """Replaces a model's forward; a pickle or copy of the model has the plain forward."""

    def __init__(self, loop: LedLoop, model: nn.Module) -> None:
        self._loop, self._model = loop, model
        self.plain = model.forward
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self._loop.take_back()
            return self.plain(*args, **kwargs)
        return self._loop.forward(self._named(*args, **kwargs))

    def _named(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments by name, without those that are None by default."""
        given = self.__signature__.bind(*args, **kwargs).arguments
        defaults = self.__signature__.parameters
        return {
            name: value
            for name, value in given.items()
            if value is not None or defaults[name].default is not None
        }

    def __reduce__(self) -> Any:
        return getattr, (self._model, "forward")


class LedLoop(LoopProcess):
    """A `LoopProcess` that can also lead, as the first process does. Made collectively."""

    def __init__(
        self, replica: Replica, model: nn.Module, optimizer: Optimizer, shared: Iterable[Tensor]
    ) -> None:
        self._watch = LoopWatch(model, optimizer)
        super().__init__(replica, model, optimizer, shared)
        self._count = 0
        #: numbers of passes whose outputs have been garbage collected
        self.dropped: list[int] = []
        self._failed = False
        self._waiting: list[Tensor | None] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._undo: list[Callable[[], Any]] = []

    @abstractmethod
    def _lead_pass(self, at: int, cast: list[Any], dropped: list[int], x: Any) -> tuple[Any, Any]:
        """On the first process: run a forward through split `at`.

        Returns the output, and which of its tensors require a gradient. If it raises, `_failed`
        says whether other processes wait.
        """

    def lead(self) -> None:
        """Route the model's forward and the optimizer's steps to all processes from now on."""
        model, optimizer = self._model, self._optimizer
        vars(model)["forward"] = _Forward(self, model)
        self._watch.mark()
        handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        self._undo = [*(handle.remove for handle in handles), partial(vars(model).pop, "forward")]

    def end(self, *, failed: bool) -> None:
        """End the loop: make the model an ordinary one again."""
        if not failed:
            self._commands.tell(END)
        for undo in self._undo:
            undo()
        self._shared.close()

    def take_back(self) -> None:
        """Copy tensors back that the loop has moved to other memory (`p.data = ...`)."""
        self._shared.take_back()

    def forward(self, x: dict[str, Any]) -> Any:
        """Return the output of the whole batch."""
        told: list[Any] = [None]
        # parameters are arguments, so that a backward for some of them reaches _Head and is refused
        given = (self._anchor, self, x, told, *self._params)
        found = iter(_Head.apply(*given))  # type: ignore[no-untyped-call]
        return with_tensors(told[0], lambda _: next(found))

    def lead_forward(self, x: dict[str, Any]) -> tuple[int, Any, list[bool]]:
        """Run a pass; returns its number, the outputs, and which tensors require a gradient."""
        self._refuse_failed()
        if any(tensor.requires_grad for tensor in tensors_in(x)):
            raise NotDistributable(sentence("one copy", "gradients of inputs"))
        self._watch.check()
        self.take_back()
        self._rows = rows_of(x)
        self._failed = True  # until the pass has succeeded
        rng = torch.get_rng_state()
        at = self._split_for(x)
        torch.set_rng_state(rng)
        self._count += 1
        kind = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
        cast = [torch.is_autocast_enabled("cpu"), kind]
        dropped, self.dropped[:] = list(self.dropped), []
        try:
            whole, trained = self._lead_pass(at, cast, dropped, x)
        finally:
            self._watch.mark()
        self._failed = False
        return self._count, whole, trained

    def lead_backward(self, number: int, grads: Sequence[Tensor | None]) -> None:
        self._refuse_failed()
        if number not in self._passes:
            raise UsageError(sentence("one copy", "a backward for each term"))
        refuse_other_backwards(self._anchor)
        self._watch.check()
        self._failed = True
        there = self._handed_in()
        self._tell_backward(number, there, grads)
        for index in self._play_backward(number, there, grads):
            self._params[index].grad = self._lent(index)
        self._watch.mark()
        self._failed = False

    def _tell_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Command the backward, with the gradients of the output for all processes."""
        self._commands.tell("backward", number, there, list(grads))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise NotDistributable(
                "optimizer.step(closure) evaluates the loss while others update their parameters; "
                "call backward first and step() without a closure, or use a MirroredStrategy."
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise NotDistributable(
                "a GradScaler leaves a fused optimizer to unscale gradients, which others do not "
                "know of; use fused=False, or call scaler.unscale_(optimizer) before."
            )
        self._refuse_failed()
        self._watch.check_step(1)
        if not self._splits:
            return  # nothing is divided yet
        self.take_back()
        if self._watch.state_replaced():
            self._loaded(optimizer)
        there = self._handed_in()
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._commands.tell("step", groups, there)
        self._waiting = [param.grad for param in self._params]
        self._before_update(there)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._splits:
            return
        self._finish_step()
        for param, gradient in zip(self._params, self._waiting, strict=True):
            param.grad = gradient
        self._waiting = []
        self._watch.mark_state()
        figures_of(self._replica).step(self._rows)

    def _loaded(self, optimizer: Optimizer) -> None:
        """After load_state_dict: give every process its part of the new state."""
        if self._splits:
            self._commands.tell("own")
            self._own()
            self._watch.mark_state()

    def _split_for(self, x: dict[str, Any]) -> int:
        """Return the index of the split for the model's present mode; make it if it is new."""
        mode = Mode(
            list(x),
            [part.training for part in self._model.modules()],
            [param.requires_grad for param in self._params],
        )
        for at, split in enumerate(self._splits):
            if split.mode == mode:
                return at
        self._commands.tell("split", vars(mode))
        self._split(vars(mode), x)
        self._watch.mark_state()
        return len(self._splits) - 1

    def _refuse_failed(self) -> None:
        if self._failed:
            raise UsageError(
                "a pass through the model has failed, and its processes wait at different places; "
                "let the error end the loop, and call strategy.run again."
            )
