"""`prepare` for processes that share one model: the loop runs in the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, UsageError
from stratagem.state.optimizer_recipe import check_elementwise
from stratagem.training import fingerprint
from stratagem.training.divided_model import DividedPasses
from stratagem.training.led_loop import LedLoop
from stratagem.training.prepare import Prepared, check_parameters
from stratagem.training.replica import Replica, alone, current_call, set_called
from stratagem.training.settings import Settings
from stratagem.training.setup import keras_layer
from stratagem.training.stage_passes import StagePasses
from stratagem.training.stage_plan import check_optimizer


class LoopRunsElsewhere(BaseException):
    """Ends the user's function on a process that has served the first process."""


#: on the first process: the running loop, if any, with its model
_led: list[tuple[nn.Module, LedLoop]] = []


def prepare_led(
    replica: Replica, settings: Settings, model: nn.Module, optimizer: Optimizer, loader: Any
) -> Prepared:
    """Return to the loop on the first process; serve it on all other processes. Collective."""
    _check(settings, optimizer)
    if any(prepared is model for prepared, _ in _led):
        raise UsageError(sentence("one copy", "a model prepared again"))
    if _led:
        raise NotDistributable(sentence("one copy", "several models in a loop"))
    if current_call() is None:
        raise UsageError(
            "a loop over processes that have one model together runs on the first of them, which "
            "ends the others' calls; put it into a function, and call strategy.run(train)."
        )
    if not replica.collective.shares_memory:
        raise NotDistributable(
            "a loop of your own leads processes on the CPUs of one machine, by shared memory, and "
            "these are on other hosts or devices; use sg.Model(...).fit."
        )
    if (keras := keras_layer(model)) is not None:
        raise NotDistributable(
            f"{keras!r} is a layer of Keras, and a loop of your own over processes that have one "
            "model together splits modules of torch; compile a Keras model in strategy.scope() and "
            "call its fit, or use a MirroredStrategy."
        )
    check_parameters(model, optimizer)
    look = fingerprint.of_module(model) | fingerprint.of_optimizer(optimizer, settings=True)
    fingerprint.check(replica, "prepare", look)
    loop = _made(replica, settings, model, optimizer)
    if not replica.leads:
        loop.serve()
        raise LoopRunsElsewhere
    loop.lead()
    _led.append((model, loop))
    set_called(alone(replica))
    return Prepared(model, optimizer, loader)


def _check(settings: Settings, optimizer: Optimizer) -> None:
    """Refuse settings and optimizers that a custom loop cannot use."""
    pipeline = settings.pipeline
    if pipeline is None:
        check_elementwise(optimizer, "divided")
        return
    if pipeline.columns is not None:
        raise NotDistributable(
            "a loop of your own runs through pipelines in microbatches, and columns= cuts "
            "sequences; leave columns= out, or use sg.Model(...).fit."
        )
    check_optimizer(optimizer)


def _made(replica: Replica, settings: Settings, model: nn.Module, optimizer: Optimizer) -> LedLoop:
    if settings.pipeline is not None:
        return StagePasses(replica, settings.pipeline, model, optimizer)
    assert settings.tensor is not None
    return DividedPasses(replica, settings.tensor, model, optimizer)


def led() -> Replica | None:
    """Return the single replica that all processes form in a led loop; None outside of one."""
    return current_call() if _led else None


@contextmanager
def led_loops() -> Iterator[None]:
    """Around the user's function: end a loop that was prepared in it."""
    failed = True
    try:
        yield
        failed = False
    except LoopRunsElsewhere:
        return
    finally:
        while _led:
            _led.pop()[1].end(failed=failed)
