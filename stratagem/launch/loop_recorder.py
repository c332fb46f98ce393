"""Records the first step of a custom training loop by torch's global hooks, for a dry run.

    model(x)            a call of an outermost module: its arguments and outputs are recorded
    loss.backward()     the gradients of the outputs are recorded
    optimizer.step()    the loop ends here; a step replays the same calls with the same gradients

A step may have many calls: of frozen modules, which are run forward only; and of the same module,
before one backward pass (two inputs that are compared) or before several (micro-batches, whose rows
are counted together).

The code that turns outputs into a loss cannot be called again. The sum of outputs times their
gradients replaces the loss: it costs about as much, and has the same backward pass in the model.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.optim import Optimizer
from torch.optim import optimizer as every_optimizer

from stratagem.compat.torch_names import in_backward, pytree
from stratagem.errors import UsageError
from stratagem.training.dry_run import DryRun, dealt, hand_over

_INSTEAD = "use sg.plan(module, (x, y), loss=..., optimizer=...) in its place"
_UNPLANNED = "it is not predicted for a custom loop"
#: more forward-only calls of a module than this, for each call with gradients, are a preparation
#: before the loop (features of all the data, for instance)
_OFTEN = 8
#: arguments of a call, and gradients of its outputs
_Values = tuple[tuple[Any, Any], list[Tensor]]


@dataclass(eq=False)
class _Call:
    """A call of an outermost module, recorded in the loop and replayed with any number of rows."""

    module: nn.Module
    #: its positional and its keyword arguments
    given: tuple[Any, Any]
    #: rows of each output
    lengths: list[int]
    autocast: torch.dtype | None
    #: whether autograd recorded it
    recorded: bool
    #: the number of backward passes that were over when its own came
    turn: int
    #: gradients of the outputs, by their places among all outputs; none if it is only run forward
    grads: dict[int, Tensor] = field(default_factory=dict)

    @property
    def votes(self) -> Counter[int]:
        """The lengths of the arguments, each with the number of arguments and outputs of it."""
        first = [len(each) for each in pytree.tree_leaves(self.given) if _has_rows(each)]
        return Counter([*first, *(each for each in self.lengths if each in first)])

    @property
    def rows(self) -> int:
        """The most frequent length, the first of equals; 0 if no argument has rows."""
        votes = self.votes
        return votes.most_common(1)[0][0] if votes else 0

    def part(self, share: float) -> _Values:
        """The arguments and gradients with `share` times as many rows, repeated if need be."""
        grads = list(self.grads.values())
        if share == 1:
            return self.given, grads
        rows = self.rows
        chosen = torch.arange(max(1, round(rows * share))) % max(1, rows)

        def cut(value: Any) -> Any:
            if not _has_rows(value) or len(value) != rows:
                return value
            return value.detach()[chosen.to(value.device)].requires_grad_(value.requires_grad)

        return pytree.tree_map(cut, self.given), [cut(grad) for grad in grads]

    def replay(self, values: _Values) -> list[Tensor]:
        """Call the module; the terms that stand in for its loss, if gradients came back."""
        given, grads = values
        args, kwargs = pytree.tree_map(_used, given)
        kind = next(self.module.parameters()).device.type
        on = self.autocast is not None
        with torch.set_grad_enabled(self.recorded), torch.autocast(kind, self.autocast, enabled=on):
            output = pytree.tree_leaves(self.module(*args, **kwargs))
        return [(output[i] * grad).sum() for i, grad in zip(self.grads, grads, strict=True)]


@contextmanager
def instead_of_step() -> Iterator[None]:
    """Until closed, the first step of any torch optimizer hands over a dry run."""
    watcher = _LoopRecorder()
    before = every_module.register_module_forward_pre_hook(watcher.enters)
    after = every_module.register_module_forward_hook(
        watcher.leaves, with_kwargs=True, always_call=True
    )
    step = every_optimizer.register_optimizer_step_pre_hook(watcher.steps)
    try:
        yield
    finally:
        for handle in (before, after, step):
            handle.remove()


class _LoopRecorder:
    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []
        self.turn = 0
        #: whether a backward pass has begun since the last call
        self.backward = False
        #: arguments of calls without a graph, by module and shapes: an evaluation may have many
        self.shared: dict[Any, tuple[Any, Any]] = {}

    def enters(self, module: nn.Module, args: Any) -> None:
        self.depth += 1

    def leaves(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Record a call; for one that raised, torch passes neither keywords nor an output."""
        self.depth -= 1
        again = in_backward()  # activation checkpointing computes forward again
        param = next(module.parameters(), None)
        if self.depth or again or output is None or param is None:
            return
        if self.backward:
            self.turn, self.backward = self.turn + 1, False
        out = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor)]
        recorded = torch.is_grad_enabled() and any(each.requires_grad for each in out)
        given = pytree.tree_map_only(Tensor, _leaf, (args, kwargs))
        call = _Call(
            module,
            given if recorded else self._shared(module, given),
            [len(each) for each in out if _has_rows(each)],
            _autocast(param.device.type),
            recorded,
            self.turn,
        )
        for i, each in enumerate(pytree.tree_leaves(output)):
            if recorded and isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(self.comes_back, call, i))  # type: ignore[no-untyped-call]
        self.calls.append(call)

    def _shared(self, module: nn.Module, given: tuple[Any, Any]) -> tuple[Any, Any]:
        shapes = [
            each.shape if isinstance(each, Tensor) else type(each)
            for each in pytree.tree_leaves(given)
        ]
        return self.shared.setdefault((id(module), *shapes), given)

    def comes_back(self, call: _Call, place: int, grad: Tensor) -> None:
        call.grads[place], call.turn = grad.detach(), self.turn
        self.backward = True

    def steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(each) for each in (*args, *kwargs.values())):
            return  # a step with a closure ends the script, in script.py
        trained = _trained(self.calls, optimizer)
        calls, notes = _of_a_step(self.calls, trained)
        notes += _other_optimizers(optimizer)
        _hand_over(optimizer, trained, calls, notes)


def _trained(calls: Sequence[_Call], optimizer: Optimizer) -> nn.Module:
    """Return the one module that the optimizer updates."""
    owned = _owned(optimizer)
    called = {id(call.module): call.module for call in calls if call.grads}.values()
    # an optimizer may hold copies of the parameters, of another precision
    found = [m for m in called if any(id(p) in owned for p in m.parameters())] or list(called)
    if len(found) != 1:
        names = ", ".join(type(each).__name__ for each in found) or "none"
        raise UsageError(
            "a loop of one's own is planned from the one module that it trains, and before the "
            f"first step of its {type(optimizer).__name__} it called {names}; put them into one "
            f"module, or {_INSTEAD}."
        )
    return found[0]


def _owned(optimizer: Optimizer) -> set[int]:
    groups = getattr(optimizer, "param_groups", ())  # a user's own class may be half made
    return {id(param) for group in groups for param in group["params"]}


def _of_a_step(calls: Sequence[_Call], trained: nn.Module) -> tuple[list[_Call], list[str]]:
    """Return the calls of the step, without those before the loop, and notes about these."""
    name, notes = type(trained).__name__, []
    own = [call for call in calls if call.module is trained]
    first = next(i for i, call in enumerate(calls) if call.module is trained and call.grads)
    before = [i for i in range(first) if calls[i].module is trained]
    start = before[-1] + 1 if before else 0
    if start:
        notes.append(
            f"{name} was called {len(before)} times before its first gradient came back: taken "
            "for an evaluation, and left out of the step with all that was called before."
        )
    often = Counter(id(call.module) for call in calls[start:] if not call.grads)
    most = _OFTEN * sum(1 for call in own if call.grads)
    kept = [call for call in calls[start:] if call.grads or often[id(call.module)] <= most]
    for module in {id(c.module): c.module for c in calls[start:] if c not in kept}.values():
        notes.append(
            f"{type(module).__name__} was run forward {often[id(module)]} times before the first "
            "step: taken for a preparation, and left out of the step."
        )
    if len(kept) > 1:
        notes.append(f"a step of this loop is {_described(kept)}; all of that is in the figures.")
    return kept, notes


def _described(calls: Sequence[_Call]) -> str:
    kinds = Counter((type(call.module).__name__, bool(call.grads)) for call in calls)
    words = [
        f"{count} call{'s' * (count > 1)} of {name}{'' if back else ' (forward only)'}"
        for (name, back), count in kinds.items()
    ]
    return " and ".join(words)


def _other_optimizers(optimizer: Optimizer) -> list[str]:
    """Return a note if another optimizer has other parameters: its part of the loop is not seen."""
    gc.collect()
    owned = _owned(optimizer)
    others = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    names = sorted({type(each).__name__ for each in others if _owned(each) - owned})
    if not names:
        return []
    return [
        f"there is another optimizer ({', '.join(names)}): this is the step of the first that was "
        f"stepped ({type(optimizer).__name__}), and the other's work is not in it."
    ]


def _hand_over(
    optimizer: Optimizer, trained: nn.Module, calls: Sequence[_Call], notes: Sequence[str]
) -> None:
    last = max(call.turn for call in calls if call.grads)
    calls = [replace(call, turn=min(call.turn, last), grads=dict(call.grads)) for call in calls]
    own = [call for call in calls if call.module is trained and call.grads]
    rows: dict[int, int] = {}
    for call in own:
        rows[call.turn] = max(call.rows, rows.get(call.turn, 0))
    whole = sum(rows.values())
    if not whole:
        name = type(trained).__name__
        raise UsageError(f"{name} was called without a tensor that has rows; {_INSTEAD}.")
    if len(rows) > 1:
        notes = [
            *notes,
            "each backward pass of a prepared loop travels by itself, except to servers; "
            "compile(accumulate=) of sg.Model would send once a step.",
        ]
    notes = [*notes, *_unclear(own[-1])]
    others = {id(call.module): call.module for call in calls if call.module is not trained}
    hand_over(
        DryRun(
            trained,
            torch.arange(whole),
            _Step(calls, whole, len(rows)),
            optimizer.step,
            optimizer,
            dealt(),
            str(next(trained.parameters()).device),
            beside=[each for module in others.values() for each in module.buffers()],
            accumulated=len(rows),
            notes=notes,
            own_loop=True,
            unpiped=f"{_UNPLANNED}; PipelineStrategy and Mesh take one: docs/model-parallel.md.",
            unsharded=f"{_UNPLANNED}; CPU replicas of one machine take one: docs/sharded.md.",
        )
    )


def _unclear(call: _Call) -> list[str]:
    """Return a note if the rows of a call may not be examples."""
    votes = call.votes
    many = [n for n, count in votes.items() if count == votes[call.rows]]
    taken = f"{call.rows} examples are planned with; if that is wrong, {_INSTEAD}."
    if len(many) > 1:
        lengths = " and ".join(map(str, many))
        return [f"{type(call.module).__name__} is given tensors of {lengths} rows: {taken}"]
    if any(getattr(each, "batch_first", True) is False for each in call.module.modules()):
        return [
            f"{type(call.module).__name__} has layers with batch_first=False, and the rows of what "
            f"it is given may be steps in time: {taken}"
        ]
    return []


@dataclass
class _Step:
    """All calls of a step, replayed; micro-batches before the last are propagated backward, too."""

    calls: Sequence[_Call]
    whole: int
    turns: int
    #: the batch size of the last step, and the values of the calls for it
    cut: tuple[int, list[_Values]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cut": None}

    def __call__(self, batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        turn = self.calls[0].turn
        for call, values in zip(self.calls, self._values(len(batch)), strict=True):
            if call.turn != turn and losses:
                sum(losses).backward()  # type: ignore[union-attr]
                losses = []
            turn = call.turn
            losses += call.replay(values)
        return sum(losses)  # type: ignore[return-value]

    def _values(self, size: int) -> list[_Values]:
        if size < self.turns:
            raise UsageError(
                f"a step of this loop is {self.turns} micro-batches, so {size} examples are too "
                f"few to plan with; take {self.turns} or more (--batch)."
            )
        if self.cut is None or self.cut[0] != size:
            self.cut = size, [call.part(size / self.whole) for call in self.calls]
        return self.cut[1]


def _leaf(value: Tensor) -> Tensor:
    """Detach a tensor, but keep whether it requires a gradient."""
    return value.detach().requires_grad_(value.requires_grad)


def _used(value: Any) -> Any:
    """Clone what requires a gradient: a module may change its input in place, but not a leaf."""
    return value.clone() if isinstance(value, Tensor) and value.requires_grad else value


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _autocast(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
