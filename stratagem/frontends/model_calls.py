"""How a verb of `sg.Model` runs: on every replica together, or on this one alone in a callback."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from stratagem.frontends.evaluation import Evaluation, evaluate
from stratagem.frontends.fit_check import refuse_once
from stratagem.strategies.strategy import Strategy, here
from stratagem.training import fingerprint
from stratagem.training.elastic import Again
from stratagem.training.gpu_memory import explain_out_of_memory
from stratagem.training.sync_batchnorm import check_statistics

#: `busy` is set while a model is at work in this thread: only callbacks can ask meanwhile
_training = threading.local()


def everywhere(
    strategy: Strategy,
    function: Callable[[Any], Any],
    job: Any,
    go_back: Callable[..., Any] | None = None,
) -> Any:
    """Run a function of a job on all replicas; `go_back` is what to do when a server was lost."""
    replica_group = strategy.replica_group
    verb, look = function.__name__, None
    elastic = strategy.settings.elastic
    several = replica_group.size > len(replica_group.devices)
    if not strategy.served and (several or (elastic and replica_group.place is not None)):
        look = job.look(verb)  # other workers run the script by themselves
    if look is not None and not elastic:
        told = replica_group.call(fingerprint.tell, (verb, look), (verb, None))[0]
        fingerprint.compare(verb, told)
    with explain_out_of_memory(replica_group.devices):
        if go_back is not None:
            again = Again(job.done, go_back=go_back)
            call = replica_group.call(function, (job,), lambda: (job.for_followers(),), again)
            return call[0]
        if not elastic:
            sent = (job.for_followers(),) if len(replica_group.devices) > 1 else None
            return replica_group.call(function, (job,), sent)[0]
        return replica_group.call(
            _compared,
            (function, look, job),
            lambda: (function, look and {}, job.for_followers()),
            Again(job.done, hurry=job.asked_to_end, inherited=True, followed=verb == "fit"),
        )[0]


def _compared(function: Callable[[Any], Any], look: fingerprint.Look | None, job: Any) -> Any:
    """Run it; tasks compare what they were given each time that they come together."""
    if look is not None:
        told = fingerprint.tell(function.__name__, look or None)
        if look:
            fingerprint.compare(function.__name__, told)
    return function(job)


def watched(strategy: Strategy, function: Callable[[Any], Any], job: Evaluation) -> Any:
    """`evaluate` or `predict`, with its callbacks and something to watch."""
    tests, given, meter = function is evaluate, job.callbacks, job.meter
    try:
        with busy():
            given.test_begin() if tests else given.predict_begin()
        results = evaluated(strategy, function, job)
    except BaseException:
        if meter is not None:
            meter.close()
        raise
    if meter is not None:
        meter.finish(results if tests else {})
    with busy():
        given.test_end(results) if tests else given.predict_end()
    return results


def evaluated(strategy: Strategy, function: Callable[[Any], Any], job: Evaluation) -> Any:
    """`evaluate` or `predict`: by all replicas, or by this one if a callback asks."""
    refuse_once(strategy, job.source)
    if strategy.settings.sync_batchnorm and strategy.num_replicas_in_sync > 1:
        check_statistics(job.module)
    if getattr(_training, "busy", False):
        return _meanwhile(strategy, function, job)
    with busy():
        if strategy.served:
            return here(strategy, function, job)
        return everywhere(strategy, function, job)


def _meanwhile(strategy: Strategy, function: Callable[[Any], Any], job: Evaluation) -> Any:
    """In a callback, while the others wait: on this replica alone, and training goes on as if
    nothing had been."""
    modes = [(part, part.training) for part in job.module.modules()]
    dice = torch.get_rng_state()
    recipe = replace(job.recipe, metrics=copy.deepcopy(job.recipe.metrics))
    try:
        return here(strategy, function, replace(job, recipe=recipe))
    finally:
        torch.set_rng_state(dice)
        for part, training in modes:
            part.training = training


@contextmanager
def busy() -> Iterator[None]:
    """While callbacks may run here: what they call, they call alone."""
    around, _training.busy = getattr(_training, "busy", False), True
    try:
        yield
    finally:
        _training.busy = around
