"""The methods of a strategy for custom training loops."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem.errors import NotDistributable, UsageError
from stratagem.state.checkpoint_folder import Checkpoints
from stratagem.training import dry_run, meetings
from stratagem.training.batch_mean import mean_of_batch
from stratagem.training.elastic import journal_of
from stratagem.training.led_prepare import led, prepare_led
from stratagem.training.loop_checkpoints import check_loader, resumable
from stratagem.training.prepare import (
    Prepared,
    backward_counted,
    prepare,
    prepare_loader,
    rows_of_share,
)
from stratagem.training.replica import Replica, current_call
from stratagem.training.settings import Settings
from stratagem.training.wrapped import refuse_wrapped

#: a folder of checkpoints, or a plan for them
Resume = str | os.PathLike[str] | Checkpoints | None


class CustomLoopCalls(ABC):
    """The methods of a strategy that a custom loop calls on every replica."""

    settings: Settings

    @abstractmethod
    def replica(self) -> Replica:
        """The replica that the calling code is."""

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """How many replicas train together."""

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any = None,
        *,
        loss_reduction: str | None = None,
        resume: Resume = None,
    ) -> Prepared: ...

    @overload
    def prepare(self, loader: DataLoader[Any], /, *, loss_reduction: str | None = None) -> Any: ...

    def prepare(
        self,
        model: nn.Module | DataLoader[Any],
        optimizer: Optimizer | None = None,
        loader: Any = None,
        *,
        loss_reduction: str | None = None,
        resume: Resume = None,
    ) -> Any:
        """Distribute a custom loop: `model, optimizer, loader = strategy.prepare(...)`.

        Call it in code that every replica runs: a function given to `strategy.run`, or a script
        under `stratagem run` or torchrun. After `loss.backward()` every gradient is the one that
        a single device would have computed on the global batch.

        Without a loader it is `model, optimizer, _ = strategy.prepare(model, optimizer)`;
        `loader = strategy.prepare(loader)` deals out shares of a loader without a model.

        What a loss is divided by is read from its graph. `loss_reduction="mean"` or `"sum"` says
        that it is a mean, or a sum, over rows where that cannot be read.

        `resume="run/"`, or `sg.Checkpoints("run/", every=500)`: the loop keeps checkpoints there,
        and goes on from the last of them. It is then `for epoch in loader.epochs(10):`.
        """
        _check_loop(self.settings, resume)
        refuse_wrapped(model, optimizer, loader)
        replica = self.replica()
        elastic = self.settings.elastic and not dry_run.wanted()
        dry_run.deal(self.num_replicas_in_sync)
        if not isinstance(model, nn.Module):
            if resume is not None:
                raise UsageError(
                    "resume=... is for the loader that a model is trained on: "
                    "strategy.prepare(model, optimizer, loader, resume=...)."
                )
            return prepare_loader(replica, model)
        if optimizer is None or not hasattr(optimizer, "param_groups"):
            raise UsageError(
                "prepare was given a model without its optimizer; call prepare(model, optimizer, "
                "loader) to train (for a loop without one, torch.optim.SGD(model.parameters(), "
                "lr=...) serves); to evaluate, prepare(loader) deals out a loader by itself."
            )
        together = self.settings.one_copy and (replica.count > 1 or led() is not None)
        if together and not dry_run.wanted():
            return prepare_led(replica, self.settings, model, optimizer, loader)
        if elastic:
            self._let_begin_again(model, loader)
        found = prepare(replica, self.settings, model, optimizer, loader, loss_reduction)
        if resume is None and not elastic:
            return found
        plan = Checkpoints(resume) if isinstance(resume, str | os.PathLike) else resume
        plan = None if dry_run.wanted() else plan
        return resumable(found, loader, replica, plan, elastic=elastic)

    def _let_begin_again(self, model: nn.Module, loader: Any) -> None:
        """Note that a loop is prepared, which can be begun again when replicas leave or join."""
        replica = current_call()
        if replica is None:
            raise UsageError(
                "with elastic=True a loop is begun again, where it was, when a replica dies or "
                "joins; put it into a function, and call strategy.run(train)."
            )
        check_loader(loader)
        journal = journal_of(replica)
        if journal is not None:
            journal.open(model)

    def backward(self, loss: Tensor, *, count: float | Tensor, retain_graph: bool = False) -> None:
        """In place of `loss.backward()`: `loss` is a sum over this replica's rows by `count`.

        Afterwards every gradient is that of the sum over all rows, divided by the sum of all
        counts.

        >>> kept = (targets != padding).sum()
        >>> strategy.backward(losses_by_token[targets != padding].mean(), count=kept)
        """
        backward_counted(self.replica(), loss, count, retain_graph)

    def rows(self, batch: Any) -> Any:
        """Return this replica's rows of a global batch: a tensor, or tuples, lists, dicts of them.

        For a custom loop without a loader; the gradient is weighed by the share of the rows.
        """
        return rows_of_share(self.replica(), batch)

    def mean(self, value: Tensor | float, *, count: float | Tensor | None = None) -> float:
        """Return the mean over the whole batch of a loss, or another mean over this replica's rows.

        What a loss is divided by is read as in `backward`; a number without a graph (`.item()`)
        counts as a mean over rows, unless `count` says what it is divided by on this replica.
        The result is a plain float, which files and JSON keep as a number: no `.item()`.
        """
        return mean_of_batch(self.replica(), value, count)

    def meet(self) -> None:
        """With `sync=`, bring the weights of all replicas together, after a `break`. Collective."""
        meetings.meet(self.replica())


def _check_loop(settings: Settings, resume: Resume) -> None:
    """Refuse strategies that cannot leave the loop to the user."""
    if resume is not None and (settings.sharded or settings.one_copy):
        raise NotDistributable(
            "resume=... keeps what every replica has, and processes of this strategy have "
            "parts of an optimizer's state; use sg.Model(...).fit(checkpoint=..., resume=True)."
        )
