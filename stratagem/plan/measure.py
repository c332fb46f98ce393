"""Measure a model's step on this machine: the Profile of a dry run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import count_rows
from stratagem.errors import UsageError
from stratagem.plan.host_memory import available, least
from stratagem.plan.layer_profile import with_layers
from stratagem.plan.lossy import codec_times
from stratagem.plan.machine import (
    counts,
    crowd,
    one_thread,
    refusal,
    update_seconds,
    waited_for_processor,
)
from stratagem.plan.profile import GradientPart, Profile, SparseTable, merged
from stratagem.plan.stage_profile import with_stages
from stratagem.training.dry_run import DryRun
from stratagem.training.exchange import BUCKET_BYTES
from stratagem.wire.buckets import plan_buckets
from stratagem.wire.device_kinds import kind_of
from stratagem.wire.freed_memory import keep_freed_memory

Say = Callable[[str], None]
_NOTHING = "the model has no parameter that requires a gradient to plan for."
_WARM, _LEAST = 3, 5
#: the fraction of the time, spent waiting for a processor, above which a note says so
_NOTED_WAITING = 0.1
#: enough samples for their distribution, and not too long for a person who waits
_SECONDS, _MOST = 4.0, 200


def rehearse(
    trial: DryRun,
    *,
    batch: int | None = None,
    steps: int | None = None,
    crowded: bool = True,
    lossy: bool = False,
    per_host: int | None = None,
    say: Say = lambda text: None,
) -> Profile:
    """Measure a replica's step of `batch` examples, by default as many as the script gives to each.

    crowded: also measure it beside other replicas that share this machine's processors.
    lossy: also time compressions of its gradient.
    per_host: replicas per host to plan for, if they are more than its processors.
    """
    whole = count_rows(trial.batch)
    if whole < 1:
        raise UsageError("the batch to plan with has no example; give one with some rows.")
    size = batch or max(1, whole // trial.replicas)
    device = torch.device(trial.device)
    if device.type == "cpu":  # as in all trainings, also where no strategy was made yet
        keep_freed_memory()
    given = batch_of(trial, size, device)
    _check_memory(trial, device, size)
    with _restored(trial), _explained(trial.module, size):
        trial.module.to(device)
        runner = _Runner(trial, given, device, size / whole)
        seconds = _SECONDS if steps is None else float("inf")
        say(f"profiling {type(trial.module).__name__}, {size} examples a step, on {device}")
        runner.run(_WARM, seconds, least=1)
        runner.forget()
        runner.run(_MOST if steps is None else max(1, steps), seconds)
        measured = runner.profile(size)
        say(f"{len(measured.samples)} steps, {measured.compute * 1e3:.2f} ms each")
        measured = _with_one_thread(runner, measured, say)
        measured = runner.with_server(measured)
        if lossy:
            say("encoding gradients")
            linear = isinstance(trial.optimizer, torch.optim.SGD)
            with one_thread():
                codecs = codec_times(measured.shapes, linear=linear)
            measured = replace(measured, codecs=codecs)
        measured = with_layers(measured, trial, given, runner.params)
        many = _room(trial, counts(per_host), say) if crowded and device.type == "cpu" else []
        if many:
            say(f"the same with {' and '.join(map(str, many))} replicas at once")
            measured = replace(measured, crowd=crowd(trial, given, many))
            measured = with_stages(measured, trial, given, many)
    return measured


def _room(trial: DryRun, wanted: list[int], say: Say) -> list[int]:
    """Return the numbers of replicas whose parameters and gradients fit into memory."""
    left, each = available(), 2 * least(trial.module, None)
    found = [n for n in wanted if left is None or n * each < left]
    if len(found) < len(wanted):
        say(f"{wanted[len(found)]} replicas at once are not tried: too little memory")
    return found


def batch_of(trial: DryRun, size: int, device: torch.device) -> Any:
    """Return `size` examples of the trial's batch, repeated if it has fewer."""
    return _tensors_to(trial.batch, torch.arange(size) % count_rows(trial.batch), device)


def _with_one_thread(runner: _Runner, measured: Profile, say: Say) -> Profile:
    """Measure the same step with one thread, as CPU replicas that fill a machine have.

    If one thread is faster (small models, a busy machine), it is what one device is compared by.
    """
    if runner.device.type != "cpu" or measured.threads == 1:
        return measured
    with one_thread():
        runner.forget()
        runner.run(1, 1.0)
        runner.forget()
        runner.run(max(2 * _LEAST, len(measured.samples) // 2), _SECONDS / 2)
        alone = runner.profile(measured.batch)
    if alone.compute < measured.compute * 0.95:
        said = (
            f"one thread is faster here than {measured.threads}: {alone.compute * 1e3:.2f} ms; "
            "planned so (torch.set_num_threads(1))"
        )
        say(said)
        return replace(alone, usual_threads=measured.threads, notes=(*alone.notes, f"{said}."))
    return replace(measured, single_thread=alone.compute, single_optimizer=alone.optimizer)


@dataclass
class _Times:
    """Marks of one step."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)


class _Runner:
    """Runs steps with hooks that note when each gradient is there."""

    def __init__(
        self, trial: DryRun, batch: Any, device: torch.device, repeated: float = 1.0
    ) -> None:
        self.trial, self.batch, self.device = trial, batch, device
        #: how many times the batch has each example
        self.repeated = max(1.0, repeated)
        self.params = [p for p in trial.module.parameters() if p.requires_grad]
        if not self.params:
            raise UsageError(_NOTHING)
        self.taken: list[_Times] = []
        self.touched: dict[int, list[int]] = {}
        self._now = _Times()
        self._began = 0.0
        self._sparse: dict[int, Tensor] = {}
        #: seconds of all steps, and of waiting for a processor in them
        self.spent = self.waited = 0.0

    def forget(self) -> None:
        """Drop the measurements so far, which were for warming up."""
        self.taken.clear()
        self.spent = self.waited = 0.0

    def run(self, most: int, seconds: float, least: int = _LEAST) -> None:
        """Run `most` steps, or as many as the time allows, but at least `least`."""
        self.trial.module.train()
        handles = [
            p.register_post_accumulate_grad_hook(partial(self._ready, i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.params)
        ]
        began, waited = time.perf_counter(), waited_for_processor()
        end = began + seconds
        try:
            for number in range(most):
                if number >= least and time.perf_counter() > end:
                    break
                self._step()
        finally:
            for handle in handles:
                handle.remove()
        self.spent += time.perf_counter() - began
        self.waited += waited_for_processor() - waited

    def _ready(self, index: int, param: Tensor) -> None:
        if not kind_of(self.device).queued:
            self._now.ready[index] = time.perf_counter() - self._began
        else:  # asynchronous devices: record an event in their own stream
            self._events[index] = self._event()
        if param.grad is not None and param.grad.is_sparse:
            self._sparse[index] = param.grad._indices()

    def _step(self) -> None:
        self._now, self._events = _Times(), dict[int, Any]()
        self._sparse.clear()
        for param in self.params:
            param.grad = None
        start = self._clock()
        loss = self.trial.loss(self.batch)
        self._began = self._clock()
        # all micro-batches but the last have had their backward: their gradients are ready at 0
        self._now.ready = dict.fromkeys(self._now.ready | self._events, 0.0)
        self._events.clear()
        mark = self._event()
        loss.backward()  # type: ignore[no-untyped-call]
        done = self._clock()
        self.trial.update()
        end = self._clock()
        self._now.forward, self._now.backward = self._began - start, done - self._began
        self._now.update = end - done
        for index, event in self._events.items():
            self._now.ready[index] = mark.elapsed_time(event) / 1e3
        for index, rows in self._sparse.items():
            self.touched.setdefault(index, []).append(len(set(rows.flatten().tolist())))
        self.taken.append(self._now)

    def _event(self) -> Any:
        return kind_of(self.device).mark()

    def _clock(self) -> float:
        kind_of(self.device).synchronize(self.device)
        return time.perf_counter()

    def profile(self, size: int) -> Profile:
        """Return the profile of all steps, by the mean, which decides the speed of a training."""
        taken = self.taken
        samples = tuple(t.forward + t.backward for t in taken)
        compute, usual = statistics.fmean(samples), statistics.median(samples)
        forward = compute * statistics.median(t.forward for t in taken) / max(usual, 1e-12)
        backward = max(0.0, compute - forward)
        # the times in `ready` are medians: scale them to the mean backward
        scale = backward / max(statistics.median(t.backward for t in taken), 1e-12)
        dense = self._dense()
        return Profile(
            type(self.trial.module).__name__,
            size,
            forward,
            backward,
            statistics.median(t.update for t in taken),
            self._buckets(dense, scale),
            tuple(tuple(self.params[i].shape) for i in dense),
            tuple(self._table(i) for i in self.touched),
            samples,
            self.device.type,
            torch.get_num_threads() if self.device.type == "cpu" else 1,
            itemsize=self.params[0].element_size(),
            gradients=self._stream(dense, scale),
            accumulated=self.trial.accumulated,
            notes=self._notes(size),
            own_loop=self.trial.own_loop,
        )

    def with_server(self, measured: Profile) -> Profile:
        """Return the profile with one server's update, for torch's optimizers."""
        optimizer = self.trial.optimizer
        if optimizer is None:
            return measured
        seconds = update_seconds(self.params, self._dense(), optimizer)
        return replace(measured, server=seconds, unserved=refusal(self.params, optimizer))

    def _dense(self) -> list[int]:
        return [i for i in range(len(self.params)) if i not in self.touched]

    def _table(self, index: int) -> SparseTable:
        param = self.params[index]
        seen = SparseTable(len(param), param[0].nbytes, statistics.fmean(self.touched[index]))
        if self.repeated == 1:
            return seen
        return replace(seen, touched=seen.touched_by(self.repeated))

    def _notes(self, size: int) -> tuple[str, ...]:
        notes = tuple(self.trial.notes)
        if self.waited > _NOTED_WAITING * self.spent:
            notes += (
                f"other work had the processor for {self.waited / self.spent:.0%} of the time "
                "that was measured, so one device is faster than it seems here, and how many "
                "are worth having is uncertain; measure again when the machine is quiet.",
            )
        if self.repeated == 1 or not self.touched:
            return notes
        return (
            *notes,
            f"the script's batch has {size / self.repeated:.0f} examples, so {size} were made by "
            "repeating them; the sparse rows of as many different ones are reckoned, as if each "
            "touched any row by chance. For rows as they are, give the script that batch size.",
        )

    def _buckets(self, dense: list[int], scale: float) -> tuple[GradientPart, ...]:
        """Return the strategies' own layout, with the time at which each bucket is full."""
        params = [self.params[i] for i in dense]
        found = []
        latest = 0.0
        for members in plan_buckets(params, BUCKET_BYTES) if params else ():
            size = sum(params[i].nbytes for i in members)
            times = [self._when(dense[i]) * scale for i in members]
            latest = max([latest, *times])  # buckets leave in order
            found.append(GradientPart(size, latest))
        return tuple(found)

    def _stream(self, dense: list[int], scale: float) -> tuple[GradientPart, ...]:
        """Return every variable's gradient by itself, in the order of backward."""
        found = [
            GradientPart(self.params[i].nbytes, self._when(i) * scale) for i in reversed(dense)
        ]
        return merged(sorted(found, key=lambda each: each.ready))

    def _when(self, index: int) -> float:
        """Return when a gradient is ready, in seconds after a usual backward pass began."""
        usual = statistics.median(t.backward for t in self.taken)
        seen = [t.ready[index] for t in self.taken if index in t.ready]
        return min(statistics.median(seen), usual) if seen else 0.0


@contextmanager
def _restored(trial: DryRun) -> Iterator[None]:
    """Restore weights, gradients, modes, optimizer state and random numbers at the end."""
    module, optimizer = trial.module, trial.optimizer
    modes = [(each, each.training) for each in module.modules()]  # some may be frozen
    before = {name: t.detach().clone() for name, t in _tensors(module)}
    others = [t.detach().clone() for t in trial.beside]
    grads = [p.grad for p in module.parameters()]
    state = deepcopy(optimizer.state_dict()) if optimizer is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in _tensors(module):
                    if name in before:
                        tensor.copy_(before[name])
                for tensor, value in zip(trial.beside, others, strict=True):
                    tensor.copy_(value)
            for param, grad in zip(module.parameters(), grads, strict=True):
                param.grad = grad
            if optimizer is not None and state is not None:
                optimizer.load_state_dict(state)
            for each, training in modes:
                each.training = training


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    found = [*module.named_parameters(), *module.named_buffers()]
    return [(name, t) for name, t in found if not nn.parameter.is_lazy(t)]


@contextmanager
def _explained(module: nn.Module, size: int) -> Iterator[None]:
    """Raise an out-of-memory error as one sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        certain = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if certain or "not enough memory" in str(error) or "allocate memory" in str(error):
            raise _too_big(module, size) from error
        raise


def _check_memory(trial: DryRun, device: torch.device, size: int) -> None:
    """Refuse a training that does not fit into a CPU's memory, where allocation does not fail."""
    module, left = trial.module, available() if device.type == "cpu" else None
    copied = sum(t.nbytes for _, t in _tensors(module))  # by _restored
    if left is not None and copied + least(module, trial.optimizer) > left:
        raise _too_big(module, size)


def _too_big(module: nn.Module, size: int) -> UsageError:
    return UsageError(
        f"{type(module).__name__} does not fit in this device's memory with {size} examples a "
        "step; try a smaller batch (--batch), a device with more, or divide the model itself: "
        'sg.PipelineStrategy(["cpu:0", "cpu:1"]) by layers, sg.ShardedStrategy() over replicas.'
    )


def _tensors_to(tree: Any, chosen: Tensor, device: torch.device) -> Any:
    """Return the chosen rows of every tensor, on the device."""
    if isinstance(tree, Tensor):
        return (tree[chosen.to(tree.device)] if tree.dim() else tree).to(device)
    if isinstance(tree, dict):
        return {key: _tensors_to(value, chosen, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(_tensors_to(value, chosen, device) for value in tree)
    return tree
