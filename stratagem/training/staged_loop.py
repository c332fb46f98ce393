"""Custom loops of a pipeline: the loop runs in the first process, and the others do what it says.

    model(x)          every microbatch forward through the stages; the output of the whole batch
    loss.backward()   the gradient of that output, by microbatches, backward through the stages
    optimizer.step()  every stage steps its own parameters

The loss is computed from whole outputs, so any loss is that of one device. The loop sees
parameters, gradients and state whole, and may clip or change them as ever. A forward without
gradients runs in the first process alone.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shares import rows_of, tensors_in
from stratagem.errors import NotDistributable, UsageError
from stratagem.training import fingerprint
from stratagem.training.command_loop import END, CommandLoop
from stratagem.training.loop_watch import LoopWatch, refuse_other_backwards
from stratagem.training.prepare import Prepared, check_parameters
from stratagem.training.replica import Replica, alone, current_call, set_called
from stratagem.training.settings import Pipeline
from stratagem.training.stage_passes import Mode, StagePasses, joined, with_tensors
from stratagem.training.stage_plan import check_optimizer
from stratagem.training.step_figures import figures_of


class _Head(torch.autograd.Function):
    """What the loop sees of all stages: outputs forward, and gradients of them backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loop: StagedLoop, x: dict[str, Any], told: Any, *params: Tensor
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
    """In place of a model's forward. A copy of the model has its own one."""

    def __init__(self, loop: StagedLoop, model: nn.Module) -> None:
        self._loop, self._model = loop, model
        self.plain = model.forward
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self._loop.take_back()
            return self.plain(*args, **kwargs)
        return self._loop.forward(self._named(*args, **kwargs))

    def _named(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by their names, without those that are None by default."""
        given = self.__signature__.bind(*args, **kwargs).arguments
        defaults = self.__signature__.parameters
        return {
            name: value
            for name, value in given.items()
            if value is not None or defaults[name].default is not None
        }

    def __reduce__(self) -> Any:
        return getattr, (self._model, "forward")


class StagedLoop(StagePasses):
    """One process of a pipeline whose loop is the user's. Made collectively."""

    def __init__(
        self,
        replica: Replica,
        pipeline: Pipeline,
        model: nn.Module,
        optimizer: Optimizer,
        watch: LoopWatch,
    ) -> None:
        super().__init__(replica, pipeline, model, optimizer)
        self._watch = watch
        self._commands = CommandLoop(replica.collective)
        self._count = 0
        #: numbers of passes whose outputs nobody holds any more
        self.dropped: list[int] = []
        self._failed = False
        self._waiting: list[Tensor | None] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._undo: list[Callable[[], Any]] = []

    # --- the first process ------------------------------------------------------------------

    def lead(self) -> None:
        """From now on the model's calls, and the optimizer's, are those of all stages."""
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
        """The loop is over: the model is as any other again."""
        if not failed:
            self._commands.tell(END)
        for undo in self._undo:
            undo()
        self._shared.close()

    def take_back(self) -> None:
        """What the loop has given other memory (`p.data = ...`) is shared again."""
        self._shared.take_back()

    def forward(self, x: dict[str, Any]) -> Any:
        """The output of the whole batch."""
        told: list[Any] = [None]
        # parameters are arguments so that a backward for some of them comes here, and is refused
        given = (self._anchor, self, x, told, *self._params)
        found = iter(_Head.apply(*given))  # type: ignore[no-untyped-call]
        return with_tensors(told[0], lambda _: next(found))

    def lead_forward(self, x: dict[str, Any]) -> tuple[int, Any, list[bool]]:
        """The number of the pass, the outputs, and which of them have a gradient."""
        self._refuse_failed()
        if any(tensor.requires_grad for tensor in tensors_in(x)):
            raise NotDistributable(
                "an input of the model requires a gradient, which the stages of a pipeline do not "
                "bring back; detach it, or use a MirroredStrategy."
            )
        self._watch.check()
        self._failed = True  # until it is known that it has not
        self.take_back()
        self._rows = rows_of(x)
        dice = torch.get_rng_state()
        at = self._split_for(x)
        torch.set_rng_state(dice)
        split, self._count = self._splits[at], self._count + 1
        seeds = torch.randint(2**62, (max(min(split.microbatches, self._rows), 1),)).tolist()
        if split.draws:  # else the loop's own draws are those of one device
            dice = torch.get_rng_state()
        kind = str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")
        cast = [torch.is_autocast_enabled("cpu"), kind]
        given = [x[name] for name in split.mode.names]
        sent = [value if i in split.elsewhere else None for i, value in enumerate(given)]
        dropped, self.dropped[:] = list(self.dropped), []
        number, total = self._count, self._rows
        self._commands.tell("forward", at, number, total, seeds, cast, dropped, sent)
        self._play_forward(at, number, total, seeds, cast, dropped, given)
        torch.set_rng_state(dice)
        told = split.outputs.take()
        try:
            whole = joined(told["pieces"], self._passes[number].pieces)
        finally:
            split.outputs.release()
        self._watch.mark()
        self._failed = False
        return number, whole, told["trained"]

    def lead_backward(self, number: int, grads: Sequence[Tensor | None]) -> None:
        self._refuse_failed()
        if number not in self._passes:
            raise UsageError(
                "this output of the model has been through a backward already, and the stages of a "
                "pipeline keep nothing behind it; add up the losses and call backward once, or "
                "call the model again."
            )
        refuse_other_backwards(self._anchor)
        self._watch.check()
        self._failed = True
        split, there = self._passes[number].split, self._handed_in()
        self._commands.tell("backward", number, there)
        split.gradients.post(list(grads))
        self._play_backward(number, there)
        for index in self._settled(split):
            self._params[index].grad = self._lent(index)
        self._watch.mark()
        self._failed = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise NotDistributable(
                "optimizer.step(closure) evaluates the loss while stages update their parameters; "
                "call backward first and step() without a closure, or use a MirroredStrategy."
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise NotDistributable(
                "a GradScaler leaves a fused optimizer to unscale gradients, which stages do not "
                "know of; use fused=False, or call scaler.unscale_(optimizer) before."
            )
        self._refuse_failed()
        self._watch.check_step_hooks(1)
        if self._state is None:
            return  # nothing was split, so all of it is here
        if self._watch.state_replaced():
            self._loaded(optimizer)
        there = self._handed_in()
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._commands.tell("step", groups, there)
        self._waiting = [param.grad for param in self._params]
        self._hold(self._stepped, there)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._state is None:
            return
        for param, gradient in zip(self._params, self._waiting, strict=True):
            param.grad = gradient
        self._waiting = []
        self._finish_step()
        self._watch.mark_state()
        figures_of(self._replica).step(self._rows)

    def _loaded(self, optimizer: Optimizer) -> None:
        """The state is another one: every stage must have its part of it."""
        if self._state is not None:
            self._commands.tell("own")
            self._own()
            self._watch.mark_state()

    def _split_for(self, x: dict[str, Any]) -> int:
        """The number of the split for a model in this mode."""
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
                "a pass through the stages has failed, and they wait at different places; let the "
                "error end the loop, and call strategy.run again."
            )

    # --- the other processes ----------------------------------------------------------------

    def serve(self) -> None:
        """Do what the first process says until its loop is over."""
        self._commands.serve(
            {
                "split": self._split,
                "forward": self._play_forward,
                "backward": self._follow_backward,
                "step": self._follow_step,
                "own": self._own,
            }
        )

    def _follow_backward(self, number: int, there: list[bool]) -> None:
        split = self._passes[number].split
        self._play_backward(number, there)
        self._settled(split)

    def _follow_step(self, groups: list[dict[str, Any]], there: list[bool]) -> None:
        if len(groups) != len(self._optimizer.param_groups):
            raise NotDistributable(
                "the optimizer has got another group of parameters behind prepare, which the other "
                "stages do not know; add groups before prepare."
            )
        for group, told in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(told)
        self._hold(self._stepped, there)
        self._optimizer.step()
        self._finish_step()


# --- prepare --------------------------------------------------------------------------------------


class LoopRunsElsewhere(BaseException):
    """Ends the user's function on a process that does what the first one says."""


#: on the first process: the loop that is under way
_led: list[StagedLoop] = []


def prepare_staged(
    replica: Replica,
    pipeline: Pipeline,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
) -> Prepared:
    """Have the loop run here, if this is the first process, and the others serve it. Collective."""
    if pipeline.columns is not None or pipeline.data > 1:
        raise NotDistributable(
            "a loop of your own runs through one pipeline, in microbatches; leave columns= and "
            "data= (or the mesh) out, or use sg.Model(...).fit."
        )
    if _led:
        raise NotDistributable(
            "a pipeline has one model in a loop of your own, and this is the second; call it from "
            "the first one's forward, or use a MirroredStrategy."
        )
    if current_call() is None:
        raise UsageError(
            "a loop over the stages of a pipeline runs on the first of them, which ends the "
            "others' calls; put it into a function, and call strategy.run(train)."
        )
    if not replica.collective.shares_memory:
        raise NotDistributable(
            "a loop of your own leads stages on the CPUs of one machine, by shared memory, and "
            "these are on other hosts or devices; use sg.Model(...).fit."
        )
    check_optimizer(optimizer)
    check_parameters(model, optimizer)
    watch = LoopWatch(model, optimizer)
    look = fingerprint.of_module(model) | fingerprint.of_optimizer(optimizer, settings=True)
    fingerprint.check(replica, "prepare", look)
    loop = StagedLoop(replica, pipeline, model, optimizer, watch)
    if not replica.leads:
        loop.serve()
        raise LoopRunsElsewhere
    loop.lead()
    _led.append(loop)
    set_called(alone(replica))
    return Prepared(model, optimizer, loader)


def led() -> Replica | None:
    """In a loop that runs once for all stages: the one replica that they are together."""
    return current_call() if _led else None


@contextmanager
def loop_of_stages() -> Iterator[None]:
    """Around the user's function: a loop that was prepared in it is over when it ends."""
    failed = True
    try:
        yield
        failed = False
    except LoopRunsElsewhere:
        return
    finally:
        while _led:
            _led.pop().end(failed=failed)
