"""The base of strategies with parameter servers, on the client and inside a worker."""

from __future__ import annotations

from typing import Any

from torch import nn

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Synchronous, Updates
from stratagem.servers.loop_prepare import prepare_served
from stratagem.servers.task_main import current_worker, in_group
from stratagem.servers.worker_group import WorkerGroup
from stratagem.strategies.custom_loop_calls import Resume
from stratagem.strategies.strategy import Strategy, TaskGroup, replica_group_inside
from stratagem.training import dry_run
from stratagem.training.replica import called_replica
from stratagem.training.settings import Settings
from stratagem.training.wrapped import refuse_wrapped


class ServerStrategy(Strategy):
    """A strategy in which servers keep the parameters if `settings.served` is set."""

    def __init__(self, replica_group: TaskGroup, settings: Settings) -> None:
        super().__init__(replica_group, settings)
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
            return self.replica_group.size
        spares = served.updates.spares if isinstance(served.updates, Synchronous) else None
        return 1 if spares is None else served.workers - spares

    def prepare(
        self,
        model: Any,
        optimizer: Any = None,
        loader: Any = None,
        *,
        loss_reduction: str | None = None,
        resume: Resume = None,
    ) -> Any:
        """Distribute a custom loop: `model, optimizer, loader = strategy.prepare(...)`.

        The loader deals out batches to workers that are free; `optimizer.step()` pushes the
        gradients, and the next batch comes with the newest values.
        """
        if self.audience is not None:
            raise NotDistributable(
                "this task is the evaluator, which takes no part in the training, so there is no "
                "loop to prepare. Where strategy.audience is not None, load what the chief saves "
                "and evaluate it until strategy.audience.over(); or start the job without an "
                "evaluator."
            )
        if self.settings.served is None or dry_run.wanted():
            return super().prepare(
                model, optimizer, loader, loss_reduction=loss_reduction, resume=resume
            )
        refuse_wrapped(model, optimizer, loader)
        if resume is not None:
            raise UsageError(sentence("servers", "resume of a loop"))
        if not isinstance(model, nn.Module) or not hasattr(optimizer, "param_groups"):
            raise UsageError(sentence("servers", "a second loader"))
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

    def rows(self, batch: Any) -> Any:
        """Refuse to cut batches if servers deal them out."""
        if self.settings.served is not None:
            raise UsageError(sentence("servers", "rows of a loop"))
        return super().rows(batch)

    def mean(self, value: Any, *, count: Any = None) -> float:
        """Refuse a mean over workers, which do not wait for each other, if there are servers."""
        if self.settings.served is not None:
            raise UsageError(sentence("servers", "mean of a loop"))
        return super().mean(value, count=count)

    def barrier(self) -> None:
        """Refuse to wait for workers, which do not wait for each other, if there are servers."""
        if self.settings.served is not None:
            raise UsageError(
                "have the chief write what others read before strategy.run, or use "
                "MirroredStrategy: with parameter servers workers do not wait for each other, so "
                "there is no barrier."
            )
        super().barrier()

    def _devices_here(self) -> int:
        """The number of devices of this worker of a cluster."""
        alone = isinstance(self.replica_group, WorkerGroup) and self.replica_group.cluster is None
        return len(self.devices) if alone else 1

    def stats(self) -> Stats:
        """The statistics so far: gradients received, applied, dropped, buffered; ages; waiting."""
        if self.audience is not None:
            return Stats()  # the evaluator pushes nothing
        if not isinstance(self.replica_group, WorkerGroup):
            raise UsageError(
                "there are no books: here every replica's gradient is part of every update. They "
                "are kept where servers decide: ParameterServerStrategy, on the client, or "
                "CentralStorageStrategy with updates=sg.Asynchronous() or sg.Synchronous(spares=1)."
            )
        return self.replica_group.stats()

    def __reduce__(self) -> Any:
        return _inside, (self.replica_group.devices, self.settings)


def _inside(devices: tuple[str, ...], settings: Settings) -> ServerStrategy:
    return ServerStrategy(replica_group_inside(devices, settings), settings)


def check_spares(updates: Updates, workers: int) -> None:
    """Refuse as many spares as there are workers."""
    if isinstance(updates, Synchronous) and updates.spares >= workers:
        raise UsageError(
            f"spares={updates.spares} of {workers} workers leaves none to wait for; use fewer "
            "spares, or more workers."
        )


def check_backups(backups: int, servers: int, updates: Updates) -> None:
    """Refuse more backups than other servers, and updates that a backup cannot continue."""
    if not isinstance(backups, int) or not 0 <= backups < servers:
        raise UsageError(
            f"backups={backups!r} with {servers} ps: it is the number of other servers that hold "
            "each shard, from 0 to the number of ps less one; add a ps task, or "
            "LocalCluster(workers=2, ps=2)."
        )
    policies = getattr(updates, "staleness", ())
    unknown = [type(each).__name__ for each in policies if each.needs_then or each.needs_gap]
    if backups and unknown:
        raise UsageError(
            f"{unknown[0]} compares values that a worker has fetched, which the server that takes "
            "over does not know; use backups=0, or another policy (ScaleDown, Drop, LowerRate)."
        )
