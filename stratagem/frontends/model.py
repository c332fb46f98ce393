"""`sg.Model`: Keras' methods for any nn.Module, at the speed of a hand-written loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from stratagem.errors import UsageError
from stratagem.figures import trial_record
from stratagem.frontends import (
    asked,
    evaluation,
    fit_checkpoints,
    inputs,
    losses,
    model_calls,
)
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callbacks import Callback, History
from stratagem.frontends.dry_run_fit import rehearse
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.fit_journal import FitJournal, Succession
from stratagem.frontends.metrics import MetricSet
from stratagem.frontends.model_calls import ServerRecovery, check_fit, fit, meets_servers_again
from stratagem.frontends.progress import ProgressBar, Verbosity, check_verbose, meter_for
from stratagem.frontends.recipe import Recipe, describe, in_words, make_optimizer
from stratagem.frontends.sources import Source
from stratagem.state import checkpoint as files
from stratagem.state.checkpoint_folder import Checkpoints
from stratagem.strategies.mirrored import single_device
from stratagem.strategies.strategy import Strategy, checks_rows, get_strategy
from stratagem.training import dry_run
from stratagem.training.termination import EXIT_CODE

_CHIEF_WRITES = 10.0  # seconds to wait until the chief has written both files

Callbacks = Sequence[Callback] | Callback | None

log = logging.getLogger("stratagem")


class Model:
    """A module and its strategy: the given one, that of the open scope, or one device.

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
        #: the arguments of `compile`; None before it is called
        self.recipe: Recipe | None = None
        self._fits = 0
        #: fetches state that servers or other replicas hold, before a save in mid-training
        self.bring_home: Callable[[], int] | None = None

    def __repr__(self) -> str:
        return describe(self.module, self.optimizer, self.recipe, self.strategy)

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
        """Set the optimizer, the loss, the metrics and the training options.

        Args:
            optimizer: a name ("adam", "sgd", ...), a class, a function of the parameters, or an
                instance made from this module's parameters.
            loss: a name of torch.nn.functional ("cross_entropy"), a torch loss, or any function
                of (output, target) that returns the mean over the rows, or a value for each.
            metrics: names ("accuracy"), torchmetrics metrics, functions, or a dict of them.
            clip_norm, clip_value: clip the gradient of the global batch.
            accumulate: number of batches whose gradients are averaged for one update; the divisor
                is the same where fewer are left at the end of an epoch.
            precision: "bfloat16" or "float16" run the forward pass under autocast; "float16" with
                a gradient scaler.
            jit_compile: run the module through torch.compile, on each replica.
            check: before the first batch and some later ones, compute a few rows as one batch and
                as shares, and raise if the results differ; False skips this check.
            from_logits: whether outputs are logits, for metrics; inferred for torch's cross
                entropies.
        """
        lower = asked.precision(precision)
        if accumulate < 1:
            raise UsageError(f"accumulate is {accumulate}; it must be 1 or more.")
        asked.positive(clip_norm=clip_norm, clip_value=clip_value)
        if loss is None:
            raise UsageError('compile needs a loss: compile(optimizer="adam", loss="mse").')
        frozen = not any(p.requires_grad for p in self.module.parameters())
        given = isinstance(optimizer, Optimizer)
        self.optimizer = None if frozen and not given else make_optimizer(optimizer, self.module)
        self.recipe = Recipe(
            losses.resolve(loss),
            MetricSet(metrics, losses.meaning(loss, from_logits)),
            clip_norm,
            clip_value,
            accumulate,
            lower,
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
            validation_split: instead of it, the fraction to hold out, from the end of the arrays.
            class_weight: the weight of each class's examples, {class: 2.0}; 1 for other classes.
            steps_per_epoch: the number of batches of an epoch; a generator continues in the next
                epoch, all other data starts over.
            verbose: 1 for a progress bar, 2 for a line an epoch, 0 for silence; "auto" is 1.
            initial_epoch: the number of the first epoch, counted from 0, to continue a training.
            validation_freq: validate every n epochs, or after the listed epochs, counted from 1.
            validation_steps: the number of batches of a validation.
            validation_batch_size: for arrays and datasets; default: `batch_size`.
            checkpoint: a folder for checkpoints, one after each epoch; `sg.Checkpoints(folder,
                seconds=60)` sets how often, and how many are kept.
            resume: continue from the newest checkpoint of that folder, with the next unseen batch;
                without a checkpoint, start from the beginning.
        """
        recipe, optimizer = self._compiled("fit"), asked.trainable(self.optimizer)
        check_verbose(verbose)
        asked.whole(1, steps_per_epoch=steps_per_epoch, validation_steps=validation_steps)
        asked.whole(1, validation_batch_size=validation_batch_size)
        asked.whole(0, epochs=epochs, initial_epoch=initial_epoch)
        if self.strategy.audience is not None:
            sizes = (validation_batch_size, batch_size)
            return self._evaluate_checkpoints(
                asked.listed(callbacks), validation_data, sizes, validation_steps
            )
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
        return self._train(job, asked.listed(callbacks), verbose, resume=resume)

    def _train(
        self, job: Fit, callbacks: Sequence[Callback], verbose: Verbosity, *, resume: bool
    ) -> History:
        """Run the job on all replicas, with the chief's callbacks and its progress bar."""
        job.saves = job.checkpoints is not None
        job.goes_back = job.saves and not job.source.once and meets_servers_again(self.strategy)
        load = partial(fit_checkpoints.load, self, job, resume=resume)
        job.resumed = load() if self.strategy.is_chief else None
        epochs, steps = job.epochs.stop, asked.fewer(job.source.steps, job.steps_per_epoch)
        bars = [ProgressBar(epochs, steps, verbose)] if verbose else []
        known = None if job.validation is None else job.validated
        params = {"epochs": epochs, "steps": steps, "validated": known}
        history = self._set_up_callbacks(job, [*callbacks, *bars], load, params)
        check_fit(job, self.strategy)
        self._fits += 1
        go_back = ServerRecovery(self, job).go_back if job.goes_back else None
        try:
            with model_calls.busy():
                model_calls.everywhere(self.strategy, fit, job, go_back)
        finally:
            if job.journal is not None:
                job.journal.termination.close()
            for bar in bars:
                bar.close()
        if job.terminated:
            log.warning("SIGTERM: the training is saved, and goes on with resume=True")
            raise SystemExit(EXIT_CODE)
        if (path := trial_record.model_path(".safetensors")) is not None:
            self.save(path)
        return history

    def _set_up_callbacks(
        self,
        job: Fit,
        callbacks: Sequence[Callback],
        load: Callable[[], dict[str, Any] | None],
        params: dict[str, Any],
    ) -> History:
        """Set up the chief's callbacks, and tell the job what they need; return the history."""
        self.stop_training, self.history = False, (history := History())
        make_callbacks = partial(CallbackList, [history, *callbacks], self, params)
        job.callbacks, leads = make_callbacks(), self.strategy.is_chief
        job.heed_callbacks()
        if self.strategy.replica_group.leads is not None:
            job.succession = Succession(make_callbacks, load, leads=leads)
        if not leads:
            job.callbacks = CallbackList([history], self, params)
        return history

    def _evaluate_checkpoints(
        self,
        callbacks: Sequence[Callback],
        validation: Any,
        sizes: tuple[int | None, int | None],
        steps: int | None,
    ) -> History:
        """As the evaluator task: evaluate every checkpoint."""

        def evaluate() -> dict[str, float]:
            source = inputs.to_validate_on(validation, *sizes)
            assert source is not None
            job = evaluation.Evaluation(self.module, self._compiled("fit"), source, steps)
            return dict(model_calls.everywhere(self.strategy, evaluation.evaluate, job))

        assert self.strategy.audience is not None
        over = self.strategy.audience.over
        self.history = evaluation.watch(self, callbacks, validation, evaluate, over)
        return self.history

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
        """Return the loss and metrics over every example, counted once.

        Args:
            steps: the number of batches.
            callbacks: their `on_test_...` methods are called.
            verbose: 1 for a progress bar, or a line outside of terminals and notebooks; 2 for the
                line, 0 for silence, "auto" for the bar alone.
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
        """Return the outputs for every example, in order, on the CPU.

        Arguments are as in `evaluate`; the callbacks' `on_predict_...` methods are called.
        """
        asked.whole(1, steps=steps)
        source, recipe = inputs.source_of(x, batch_size=batch_size), self.recipe_to_predict
        return self._watched(evaluation.predict, source, recipe, steps, callbacks, verbose)

    @property
    def recipe_to_predict(self) -> Recipe:
        """The recipe of `compile`, or a default one if it was not called."""
        return self.recipe or Recipe(losses.resolve("mse"), MetricSet(None))

    def _watched(
        self,
        function: Callable[[Any], Any],
        source: Source,
        recipe: Recipe,
        steps: int | None,
        callbacks: Callbacks,
        verbose: Verbosity,
    ) -> Any:
        """Run `evaluate` or `predict`, with callbacks and a progress meter on the chief."""
        tests = function is evaluation.evaluate
        known, chief = asked.fewer(source.steps, steps), self.strategy.is_chief
        given = CallbackList(asked.listed(callbacks), self, {"steps": known})
        given = given if chief else CallbackList.none()
        meter = meter_for(function.__name__, known, verbose, shown=chief)
        between = given.between_tests if tests else given.between_predictions
        job = evaluation.Evaluation(
            self.module, recipe, source, steps, meter=meter, callbacks=given, between=between
        )
        return model_calls.watched(self.strategy, function, job)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the weights (safetensors) and, in a second file, the state to continue training.

        Only the chief writes. The files load without stratagem.
        """
        if not self.strategy.is_chief:
            return files.paths(path)[0]
        progress: dict[str, Any] = {"history": dict(self.history.history) if self.history else {}}
        if self.bring_home is not None:
            progress["updates"] = self.bring_home()
        return files.save(path, self.module, self.optimizer, progress)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the weights and, once compiled, the optimizer's state from the files of `save`.

        Only the chief needs the files; it broadcasts the values when training, evaluation or
        prediction begins.
        """
        if not self.strategy.is_chief and not files.paths(path)[0].is_file():
            log.info("%s is not here; what the chief reads there comes from it later", path)
            return
        patience = 0.0 if self.strategy.is_chief else _CHIEF_WRITES
        files.load(path, self.module, self.optimizer, patience=patience)

    @property
    def loss(self) -> Any:
        """The loss as `compile` resolved it; None before."""
        return self.recipe and self.recipe.loss

    def rises(self, name: str) -> bool | None:
        """Return whether a higher value of a metric is better; None if unknown."""
        return self._compiled("fit").metrics.rises(name)

    def _compiled(self, verb: str) -> Recipe:
        if self.recipe is None:
            raise UsageError(
                f'{verb} comes after compile: model.compile(optimizer="adam", '
                'loss="cross_entropy", metrics=["accuracy"]).'
            )
        return self.recipe
