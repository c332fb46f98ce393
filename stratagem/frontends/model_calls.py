"""Runs a method of `sg.Model` on every replica, or on this one alone inside a callback.

Also the checks before `fit`, and its return to the last checkpoint after a server is lost.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, ReplicaLost, StratagemError, UsageError
from stratagem.figures.recorder import event
from stratagem.frontends import divided, fit_checkpoints, hooks, replica_fit, server_fit, staged
from stratagem.frontends.evaluation import Evaluation, evaluate
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.sources import Source
from stratagem.state.checkpoint_folder import CheckpointFolder
from stratagem.strategies.strategy import Strategy, here
from stratagem.training import fingerprint
from stratagem.training.devices import explain_out_of_memory
from stratagem.training.elastic import Again
from stratagem.training.setup import refuse_frequencies, refuse_renormed
from stratagem.training.sync_batchnorm import check_statistics
from stratagem.training.wrapped import refuse_wrapped

#: `busy` is set while this thread runs a model, so that further calls come from callbacks
_training = threading.local()


def everywhere(
    strategy: Strategy,
    function: Callable[[Any], Any],
    job: Any,
    go_back: Callable[..., Any] | None = None,
) -> Any:
    """Run a function of a job on all replicas; `go_back` is called after a server is lost."""
    replica_group = strategy.replica_group
    verb, look = function.__name__, None
    elastic = strategy.settings.elastic
    several = replica_group.size > len(replica_group.devices)
    if not strategy.served and (several or (elastic and replica_group.place is not None)):
        look = job.look(verb)  # each worker runs its own copy of the script
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
    """Compare the arguments of all tasks whenever an elastic call (re)starts, then run it."""
    if look is not None:
        told = fingerprint.tell(function.__name__, look or None)
        if look:
            fingerprint.compare(function.__name__, told)
    return function(job)


def watched(strategy: Strategy, function: Callable[[Any], Any], job: Evaluation) -> Any:
    """Run `evaluate` or `predict` with callbacks and a progress meter."""
    tests, given, meter = function is evaluate, job.callbacks, job.meter
    try:
        with busy():
            given.call("test_begin" if tests else "predict_begin")
        results = evaluated(strategy, function, job)
    except BaseException:
        if meter is not None:
            meter.close()
        raise
    if meter is not None:
        meter.finish(results if tests else {})
    with busy():
        given.call("test_end", results) if tests else given.call("predict_end")
    return results


def evaluated(strategy: Strategy, function: Callable[[Any], Any], job: Evaluation) -> Any:
    """Run `evaluate` or `predict` on all replicas, or on this one alone inside a callback."""
    refuse_once(strategy, job.source)
    if strategy.settings.sync_batchnorm and strategy.num_replicas_in_sync > 1:
        check_statistics(job.module)
    if getattr(_training, "busy", False):
        return _inside_callback(strategy, function, job)
    with busy():
        if strategy.served:
            return here(strategy, function, job)
        return everywhere(strategy, function, job)


def _inside_callback(strategy: Strategy, function: Callable[[Any], Any], job: Evaluation) -> Any:
    """Run on this replica alone, inside a callback, while the other replicas wait.

    Training modes, metrics and rng state are restored, so that training is unaffected.
    """
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
    """Mark this thread as running a model: callbacks then call the model on this replica alone."""
    around, _training.busy = getattr(_training, "busy", False), True
    try:
        yield
    finally:
        _training.busy = around


# --- `fit`, on every process of a strategy --------------------------------------------------------


def fit(job: Fit) -> None:
    """Train; the module of every replica, or worker, ends with the same values."""
    (replica_fit if job.settings.served is None else server_fit).fit(job)


# --- checks before a fit --------------------------------------------------------------------------


def check_fit(job: Fit, strategy: Strategy) -> None:
    """Raise if the strategy cannot give the result of one device for this job."""
    refuse_wrapped(job.module, job.optimizer)
    hooks.refuse_on_parameters(strategy, job.module)
    hooks.warn_of_batchnorm(strategy, job.module, job.module.modules())
    hooks.refuse_on_optimizer(strategy, job.optimizer)
    size = strategy.replica_group.size
    refuse_once(strategy, job.source, job.validation)
    if size > 1:
        hooks.refuse_keras(strategy, job.module)
        hooks.refuse_shared(job.module)
        hooks.refuse_autocast()
    if size > 1 or strategy.served:
        refuse_renormed(job.module)
        if not strategy.settings.whole_batches:
            refuse_frequencies(job.module)
    if strategy.served:
        _refuse_with_servers(job)
    if size > 1 and strategy.settings.pipeline is not None:
        staged.check(job, size)
    if size > 1 and strategy.settings.tensor is not None:
        divided.check(job, size)


def _refuse_with_servers(job: Fit) -> None:
    """Raise for options that parameter servers do not support."""
    if job.recipe.accumulate > 1:
        raise NotDistributable(sentence("servers", "accumulate"))
    if job.recipe.autocast is torch.float16:
        raise NotDistributable(sentence("servers", "float16"))


def refuse_once(strategy: Strategy, *sources: Source | None) -> None:
    """Refuse generators with elastic replicas, which may need a batch a second time."""
    if strategy.settings.elastic and any(each and each.once for each in sources):
        raise UsageError(sentence("elastic", "a generator"))


def meets_servers_again(strategy: Strategy) -> bool:
    """Return whether workers can reconnect to a server that died and was restarted."""
    group = strategy.replica_group
    return strategy.served and (group.place is None or len(group.devices) == 1)


# --- recovery from a lost server ------------------------------------------------------------------


log = logging.getLogger("stratagem")

#: how often training goes back to the same checkpoint before it gives up
IN_VAIN = 10


class ServerRecovery:
    """Resets a job to its last checkpoint, as `resume=True` does in a new process."""

    def __init__(self, model: Any, job: Fit) -> None:
        self._model, self._job = model, job
        #: the newest checkpoint of an earlier training in the folder, which is not used
        self._before = None if job.resumed is not None else self._newest()
        self._last: Path | None = None
        self._in_vain = 0

    def _newest(self) -> Path | None:
        plan = self._job.checkpoints
        return None if plan is None else CheckpointFolder(plan.path, plan.keep).newest()

    def go_back(self, lost: BaseException) -> None:
        """Reload the training's state from its newest checkpoint; re-raise `lost` without one."""
        job, model = self._job, self._model
        who = lost.who if isinstance(lost, ReplicaLost) else "a ps"
        if not model.strategy.is_chief:
            log.warning("%s is lost; waiting for it, and for the chief to go back", who)
            return
        found = self._newest()
        if found is None or found == self._before:
            raise lost
        self._in_vain = self._in_vain + 1 if found == self._last else 0
        self._last = found
        if self._in_vain >= IN_VAIN:
            raise lost
        log.warning(
            "%s is lost, and a share of the parameters with it; the training waits until it is "
            "back, and then goes on from %s",
            who,
            found,
        )
        event("fault", str(lost), about=who)
        event("action", f"the training goes back to {found}")
        if job.callback_states is not None:
            job.callback_states.reset()
        job.resumed = fit_checkpoints.load(model, job)
        if job.resumed is None:
            raise StratagemError(f"{found} is there no more; start the job again.") from lost
        job.last_saved, job.terminated, model.stop_training = None, False, False
        job.callbacks.changes.mark()
