"""The strategy API: what every strategy can do, whatever it is made of."""

from __future__ import annotations

import atexit
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem.cluster.membership import Membership
from stratagem.errors import UsageError
from stratagem.strategies import rehearsal
from stratagem.strategies.agreement import Patience
from stratagem.strategies.company import Company
from stratagem.strategies.devices import place
from stratagem.strategies.prepare import Prepared, prepare, prepare_loader
from stratagem.strategies.replica import (
    Replica,
    as_tensor,
    called_replica,
    combine,
    current_replica,
    set_called,
)
from stratagem.strategies.settings import Settings
from stratagem.strategies.team import Team
from stratagem.wire.collective import Alone

if TYPE_CHECKING:
    from stratagem.strategies.parameters.audience import Audience

_scopes: list[Strategy] = []
#: front ends that must know when a scope opens; each returns what to hold open meanwhile
_front_ends: list[Callable[[Strategy], AbstractContextManager[Any]]] = []


def on_scope(enter: Callable[[Strategy], AbstractContextManager[Any]]) -> None:
    """Have `enter` called, and its context held, whenever a scope is open."""
    _front_ends.append(enter)
_open: weakref.WeakSet[Strategy] = weakref.WeakSet()
#: those of a cluster: the others wait for a goodbye, also where nobody holds the strategy any more
_members: list[Strategy] = []


class Strategy:
    """Where replicas run and how their gradients meet; the named strategies are presets."""

    #: whether servers keep the parameters, and workers go their own ways
    served = False
    #: set in the evaluator's task, which takes no part in the training: tells when that is over
    audience: Audience | None = None

    def __init__(self, team: Company, settings: Settings) -> None:
        self.team = team
        self.settings = settings
        _open.add(self)
        if team.place is not None:
            _members.append(self)

    def __enter__(self) -> Self:
        """`with sg.MirroredStrategy() as strategy:` closes it at the end; `scope` opens one."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas train together, over all workers."""
        return self.team.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this process."""
        return self.team.devices

    @property
    def is_chief(self) -> bool:
        """Whether this process, or inside `run` this replica, writes checkpoints and logs."""
        inside = called_replica()
        if inside is not None:
            return inside.is_chief
        return self.team.place is None or self.team.place.is_chief

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Models made inside belong to this strategy."""
        if _scopes and _scopes[-1] is not self:
            raise UsageError(
                "a strategy's scope is open already, and another strategy's cannot be opened "
                "inside it; close the first one (leave its `with` block) before."
            )
        with ExitStack() as held:
            for enter in _front_ends:
                held.enter_context(enter(self))
            _scopes.append(self)
            held.callback(_scopes.pop)
            yield self

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(*args)` once on each replica of this process; returns their results in order.

        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda: sg.current_replica().index)
        [0, 1]
        """
        if rehearsal.wanted():
            return [here(self, lambda _: fn(*args), None)] * len(self.devices)
        return self.team.call(_with_fresh_share, (fn, args))

    @overload
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, loader: Any = None, *,
        loss_reduction: str = "mean",
    ) -> Prepared: ...  # fmt: skip

    @overload
    def prepare(self, loader: DataLoader[Any], /, *, loss_reduction: str = "mean") -> Any: ...

    def prepare(
        self, model: nn.Module | DataLoader[Any], optimizer: Optimizer | None = None,
        loader: Any = None, *, loss_reduction: str = "mean",
    ) -> Any:  # fmt: skip
        """Distribute one's own loop: `model, optimizer, loader = strategy.prepare(...)`.

        Call it in code that every replica runs: a function given to `strategy.run`, or a script
        under `stratagem run` or torchrun. After `loss.backward()` every gradient is the one that
        a single device would have computed on the global batch.

        Without a loader it is `model, optimizer, _ = strategy.prepare(model, optimizer)`;
        `loader = strategy.prepare(loader)` deals out shares of a loader by itself.
        """
        replica = self.replica()
        rehearsal.deal(self.num_replicas_in_sync)
        if not isinstance(model, nn.Module):
            return prepare_loader(replica, model, loss_reduction)
        if optimizer is None:
            raise UsageError(
                "prepare was given a model without its optimizer; call prepare(model, optimizer), "
                "or prepare(loader) for a loader by itself."
            )
        return prepare(replica, self.settings, model, optimizer, loader, loss_reduction)

    def replica(self) -> Replica:
        """The replica that the calling code is."""
        inside = called_replica()
        if inside is not None:
            return inside
        if rehearsal.wanted():
            return _alone(self)
        if len(self.team.devices) > 1:
            raise UsageError(
                f"this strategy has {len(self.team.devices)} replicas in this process, and your "
                "loop runs on one of them only. Put the loop into a function and call "
                "strategy.run(train); or name no devices, and start the script with "
                f"`stratagem run --replicas {len(self.team.devices)} train.py`."
            )
        return self.team.start()

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Tensor:
        """Combine values of all replicas: `op` is "sum", "mean", "max" or "min".

        `value` is what `run` returned, or, inside a replica, its own tensor. With `axis` the
        reduction also goes along that axis, every row counted once.
        """
        return combine(self._all(value), op, axis)

    def gather(self, value: Any, axis: int = 0) -> Tensor:
        """Values of all replicas, one behind the other along `axis`."""
        return torch.cat(self._all(value), dim=axis)

    def _all(self, value: Any) -> list[Tensor]:
        inside = called_replica()
        if inside is not None:
            return inside.all_gather(value)
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != len(self.team.devices):
            raise UsageError(
                f"{len(values)} values for {len(self.team.devices)} replicas; give what "
                "strategy.run returned."
            )
        tensors = [as_tensor(v) for v in values]
        if self.team.size == len(tensors):
            return tensors
        gathered: list[Tensor] = self.team.call(_gather_here, (tensors,))[0]
        return gathered

    def close(self) -> None:
        """End the replicas that this strategy started. It can be used again afterwards."""
        self.team.close()

    def __reduce__(self) -> Any:
        """What a replica gets when its code mentions the strategy: the same verbs, no team."""
        return _inside, (self.team.devices, self.settings)


def _inside(devices: tuple[str, ...], settings: Settings) -> Strategy:
    return Strategy(team_inside(devices, settings), settings)


def team_inside(devices: tuple[str, ...], settings: Settings) -> Team:
    """What code on a replica has for a team: it starts nothing."""
    return Team(devices, settings, None, Patience(), inside=True)


def _with_fresh_share(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    replica = current_replica()
    replica.share.set(1, replica.count)
    return fn(*args)


def _gather_here(tensors: list[Tensor]) -> list[Tensor]:
    replica = current_replica()
    return replica.all_gather(tensors[replica.local_index])


def here(strategy: Strategy, function: Callable[[Any], Any], job: Any) -> Any:
    """Run `function` in this process alone, on the first of the strategy's devices."""
    before = set_called(_alone(strategy))
    try:
        return function(job)
    finally:
        set_called(before)


def _alone(strategy: Strategy) -> Replica:
    device = place(strategy.team.devices[0])
    return Replica(0, 1, device, "this process", Alone(), Membership.alone())


def get_strategy() -> Strategy | None:
    """The strategy whose scope is open, or None."""
    return _scopes[-1] if _scopes else None


@atexit.register
def _leave() -> None:
    """At the end of the script: a goodbye, or, after an uncaught error, the reason."""
    error = getattr(sys, "last_value", None)
    for strategy in list(_open):
        if error is not None:
            strategy.team.report("".join(traceback.format_exception(error)))
        strategy.close()
