"""The loops of `evaluate` and `predict` on every replica, and that of the evaluator task."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.errors import UsageError
from stratagem.frontends.adapter import TorchAdapter, check_rows, joined, on_cpu
from stratagem.frontends.callback_changes import Listen, heed, news
from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callbacks import Callback, History, ModelCheckpoint, TensorBoard
from stratagem.frontends.epoch_sums import LossSum
from stratagem.frontends.progress import ProgressMeter
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.row_check import RowCheck
from stratagem.frontends.sources import Portion, Source
from stratagem.state import checkpoint
from stratagem.training import fingerprint
from stratagem.training.hints import explaining
from stratagem.training.replica import Replica, current_replica
from stratagem.training.setup import align, align_loss, own_streams
from stratagem.wire.tree import broadcast_tree, gather_tree


@dataclass
class Evaluation:
    """Everything that `evaluate` and `predict` need on a replica."""

    module: nn.Module
    recipe: Recipe
    source: Source
    steps: int | None = None
    #: whether rows have been checked already, as `fit` does before it validates
    tried: bool = False
    #: these two are set on the chief only
    meter: ProgressMeter | None = None
    callbacks: CallbackList = field(default_factory=CallbackList.none)
    #: whether callbacks act between batches, so that replicas must listen there
    between: bool = False

    def asked_to_end(self) -> bool:
        """Return False: SIGTERM ends an evaluation at once, since it has nothing to save."""
        return False

    def done(self) -> int:
        """Return 0: an evaluation starts over when replicas leave or join."""
        return 0

    def for_followers(self) -> Evaluation:
        return replace(
            self,
            source=self.source.for_followers(),
            meter=None,
            callbacks=CallbackList.none(),
        )

    def look(self, call: str) -> fingerprint.Look:
        """Return the settings that must be equal on every worker."""
        found = fingerprint.of_module(self.module)
        found |= self.recipe.look() if call != "predict" else {}
        return found | {"number of steps": str(self.steps)} | self.source.look("the data")

    def portions(self, replica: Replica) -> Iterator[Portion]:
        examples = 0
        for number, portion in enumerate(islice(self.source.portions(replica, 0), self.steps), 1):
            yield portion
            examples += portion.total
            if self.meter is not None:
                self.meter.advance(number, examples)


def evaluate(job: Evaluation) -> dict[str, float]:
    """Return the loss and metrics over every example once, equal on every replica."""
    replica = current_replica()
    job.module.to(replica.device)
    job.recipe.metrics.to(replica.device)
    align(job.module, replica)
    align_loss(job.recipe.loss, replica)
    with own_streams(replica, renew=True):
        return evaluate_here(job, replica, _listener(job, replica))


def _listener(job: Evaluation, replica: Replica) -> Listen:
    """Return the function that applies callbacks' changes between two batches. Collective."""
    # the scripts of other workers may have other callbacks, or none
    job.between = bool(broadcast_tree(replica.collective, job.between))
    changes = job.callbacks.changes
    changes.alone = replica.count == 1

    def listen() -> None:
        mine = None
        if replica.is_chief:
            changes.check_layout()
            mine = news(job, written=bool(changes.written()))
        heed(job, replica, broadcast_tree(replica.collective, mine))

    return listen


def _shares(
    job: Evaluation, replica: Replica, listen: Listen, verb: str
) -> Iterator[tuple[int, Portion]]:
    """Yield this replica's numbered shares, with callbacks before each and listening between."""
    check = RowCheck(job.module, job.recipe, replica, verb)
    check.open = check.open and not job.tried
    if job.between:
        job.callbacks.changes.mark()
    for number, portion in enumerate(job.portions(replica)):
        if job.between:
            hook = "test" if verb == "evaluate" else "predict"
            job.callbacks.call(f"{hook}_batch_begin", number)
            listen()
        if check.open:
            check.before(portion)
        yield number, portion
        check.after()
    if job.between:
        listen()  # for changes after the last batch


@torch.no_grad()
def evaluate_here(job: Evaluation, replica: Replica, listen: Listen) -> dict[str, float]:
    """Evaluate on replicas that have the same weights."""
    metrics = job.recipe.metrics
    job.module.eval()
    metrics.reset()
    adapter = TorchAdapter(job.module, None, job.recipe, replica)
    sums, tally = [], LossSum()
    for number, portion in _shares(job, replica, listen, "evaluate"):
        sums.append([*_losses(adapter, portion), float(portion.total)])
        if job.between:
            tally.add(_mean_loss(sums[-1:], replica), portion.total)
            job.callbacks.call("test_batch_end", number, tally=tally)
    if not sums:
        raise UsageError(
            "the data to evaluate (or validation_data) has no batch: it is empty, or a generator "
            "that an earlier pass has used up; give something that can be iterated again: arrays, "
            "a DataLoader, a list of batches."
        )
    results = {"loss": _mean_loss(sums, replica), **metrics.compute(replica)}
    metrics.reset()
    return results


def _losses(adapter: TorchAdapter, portion: Portion) -> tuple[float, float]:
    """Return numerator and denominator of this share's loss, and update the metrics."""
    recipe = adapter.recipe
    if portion.examples == 0:
        return 0.0, 0.0
    with explaining(portion.examples, portion.total), adapter.autocast():
        output, y, weight = adapter.forward(portion)
        numerator, denominator = recipe.loss.terms(output, y, weight, portion.examples)
    if recipe.metrics:
        recipe.metrics.update(output, y, part=portion.examples < portion.total)
    if denominator is None:
        denominator = portion.examples / portion.total
    return float(numerator), float(denominator)


def _mean_loss(sums: list[list[float]], replica: Replica) -> float:
    """Average the losses of global batches, weighted by their examples, as one device does."""
    gathered = gather_tree(replica.collective, torch.tensor(sums, dtype=torch.float64))
    added = torch.stack(gathered).sum(0)
    totals = torch.tensor([row[2] for row in sums], dtype=torch.float64)
    return float((added[:, 0] / added[:, 1] * totals).sum() / totals.sum())


@torch.no_grad()
def predict(job: Evaluation) -> Any:
    """Return the outputs for every example, in order, on the CPU."""
    replica = current_replica()
    job.module.to(replica.device)
    align(job.module, replica)
    job.module.eval()
    listen = _listener(job, replica)
    with own_streams(replica, renew=True):
        mine = _own_outputs(job, replica, listen)
    gathered = gather_tree(replica.collective, mine)
    return _join_shares([part for batch in zip(*gathered, strict=True) for part in batch], replica)


def _join_shares(parts: list[Any], replica: Replica) -> Any:
    """Join the outputs of shares, in order."""
    ordered = [part for part in parts if part is not None]
    found = [output for output, _ in ordered]
    if replica.count > 1 and found:
        check_rows(found, [examples for _, examples in ordered])
    return joined(found)


def _own_outputs(job: Evaluation, replica: Replica, listen: Listen) -> list[Any]:
    """Return [outputs, rows] for each of this replica's shares; None for an empty share."""
    adapter = TorchAdapter(job.module, None, job.recipe, replica)
    mine: list[Any] = []
    for number, portion in _shares(job, replica, listen, "predict"):
        mine.append(_own_output(adapter, portion))
        if number == 0 and mine[0] is not None and replica.count > 1:  # before computing all others
            check_rows([mine[0][0]], [portion.examples])
        if job.between:
            gathered = gather_tree(replica.collective, mine[-1])
            logs = {"outputs": _join_shares(gathered, replica)}
            job.callbacks.call("predict_batch_end", number, logs)
    return mine


def _own_output(adapter: TorchAdapter, portion: Portion) -> Any:
    if portion.examples == 0:
        return None
    with explaining(portion.examples, portion.total), adapter.autocast():
        return [on_cpu(adapter.forward(portion)[0]), portion.examples]


# --- the evaluator: evaluates every checkpoint that the chief writes ------------------------------
#
# The evaluator runs the same script as the other tasks. Its `fit` uses three of the arguments: the
# path of ModelCheckpoint, the validation data, and the folder of TensorBoard.


log = logging.getLogger("stratagem")

_PAUSE = 0.2  # seconds between two scans of the folder
_FIELD = re.compile(r"\{[^{}]*\}")
NEEDS = (
    "this task is the evaluator: it evaluates the checkpoints that the chief writes, so fit needs "
    "a ModelCheckpoint among its callbacks, and validation_data."
)


def watch(
    model: Any,
    callbacks: Sequence[Callback],
    validation: Any,
    evaluate: Callable[[], Any],
    over: Callable[[], bool],
) -> History:
    """Evaluate every checkpoint when it appears, until the job is over and the last one is done.

    The history has these results, and the chief's own history from its last checkpoint.
    """
    saver = next((c for c in callbacks if isinstance(c, ModelCheckpoint)), None)
    if saver is None or validation is None:
        raise UsageError(NEEDS)
    boards = [c for c in callbacks if isinstance(c, TensorBoard)]
    for board in boards:
        board.log_dir = str(Path(board.log_dir) / "evaluator")
        board.on_train_begin()
    history, progress = History(), dict[str, Any]()
    for path, updates in new_files(checkpoint.paths(saver.path)[0], over):
        progress = checkpoint.load(path, model.module, model.optimizer)
        step = int(progress.get("updates", updates))
        logs = {f"val_{name}": value for name, value in evaluate().items()}
        log.info("%s: %s", path.name, logs)
        for each in (history, *boards):
            each.on_epoch_end(step, logs)
    for board in boards:
        board.on_train_end()
    history.history = {**progress.get("history", {}), **history.history}
    return history


def new_files(pattern: Path, over: Callable[[], bool]) -> Iterator[tuple[Path, int]]:
    """Yield new and changed files with a running number, until the job is over and none is new.

    `pattern` may have fields such as {epoch}, which match anything.
    """
    name = _FIELD.sub("*", pattern.name)
    folder = Path(_FIELD.sub("*", str(pattern.parent)))
    known: dict[Path, tuple[int, int]] = {}
    number = 0
    while True:
        ended = over()
        found = sorted((stamp(path), path) for path in _glob(folder, name))
        fresh = [(seen, path) for seen, path in found if known.get(path) != seen]
        for seen, path in fresh:
            known[path] = seen
            number += 1
            yield path, number
        if ended and not fresh:
            return
        if not fresh:
            time.sleep(_PAUSE)


def stamp(path: Path) -> tuple[int, int]:
    """Return the modification time and size of a file, which change with its content."""
    seen = path.stat()
    return seen.st_mtime_ns, seen.st_size


def _glob(folder: Path, name: str) -> list[Path]:
    root = Path(folder.anchor)  # a glob pattern is relative to its folder
    return list(root.glob(str((folder / name).relative_to(root))))
