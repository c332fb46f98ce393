"""What is refused before a fit begins, because replicas or servers cannot do it as one device."""

from __future__ import annotations

from stratagem.errors import UsageError
from stratagem.frontends import divided, hooks, server_fit, staged
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.sources import Source
from stratagem.strategies.strategy import Strategy
from stratagem.training.setup import refuse_frequencies, refuse_renormed


def check_fit(job: Fit, strategy: Strategy) -> None:
    """Refuse what the strategy's replicas, or its servers, cannot do as one device does."""
    hooks.refuse_on_parameters(strategy, job.module)
    hooks.refuse_on_optimizer(strategy, job.optimizer)
    size = strategy.replica_group.size
    refuse_once(strategy, job.source, job.validation)
    if size > 1:
        hooks.refuse_shared(job.module)
        hooks.refuse_autocast()
    if size > 1 or strategy.served:
        refuse_renormed(job.module)
        if not strategy.settings.whole_batches:
            refuse_frequencies(job.module)
    if strategy.served:
        server_fit.check(job)
    if size > 1 and strategy.settings.pipeline is not None:
        staged.check(job, size)
    if size > 1 and strategy.settings.tensor is not None:
        divided.check(job, size)


def refuse_once(strategy: Strategy, *sources: Source | None) -> None:
    """Elastic replicas need batches again; a generator gives each of them once."""
    if strategy.settings.elastic and any(each and each.once for each in sources):
        raise UsageError(
            "the data is a generator, which cannot give a batch again when a replica dies; "
            "give elastic=True arrays, a dataset, a DataLoader or a list of batches."
        )


def meets_servers_again(strategy: Strategy) -> bool:
    """Whether workers can go on with servers of which one has died, and is started again."""
    group = strategy.replica_group
    return strategy.served and (group.place is None or len(group.devices) == 1)
