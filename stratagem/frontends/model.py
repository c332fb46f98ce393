"""`sg.Model`: Keras' verbs over any nn.Module, at the speed of a hand-written loop."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import UsageError
from stratagem.figures import trial_record
from stratagem.frontends import (
    asked,
    evaluation,
    evaluator,
    fit_checkpoints,
    hooks,
    inputs,
    losses,
    server_fit,
    staged,
)
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callbacks import Callback, History
from stratagem.frontends.dry_run_fit import rehearse
from stratagem.frontends.fit import fit
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.fit_journal import FitJournal
from stratagem.frontends.metrics import MetricSet
from stratagem.frontends.optimizers import make_optimizer
from stratagem.frontends.progress import ProgressBar
from stratagem.frontends.progress_meter import ProgressMeter, Verbosity, check_verbose
from stratagem.frontends.recipe import Recipe, describe, in_words
from stratagem.frontends.server_recovery import ServerRecovery
from stratagem.frontends.sources import Source
from stratagem.state import checkpoint as files
from stratagem.state.checkpoint_folder import Checkpoints
from stratagem.strategies.mirrored import single_device
from stratagem.strategies.strategy import Strategy, checks_rows, get_strategy, here
from stratagem.training import dry_run, fingerprint
from stratagem.training.elastic import Again
from stratagem.training.gpu_memory import explain_out_of_memory
from stratagem.training.setup import refuse_renormed
from stratagem.training.sync_batchnorm import check_statistics
from stratagem.training.termination import EXIT_CODE

_CHIEF_WRITES = 10.0  # seconds that another task may find one of two files written
_PRECISION = {
    None: None,
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Callbacks = Sequence[Callback] | Callback | None

log = logging.getLogger("stratagem")

#: `model` is that which is at work in this thread: only callbacks can ask meanwhile
_training = threading.local()


class Model:
    """A module with a strategy: the one whose scope is open, else one device.

    >>> with strategy.scope():
    ...     model = sg.Model(Net())
    ...     model.compile(optimizer="adam", loss="cross_entropy", metrics=["accuracy"])
    >>> model.fit(x, y, epochs=10, batch_size=100)
    """

    def __init__(self, module: nn.Module, strategy: Strategy | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise UsageError(f"sg.Model takes an nn.Module, not a {type(module).__name__}.")
        self.module = module
        self.strategy = strategy or get_strategy() or single_device()
        self.optimizer: Optimizer | None = None
        self.history: History | None = None
        self.stop_training = False
        self._recipe: Recipe | None = None
        self._fits = 0
        #: brings what is kept elsewhere up to date here, before it is saved in mid-training
        self.bring_home: Callable[[], int] | None = None

    def __repr__(self) -> str:
        return describe(self.module, self.optimizer, self._recipe, self.strategy)

    @asked.by_name
    def compile(
        self,
        optimizer: str | type[Optimizer] | Optimizer | Callable[..., Optimizer] = "adam",
        loss: Any = None,
        metrics: Any = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        precision: str | None = None,
        jit_compile: bool = False,
        check: bool = True,
        from_logits: bool | None = None,
    ) -> None:
        """Say how to train.

        Args:
            optimizer: a name ("adam", "sgd", ...), a class, a function of the parameters, or an
                instance made from this module's parameters.
            loss: a name of torch.nn.functional ("cross_entropy"), a torch loss, or any function
                of (output, target) that returns the mean over the rows, or a value for each.
            metrics: names ("accuracy"), torchmetrics metrics, functions, or a dict of them.
            clip_norm, clip_value: clip the global gradient, after it was added up.
            accumulate: batches whose mean gradient makes one update; fewer at the end of an epoch
                are divided by it, too.
            precision: "bfloat16" or "float16" run the forward pass under autocast; "float16" with
                a gradient scaler.
            jit_compile: run the module through torch.compile, on each replica.
            check: before the first batch of a call, try on a few rows that shares of a batch add
                up to what one device makes of it; False takes that on trust.
            from_logits: whether outputs are logits, for metrics; known of torch's cross entropies.
        """
        if precision not in _PRECISION:
            known = ", ".join(repr(name) for name in _PRECISION if name)
            raise UsageError(f"precision={precision!r}; choose one of {known}.")
        if accumulate < 1:
            raise UsageError(f"accumulate is {accumulate}; it must be 1 or more.")
        asked.positive(clip_norm=clip_norm, clip_value=clip_value)
        if loss is None:
            raise UsageError('compile needs a loss: compile(optimizer="adam", loss="mse").')
        frozen = not any(p.requires_grad for p in self.module.parameters())
        given = isinstance(optimizer, Optimizer)
        self.optimizer = None if frozen and not given else make_optimizer(optimizer, self.module)
        self._recipe = Recipe(
            losses.resolve(loss),
            MetricSet(metrics, losses.meaning(loss, from_logits)),
            clip_norm,
            clip_value,
            accumulate,
            _PRECISION[precision],
            jit_compile,
            check and checks_rows(),
            in_words(loss, metrics),
        )

    @asked.by_name
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        validation_data: Any = None,
        validation_split: float | None = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | Sequence[float] | None = None,
        shuffle: bool = True,
        callbacks: Callbacks = None,
        verbose: Verbosity = "auto",
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_freq: int | Collection[int] = 1,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        checkpoint: Checkpoints | str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> History:
        """Train; `batch_size` is the global batch, split over the replicas.

        Args:
            x, y: arrays or tensors; or x alone: a dataset, a DataLoader, or any iterable of
                batches (x, y) or (x, y, sample_weight).
            validation_data: (x, y), (x, y, sample_weight), a dataset, a DataLoader or an iterable.
            validation_split: instead of it, the last part of the arrays, 0.2 say, held out.
            class_weight: what the examples of a class weigh, {class: 2.0}; others weigh 1.
            steps_per_epoch: end an epoch after so many batches; a generator goes on from there in
                the next epoch, everything else starts anew.
            verbose: 1 for a progress bar, 2 for a line an epoch, 0 for silence; "auto" is 1.
            initial_epoch: the first epoch is this one, counted from 0: to go on with a training.
            validation_freq: validate after every so many epochs, or after those, counted from 1.
            validation_steps: end a validation after so many batches.
            validation_batch_size: of arrays and datasets; `batch_size` if it is not given.
            checkpoint: a folder for checkpoints, one after each epoch; `sg.Checkpoints(folder,
                seconds=60)` says how often, and how many are kept.
            resume: go on from the newest checkpoint of that folder, with the next batch that was
                not seen; begin where there is none.
        """
        recipe, optimizer = self._compiled("fit"), self.optimizer
        if optimizer is None:
            raise UsageError(
                "the module had no parameter that requires a gradient when it was compiled; "
                "unfreeze what shall be trained, then compile again."
            )
        check_verbose(verbose)
        callbacks = asked.listed(callbacks)
        asked.whole(1, steps_per_epoch=steps_per_epoch, validation_steps=validation_steps)
        asked.whole(1, validation_batch_size=validation_batch_size)
        asked.whole(0, epochs=epochs, initial_epoch=initial_epoch)
        if (audience := self.strategy.audience) is not None:
            sizes = (validation_batch_size, batch_size)
            self.history = self._attend(
                audience.over, callbacks, validation_data, sizes, validation_steps
            )
            return self.history
        validated = asked.epochs_to_validate(validation_freq)
        source, held_out = inputs.to_train_on(
            (x, y, sample_weight),
            validation_data,
            validation_split,
            class_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            validation_batch_size=validation_batch_size,
        )
        if dry_run.wanted():
            rehearse(self.module, optimizer, recipe, source, self.strategy)
        steps = _fewer(source.steps, steps_per_epoch)
        job = Fit(
            self.module,
            optimizer,
            recipe,
            self.strategy.settings,
            source,
            held_out,
            range(initial_epoch, epochs),
            steps_per_epoch,
            self._fits,
            validated=validated,
            validation_steps=validation_steps,
            checkpoints=asked.checkpoints(checkpoint, resume=resume),
            journal=FitJournal() if self.strategy.settings.elastic else None,
        )
        job.saves = job.checkpoints is not None
        job.goes_back = job.saves and not source.once and _meets_servers_again(self.strategy)
        if resume and job.checkpoints is not None and self.strategy.is_chief:
            job.resumed = fit_checkpoints.load(self, job.checkpoints)
            if job.resumed is not None and job.resumed["seed"] is not None:
                source.seed = int(job.resumed["seed"])
        bar = ProgressBar(epochs, steps, verbose) if verbose and self.strategy.is_chief else None
        known = {"validated": None if job.validation is None else validated}
        history = self._invite(job, callbacks, bar, {"epochs": epochs, "steps": steps, **known})
        self._check(job)
        self._fits += 1
        try:
            with _busy(self):
                self._everywhere(fit, job)
        finally:
            if job.journal is not None:
                job.journal.termination.close()
            if bar is not None:
                bar.close()
        if job.terminated:
            log.warning("SIGTERM: the training is saved, and goes on with resume=True")
            raise SystemExit(EXIT_CODE)
        if (path := trial_record.model_path(".safetensors")) is not None:
            self.save(path)
        return history

    def _invite(
        self,
        job: Fit,
        callbacks: Sequence[Callback],
        bar: ProgressBar | None,
        params: dict[str, Any],
    ) -> History:
        """The chief's callbacks, and what every replica must know of them."""
        self.stop_training, self.history = False, (history := History())
        given = CallbackList(callbacks, self, params)
        job.between_steps, job.around_tests = given.between_steps, given.around_tests
        job.between_tests = given.between_tests
        job.wants_state = given.reads_optimizer_state
        all_of_them = [history, *callbacks, *([bar] if bar else [])]
        invited = all_of_them if self.strategy.is_chief else [history]
        job.callbacks = CallbackList(invited, self, params)
        return history

    def _check(self, job: Fit) -> None:
        """Refuse what the strategy's replicas, or its servers, cannot do as one device does."""
        hooks.refuse_on_parameters(self.strategy, self.module)
        hooks.refuse_on_optimizer(self.strategy, job.optimizer)
        several, by_servers = self.strategy.replica_group.size > 1, self.strategy.served
        self._refuse_once(job.source, job.validation)
        if several:
            hooks.refuse_shared(self.module)
            hooks.refuse_autocast()
        if several or by_servers:
            refuse_renormed(self.module)
        if by_servers:
            server_fit.check(job)
        if several and self.strategy.settings.pipeline is not None:
            staged.check(job, self.strategy.replica_group.size)

    def _attend(
        self,
        over: Callable[[], bool],
        callbacks: Sequence[Callback],
        validation: Any,
        sizes: tuple[int | None, int | None],
        steps: int | None,
    ) -> History:
        """As the evaluator: look at every checkpoint."""

        def evaluate() -> dict[str, float]:
            source = inputs.to_validate_on(validation, *sizes)
            assert source is not None
            recipe = self._compiled("fit")
            results: dict[str, float] = self._everywhere(
                evaluation.evaluate, evaluation.Evaluation(self.module, recipe, source, steps)
            )
            return results

        return evaluator.watch(self, callbacks, validation, evaluate, over)

    @asked.by_name
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        verbose: Verbosity = "auto",
        return_dict: Literal[True] = True,
    ) -> dict[str, float]:
        """Loss and metrics over every example, once.

        Args:
            steps: end after so many batches.
            callbacks: their `on_test_...` methods are called.
            verbose: 1 for a progress bar, or a line where none can move; 2 for the line, 0 for
                silence; "auto" for the bar alone.
        """
        asked.whole(1, steps=steps)
        if not return_dict:
            raise UsageError(
                "evaluate returns numbers by their names, not the list of return_dict=False; that "
                "is list(model.evaluate(...).values())."
            )
        recipe = self._compiled("evaluate")
        source = inputs.source_of(x, y, sample_weight, batch_size=batch_size)
        results: dict[str, float] = self._watched(
            evaluation.evaluate, source, recipe, steps, callbacks, verbose
        )
        return results

    @asked.by_name
    def predict(
        self,
        x: Any,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        verbose: Verbosity = "auto",
    ) -> Any:
        """Outputs for every example, in order, on the CPU; `steps` and `verbose` as in `evaluate`,
        and of `callbacks` their `on_predict_...` methods."""
        asked.whole(1, steps=steps)
        recipe = self._recipe or Recipe(losses.resolve("mse"), MetricSet(None))
        source = inputs.source_of(x, batch_size=batch_size)
        return self._watched(evaluation.predict, source, recipe, steps, callbacks, verbose)

    def _watched(
        self,
        function: Callable[[Any], Any],
        source: Source,
        recipe: Recipe,
        steps: int | None,
        callbacks: Callbacks,
        verbose: Verbosity,
    ) -> Any:
        """`evaluate` or `predict`, with callbacks and something to watch on the chief."""
        tests = function is evaluation.evaluate
        known = _fewer(source.steps, steps)
        given = CallbackList(asked.listed(callbacks), self, {"steps": known})
        given = given if self.strategy.is_chief else CallbackList.none()
        with _busy(self):
            given.test_begin() if tests else given.predict_begin()
        meter = self._meter(function.__name__, known, verbose)
        between = given.between_tests if tests else given.between_predictions
        job = evaluation.Evaluation(
            self.module, recipe, source, steps, meter=meter, callbacks=given, between=between
        )
        try:
            results = self._evaluated(function, job)
        except BaseException:
            if meter is not None:
                meter.close()
            raise
        if meter is not None:
            meter.finish(results if tests else {})
        with _busy(self):
            given.test_end(results) if tests else given.predict_end()
        return results

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write weights (safetensors) and, beside them, what is needed to go on.

        Only the chief writes. The files load with no stratagem installed.
        """
        if not self.strategy.is_chief:
            return files.paths(path)[0]
        progress: dict[str, Any] = {"history": dict(self.history.history) if self.history else {}}
        if self.bring_home is not None:
            progress["updates"] = self.bring_home()
        return files.save(path, self.module, self.optimizer, progress)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `save` wrote: weights, and the optimizer's state once compiled.

        Other workers than the chief may not have the file: what the chief has read they get
        when training, evaluation or prediction begins.
        """
        if not self.strategy.is_chief and not files.paths(path)[0].is_file():
            log.info("%s is not here; what the chief reads there comes from it later", path)
            return
        patience = 0.0 if self.strategy.is_chief else _CHIEF_WRITES
        files.load(path, self.module, self.optimizer, patience=patience)

    def _everywhere(self, function: Callable[[Any], Any], job: Any) -> Any:
        replica_group = self.strategy.replica_group
        verb, look = function.__name__, None
        elastic = self.strategy.settings.elastic
        several = replica_group.size > len(replica_group.devices)
        if not self.strategy.served and (several or (elastic and replica_group.place is not None)):
            look = job.look(verb)  # other workers run the script by themselves
        if look is not None and not elastic:
            told = replica_group.call(fingerprint.tell, (verb, look), (verb, None))[0]
            fingerprint.compare(verb, told)
        with explain_out_of_memory(replica_group.devices):
            if isinstance(job, Fit) and job.goes_back:
                again = Again(job.done, go_back=ServerRecovery(self, job).go_back)
                return replica_group.call(function, (job,), lambda: (job.for_followers(),), again)[
                    0
                ]
            if not elastic:
                followers = len(replica_group.devices) > 1
                sent = (job.for_followers(),) if followers else None
                return replica_group.call(function, (job,), sent)[0]
            return replica_group.call(
                _compared,
                (function, look, job),
                lambda: (function, look and {}, job.for_followers()),
                Again(job.done, hurry=job.asked_to_end),
            )[0]

    def _meter(self, verb: str, steps: int | None, verbose: Verbosity) -> ProgressMeter | None:
        """Something to watch, on the chief."""
        check_verbose(verbose)
        if not verbose or not self.strategy.is_chief:
            return None
        title = None if verbose == "auto" else verb
        return ProgressMeter(verb, steps, title=title, moves=verbose != 2)

    def _refuse_once(self, *sources: Source | None) -> None:
        if self.strategy.settings.elastic and any(each and each.once for each in sources):
            raise UsageError(
                "the data is a generator, which cannot give a batch again when a replica dies; "
                "give elastic=True arrays, a dataset, a DataLoader or a list of batches."
            )

    def _evaluated(self, function: Callable[[Any], Any], job: evaluation.Evaluation) -> Any:
        self._refuse_once(job.source)
        if self.strategy.settings.sync_batchnorm and self.strategy.num_replicas_in_sync > 1:
            check_statistics(self.module)
        if getattr(_training, "model", None) is not None:
            return self._meanwhile(function, job)
        with _busy(self):
            if self.strategy.served:
                return here(self.strategy, function, job)
            return self._everywhere(function, job)

    def _meanwhile(self, function: Callable[[Any], Any], job: evaluation.Evaluation) -> Any:
        """In a callback, while the others wait: on this replica alone, and training goes on as if
        nothing had been."""
        modes = [(part, part.training) for part in self.module.modules()]
        dice = torch.get_rng_state()
        recipe = replace(job.recipe, metrics=copy.deepcopy(job.recipe.metrics))
        try:
            return here(self.strategy, function, replace(job, recipe=recipe))
        finally:
            torch.set_rng_state(dice)
            for part, training in modes:
                part.training = training

    @property
    def loss(self) -> Any:
        """What `compile` made of the loss; None before."""
        return self._recipe and self._recipe.loss

    def rises(self, name: str) -> bool | None:
        """Whether a metric is better the larger it is, if it knows."""
        return self._compiled("fit").metrics.rises(name)

    def _compiled(self, verb: str) -> Recipe:
        if self._recipe is None:
            raise UsageError(
                f'{verb} comes after compile: model.compile(optimizer="adam", '
                'loss="cross_entropy", metrics=["accuracy"]).'
            )
        return self._recipe


def recipe_of(model: Model) -> Recipe | None:
    """What `compile` was given; None before."""
    return model._recipe


def _meets_servers_again(strategy: Strategy) -> bool:
    """Whether workers can go on with servers of which one has died, and is started again."""
    group = strategy.replica_group
    return strategy.served and (group.place is None or len(group.devices) == 1)


def _compared(function: Callable[[Any], Any], look: fingerprint.Look | None, job: Any) -> Any:
    """Run it; tasks compare what they were given each time that they come together."""
    if look is not None:
        told = fingerprint.tell(function.__name__, look or None)
        if look:
            fingerprint.compare(function.__name__, told)
    return function(job)


@contextmanager
def _busy(model: Model) -> Iterator[None]:
    """While callbacks may run here: what they call, they call alone."""
    around, _training.model = getattr(_training, "model", None), model
    try:
        yield
    finally:
        _training.model = around


def _fewer(known: int | None, asked: int | None) -> int | None:
    return min(known, asked) if known is not None and asked is not None else known or asked
