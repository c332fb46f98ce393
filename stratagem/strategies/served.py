"""What strategies with servers have in common, as a client and as code on a worker sees them."""

from __future__ import annotations

from typing import Any

from torch import nn

from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Synchronous, Updates
from stratagem.strategies import rehearsal
from stratagem.strategies.company import Company
from stratagem.strategies.parameters.apart import in_group
from stratagem.strategies.parameters.crew import Crew
from stratagem.strategies.parameters.inside import current_worker
from stratagem.strategies.parameters.loop import prepare_served
from stratagem.strategies.replica import called_replica
from stratagem.strategies.settings import Settings
from stratagem.strategies.strategy import Strategy, team_inside


class ServedStrategy(Strategy):
    """Servers keep the parameters wherever `settings.served` is set."""

    def __init__(self, team: Company, settings: Settings) -> None:
        super().__init__(team, settings)
        self.served = settings.served is not None

    @property
    def is_chief(self) -> bool:
        """Whether this process, or inside `run` this worker, writes checkpoints and logs."""
        return self.audience is None and super().is_chief

    def close(self) -> None:
        """End what this strategy started, and leave the cluster."""
        if self.audience is not None:
            self.audience.close()
        super().close()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many gradients make one update: the workers without the spares, or one."""
        served = self.settings.served
        if served is None:
            return self.team.size
        spares = served.updates.spares if isinstance(served.updates, Synchronous) else None
        return 1 if spares is None else served.workers - spares

    def prepare(
        self, model: Any, optimizer: Any = None, loader: Any = None, *,
        loss_reduction: str = "mean",
    ) -> Any:  # fmt: skip
        """Distribute one's own loop: `model, optimizer, loader = strategy.prepare(...)`.

        The loader deals out batches to whoever is free; `optimizer.step()` hands the gradients
        in, and the next batch comes with the newest values.
        """
        if self.audience is not None:
            raise NotDistributable(
                "this task is the evaluator, which takes no part in the training, so there is no "
                "loop to prepare. Where strategy.audience is not None, load what the chief saves "
                "and evaluate it until strategy.audience.over(); or start the job without an "
                "evaluator."
            )
        if self.settings.served is None or rehearsal.wanted():
            return super().prepare(model, optimizer, loader, loss_reduction=loss_reduction)
        if not isinstance(model, nn.Module) or optimizer is None:
            raise UsageError(
                "with parameter servers prepare takes the model, its optimizer and the loader that "
                "is trained on: model, optimizer, loader = strategy.prepare(model, optimizer, "
                "loader)."
            )
        if self._devices_here() > 1 and called_replica() is None:
            raise UsageError(
                f"this worker has {self._devices_here()} devices, and your loop runs on one of "
                "them only. Put the loop into a function and call strategy.run(train), or give the "
                'worker one device, ParameterServerStrategy(devices="cuda:0"), and start one for '
                "each."
            )
        replica = self.replica()
        worker = None if in_group(replica) and not replica.leads else current_worker()
        return prepare_served(
            worker, replica, self.settings, model, optimizer, loader, loss_reduction
        )

    def _devices_here(self) -> int:
        """Of this worker of a cluster."""
        alone = isinstance(self.team, Crew) and self.team.cluster is None
        return len(self.devices) if alone else 1

    def stats(self) -> Stats:
        """The books so far: gradients received, applied, dropped, buffered; ages; waiting."""
        if self.audience is not None:
            return Stats()  # the evaluator hands nothing in
        if not isinstance(self.team, Crew):
            raise UsageError(
                "there are no books: here every replica's gradient is part of every update. They "
                "are kept where servers decide: ParameterServerStrategy, on the client, or "
                "CentralStorageStrategy with updates=sg.Asynchronous() or sg.Synchronous(spares=1)."
            )
        return self.team.stats()

    def __reduce__(self) -> Any:
        return _inside, (self.team.devices, self.settings)


def _inside(devices: tuple[str, ...], settings: Settings) -> ServedStrategy:
    return ServedStrategy(team_inside(devices, settings), settings)


def check_spares(updates: Updates, workers: int) -> None:
    """Somebody must be left to wait for."""
    if isinstance(updates, Synchronous) and updates.spares >= workers:
        raise UsageError(
            f"spares={updates.spares} of {workers} workers leaves none to wait for; use fewer "
            "spares, or more workers."
        )
