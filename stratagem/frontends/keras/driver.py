"""Replaces methods of a model on the chief, so that Keras' own loop runs distributed steps.

    fit, evaluate, predict ...   call the model's own method, in which other processes take part
    train_step, test_step ...    send changes, check some rows, have the batch computed
    metrics, weights, files      gather counts, weights and state before they are read

Data, shuffling, callbacks and the progress bar are Keras' own, on the chief alone. A batch is
computed by the driver's side:

    OnReplicas    all replicas make each step together, with an all-reduce of gradients
    OnServers     workers of parameter servers compute the tickets that they are dealt
"""

from __future__ import annotations

import inspect
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import keras
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stratagem.data.loader import check_sampler
from stratagem.errors import NotDistributable
from stratagem.figures.meter import METER
from stratagem.figures.recorder import is_recording
from stratagem.figures.trial_record import model_path
from stratagem.frontends.hooks import refuse_on_parameters, warn_of_batchnorm
from stratagem.frontends.keras.adapter import KerasAdapter, device_name, replica_progress
from stratagem.frontends.keras.backups import exact_backups
from stratagem.frontends.keras.callback_needs import (
    ONE_STEP,
    BrokenLossCallback,
    CallbackNeeds,
    TrialCallback,
    public_names,
    with_callback,
)
from stratagem.frontends.keras.captured_step import CapturedStep, StepSettings
from stratagem.frontends.keras.dry_run_fit import rehearse
from stratagem.frontends.keras.image_layout import all_keras
from stratagem.frontends.keras.model_pickle import number_of, optimizers
from stratagem.frontends.keras.quiet_loop import quiet_loop
from stratagem.frontends.keras.refusals import refuse_model
from stratagem.frontends.keras.row_check import check_step
from stratagem.frontends.keras.whole_file import whole_file
from stratagem.frontends.row_trials import CheckSchedule
from stratagem.state.keras_stepper import fuse
from stratagem.strategies.strategy import Strategy, checks_rows
from stratagem.training import dry_run
from stratagem.training.replica import Replica

CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
STEPS = ("train_step", "test_step", "predict_step")
#: what files are made of; the last is on the way of keras.saving.save_model, too
_FILES = ("save", "save_weights", "get_compile_config")
_READS = ("get_metrics_result", "get_weights", *_FILES)
#: the driver whose call is under way in this process
_leader: Driver | None = None


@dataclass
class Call:
    """A call of one of the model's methods by the user, and the needs of its callbacks."""

    name: str
    own: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: CallbackNeeds

    @property
    def trains(self) -> bool:
        return self.name in ("fit", "train_on_batch")

    def add(self, callback: Any) -> None:
        """Add a callback to the arguments of `fit`."""
        self.args, self.kwargs = with_callback(self.own, self.args, self.kwargs, callback)

    def run(self) -> Any:
        return self.own(*self.args, **self.kwargs)

    def quietly(self, model: Any) -> AbstractContextManager[None]:
        """Return the quiet loop of a `fit`, as far as callbacks allow it."""
        if self.name != "fit":
            return quiet_loop(None)
        alone = not self.needs.steps and model.compiled and all_keras(model)
        # code of the user might write into the data
        return quiet_loop(model, slices=alone and StepSettings(model).foreign is None)


class KerasSide(Protocol):
    """Computes the batches of a model, together with other processes."""

    @property
    def plays(self) -> Sequence[str]:
        """The kinds of step that are distributed."""

    @property
    def adapter(self) -> KerasAdapter:
        """The chief's copy, during a call."""

    @property
    def is_open(self) -> bool:
        """Whether the other processes have a copy of the model."""

    def takes(self, call: Call) -> bool:
        """Whether other processes take part in such a call."""

    def start(self, call: Call) -> Any:
        """Run the call on all processes; returns the chief's result."""

    def inner_call(self) -> None:
        """A validation, or a call of a callback, begins inside of another call."""

    def prepare(self, data: Any) -> bool:
        """Make all copies alike before a step; returns whether the step is to be distributed."""

    def shares(self, step: str) -> tuple[int, bool]:
        """How many share a batch of this kind of step, or 2 and True if their whole batches must
        add up; 1: neither."""

    def step(self, name: str, data: Any, total: int) -> Any:
        """Compute the batch; returns the step's logs or outputs for Keras."""

    def settle(self, *, counts: bool, state: bool) -> None:
        """Gather weights on the chief; `counts`: metrics, too; `state`: the optimizer, too."""

    def reset(self) -> None:
        """Reset the metrics of all copies."""

    def refuse_changes(self) -> None:
        """Raise if a callback has changed something that cannot be sent."""

    def send_attributes(self, changes: list[Any]) -> None:
        """Send attributes that a callback has changed."""

    def send_tensors(self, written: list[tuple[int, Tensor]], *, last: bool) -> None:
        """Send tensors that a callback has written to; `last`: no step follows."""

    def recompiled(self) -> None:
        """The model was compiled again."""


class Driver:
    """Replaces the methods of one model, on this instance only."""

    overlaid = (*CALLS, *STEPS, *_READS, "reset_metrics")

    def __init__(self, model: Any, strategy: Strategy, kind: Callable[[Driver], KerasSide]) -> None:
        self.model, self.strategy, self.number = model, strategy, number_of(model)
        self.leading = self.in_step = False
        #: the needs of the running call's callbacks
        self.needs = CallbackNeeds()
        #: whether rows are checked for not depending on each other, and in which batches
        self.checks, self.schedule = checks_rows(), CheckSchedule()
        #: the training step where this process trains alone
        self._captured, self._calls = CapturedStep(model), 0
        #: the time at the end of the last training step, and how long this process had waited then
        self._left: tuple[float, float] | None = None
        #: the state of replicas in the backup that is resumed, until it is sent
        self.resumed: list[Any] | None = None
        self.side = kind(self)

    def lay_over(self) -> None:
        """Replace the model's methods, on this instance."""
        methods: dict[str, Callable[..., Any]] = {"reset_metrics": self.reset_metrics}
        methods |= {name: partial(self.call, name) for name in CALLS}
        methods |= {name: partial(self.step, name) for name in STEPS}
        methods |= {name: partial(self.read, name) for name in _READS}
        taken = "_stratagem" in self.model.__dict__
        for name in self.overlaid:
            if not taken and name in self.model.__dict__:
                raise NotDistributable(
                    f"{name} was set on this model alone, where replicas do not see it; define it "
                    "in a subclass of keras.Model."
                )
            self.model.__dict__[name] = methods[name]
        self.model.__dict__["_stratagem"] = self
        for optimizer in optimizers(self.model):
            fuse(optimizer)

    def recompiled(self) -> None:
        self.schedule = CheckSchedule()
        self.side.recompiled()

    def own(self, name: str) -> Callable[..., Any]:
        """Return the model's own method."""
        method: Callable[..., Any] = getattr(type(self.model), name).__get__(self.model)
        return method

    # --- calls ------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method, distributed if the side takes the call."""
        if name == "fit" and dry_run.wanted():
            kwargs["verbose"] = 0
            rehearse(self.model, self.strategy, lambda: self.own("fit")(*args, **kwargs))
        call = Call(name, self.own(name), args, kwargs, self._needs_of(name, args, kwargs))
        if self.leading:
            before, self.needs = self.needs, self.needs.joined(call.needs)
            try:
                self.side.inner_call()
                return call.run()
            finally:
                self.needs = before
        if name == "fit" and _leader is None and self.strategy.audience is None:
            run: Any = partial(exact_backups, self, call.own)
            run.__signature__ = inspect.signature(call.own)  # arguments are bound to it later
            call.own = run
        if _leader is not None:  # in a callback of another model's call: not distributed
            return call.run()
        path = model_path(".keras")
        if name == "fit":
            call.add(BrokenLossCallback(self.replica_states))
        trains = name == "fit" and self.strategy.audience is None and self.strategy.is_chief
        if not trains or (path is None and not is_recording()):
            return self.begin(call)
        call.add(TrialCallback())
        result = self.begin(call)
        if path is not None:
            self.model.save(path)
        return result

    def _needs_of(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallbackNeeds:
        if name in CALLS[3:]:
            return ONE_STEP
        given = inspect.signature(self.own(name)).bind_partial(*args, **kwargs).arguments
        for loader in given.values():
            if isinstance(loader, DataLoader):
                check_sampler(loader)
        return CallbackNeeds.of(given.get("callbacks"))

    def begin(self, call: Call) -> Any:
        """Begin an outermost call."""
        if self.model.compiled and self.model.jit_compile is True:
            raise NotDistributable(
                "jit_compile=True compiles a step that a strategy cannot take part in; compile the "
                "model with jit_compile=False."
            )
        if not self.side.takes(call):
            device = keras.device(device_name(self.strategy.replica_group.start()))
            with (
                device,
                self._captured.during(between_steps=call.needs.acts),
                call.quietly(self.model),
            ):
                return call.run()
        refuse_model(self.model)
        if call.trains:
            refuse_on_parameters(self.strategy, self.model)
            layers = self.model._flatten_layers()
            warn_of_batchnorm(self.strategy, self.model, layers, keras.layers.BatchNormalization)
        return self.side.start(call)

    @contextmanager
    def leads(self, call: Call) -> Iterator[None]:
        """Lead a distributed call, in the chief."""
        global _leader
        self.leading, self.needs, _leader = True, call.needs, self
        try:
            with keras.device(device_name(self.side.adapter.replica)):
                yield
        finally:
            self.leading, _leader = False, None

    # --- steps ------------------------------------------------------------------------------

    def step(self, name: str, data: Any) -> Any:
        if not self.leading or self.in_step or name not in self.side.plays:
            captured = self._captured.is_open and name == "train_step"
            return self._captured(data) if captured else self.own(name)(data)
        self._count_loading(name)
        data = keras.tree.map_structure(_as_tensor, data)
        total = _rows_of(data)
        if not self.side.prepare(data):
            return self.own(name)(data)  # Keras trains nothing then, and counts
        self._check(name, data, total)
        copy = self.side.adapter.captured
        copy.between_steps = self.needs.acts
        copy.stale |= self.needs.single
        result = self.side.step(name, data, total)
        self.schedule.after()
        self._left = (time.perf_counter(), METER.wait) if name == "train_step" else None
        return result

    def _count_loading(self, name: str) -> None:
        """Count the time between two training steps, when Keras draws a batch, as loading."""
        left, self._left = self._left, None
        if left is not None and name == "train_step":
            METER.load += time.perf_counter() - left[0] - (METER.wait - left[1])

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Let the chief make a step itself, in which the model's methods are its own."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def _check(self, step: str, data: Any, total: int) -> None:
        """Before the first step of a kind, and some later ones: check that shares add up."""
        (count, apart), adapter = self.side.shares(step), self.side.adapter
        if not self.checks or min(count, total) < 2:
            return
        if self.schedule.is_due(step, lambda: StepSettings(self.model).foreign is not None):
            arguments = self.model, step, data, adapter.replica, count
            warns = step not in self.schedule.passed
            reduced = self.strategy.settings.sync is None
            check = partial(check_step, *arguments, apart=apart, reduced=reduced, warns=warns)
            with self.playing():
                self.schedule.run(step, check)
            adapter.mark()
        self.schedule.count(step)

    def follow_changes(self, *, last: bool = False) -> None:
        """Send what a callback, or the user between two calls, has changed."""
        side, adapter = self.side, self.side.adapter
        side.refuse_changes()
        if self.needs.attributes:
            assert adapter.attributes is not None
            adapter.attributes.refuse_replaced()
            if changes := adapter.attributes.changed():
                side.send_attributes(changes)
        if written := adapter.written():
            side.send_tensors(written, last=last)
            adapter.mark()

    @property
    def replica(self) -> Replica:
        """The leading replica of this process."""
        return self.strategy.replica_group.start()

    def replica_states(self) -> list[Any]:
        """For a backup: return the state of every replica."""
        side: Any = self.side
        listens = self._listening() and hasattr(side, "progress")
        return side.progress() if listens else [replica_progress(self.model, self.replica)]

    def seed(self) -> int:
        """Derive a seed from the state of torch's generator, without drawing from it."""
        self._calls += 1
        state = torch.get_rng_state().numpy().tobytes()
        return zlib.crc32(state + self._calls.to_bytes(8, "big"))

    # --- reading ----------------------------------------------------------------------------

    def read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Gather counts and state before metrics or weights are read or saved."""
        self.settle(counts=name == "get_metrics_result", state=name in _FILES)
        run = self.own(name)
        found = (whole_file(run) if name in _FILES[:2] else run)(*args, **kwargs)
        # the optimizer's name as every backend knows it, so that any of them opens the file
        return public_names(found) if name == "get_compile_config" else found

    def settle(self, *, counts: bool = False, state: bool = False) -> None:
        if self._listening():
            self.side.settle(counts=counts, state=state)

    def reset_metrics(self) -> None:
        self._left, self._captured.stale = None, True  # an epoch begins, or a validation
        METER.passes += 1
        if self._listening():
            self.side.adapter.captured.stale = True
            self.side.reset()
        else:
            self.own("reset_metrics")()

    def _listening(self) -> bool:
        return self.leading and not self.in_step and self.side.is_open


def _rows_of(data: Any) -> int:
    """Return the number of examples in a batch; every part of it must have a row for each."""
    parts = [t for t in keras.tree.flatten(data) if isinstance(t, torch.Tensor) and t.dim()]
    lengths = sorted({len(part) for part in parts})
    if len(lengths) != 1:
        raise NotDistributable(
            f"the parts of a batch have {' and '.join(map(str, lengths)) or 'no'} rows; replicas "
            "share a batch by its rows, so all its parts need a row for each example."
        )
    return lengths[0]


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    return torch.as_tensor(keras.ops.convert_to_tensor(leaf))
