"""One call of `fit`: its settings (`Fit`), and the interface of what trains (`FitSide`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callback_states import CallbackStates
from stratagem.frontends.epoch_sums import warn_of_broken
from stratagem.frontends.evaluation import Evaluation
from stratagem.frontends.fit_journal import FitJournal, Succession
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Source
from stratagem.state.checkpoint_folder import Checkpoints
from stratagem.training import fingerprint
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings


@dataclass
class Fit:
    """Everything that one call of `fit` needs on a replica."""

    module: nn.Module
    optimizer: Optimizer
    recipe: Recipe
    settings: Settings
    source: Source
    validation: Source | None
    epochs: range
    steps_per_epoch: int | None
    generation: int
    #: on the chief only
    callbacks: CallbackList = field(default_factory=CallbackList.none)
    #: whether callbacks act between steps, so that replicas must listen there too
    between_steps: bool = False
    #: whether callbacks act around a validation, and between its batches
    around_tests: bool = False
    between_tests: bool = False
    #: whether callbacks read the optimizer's state after an epoch, so that servers send it
    wants_state: bool = False
    #: whether a script called `fit` in this process; False on a follower, which was sent the job
    by_itself: bool = True
    #: the epochs that end with a validation, and of how many batches
    validated: Collection[int] = range(sys.maxsize)
    validation_steps: int | None = None
    #: where checkpoints go, None for nowhere; whether any replica saves, so that all take part
    checkpoints: Checkpoints | None = None
    saves: bool = False
    #: whether the fit goes back to the last checkpoint when a server is lost
    goes_back: bool = False
    #: on the chief: the state to resume from
    resumed: dict[str, Any] | None = None
    #: on the chief: what callbacks were when the training began; the last checkpoint's step, time
    callback_states: CallbackStates | None = None
    last_saved: tuple[int, float] | None = None
    #: where replicas may leave and join
    journal: FitJournal | None = None
    #: where another process takes the chief's place when that dies
    succession: Succession | None = None
    #: whether SIGTERM has ended the training, after a checkpoint
    terminated: bool = False
    #: whether a loss that is not finite was told
    told_of_broken: bool = False

    def for_followers(self) -> Fit:
        """A copy without what only the chief has."""
        validation = self.validation
        return replace(
            self,
            callbacks=CallbackList.none(),
            source=self.source.for_followers(),
            validation=validation and validation.for_followers(),
            by_itself=False,
            resumed=None,
            callback_states=None,
            journal=self.journal and FitJournal(self.journal.restarts),
            succession=self.succession and Succession(),
        )

    def heed_callbacks(self) -> None:
        """Note where the callbacks act, which every replica must know."""
        given = self.callbacks
        self.between_steps, self.around_tests = given.between_steps, given.around_tests
        self.between_tests, self.wants_state = given.between_tests, given.reads_optimizer_state

    def once(self, call: str, epoch: int = -1, batch: int = -1) -> bool:
        """Whether this call of callbacks has not been made before a restart."""
        return self.journal is None or self.journal.once(call, epoch, batch)

    def done(self) -> int:
        """The number of updates."""
        return 0 if self.journal is None else self.journal.updates

    def tell_of_broken(
        self, value: float, epoch: int, step: int | None, owners: Sequence[str]
    ) -> None:
        """Warn, once a fit, that the loss is not finite."""
        if not self.told_of_broken:
            self.told_of_broken = True
            warn_of_broken(value, epoch, step, owners)

    def asked_to_end(self) -> bool:
        """Whether SIGTERM has come, so that the fit saves a checkpoint and ends."""
        return self.journal is not None and self.journal.termination.asked

    def look(self, call: str = "fit") -> fingerprint.Look:
        """The settings that must be the same on every worker."""
        found = fingerprint.of_module(self.module) | self.recipe.look()
        found |= fingerprint.of_optimizer(self.optimizer, settings=False)
        found["number of epochs"] = f"{self.epochs.stop} from {self.epochs.start} on"
        found["steps_per_epoch"] = str(self.steps_per_epoch)
        found |= self.source.look("the data")
        if self.validation is None:
            return found | {"kind of validation_data": "none"}
        when = self.validated if isinstance(self.validated, range) else sorted(self.validated)
        found |= {"validation_freq": str(when), "validation_steps": str(self.validation_steps)}
        return found | self.validation.look("validation_data")

    def test(self, source: Source) -> Evaluation:
        """A validation in mid-fit, where all replicas have the same weights."""
        return Evaluation(
            self.module,
            self.recipe,
            source,
            self.validation_steps,
            tried=not self.settings.whole_batches,
            callbacks=self.callbacks,
            between=self.between_tests,
        )


@dataclass
class Segments:
    """An epoch dealt in segments, after each of which every dealt batch is done."""

    #: whether the segment ends, given how many batches of the epoch were dealt
    ends: Callable[[int], bool] = lambda dealt: False
    #: called after a segment with the epoch and that number; says whether the training ends
    rest: Callable[[int, int], bool] = lambda epoch, dealt: False
    #: how many batches of the epoch were dealt
    dealt: int = 0
    #: segments of all epochs so far
    count: int = 0


class FitSide(Protocol):
    """The side that trains: replicas that all-reduce, or the chief of workers with servers."""

    #: where a validation runs
    tester: Replica
    #: the running loss, for batch callbacks
    tally: Any
    #: whether callbacks run here, and checkpoints are written
    is_chief: bool

    @property
    def segments(self) -> Segments | None:
        """The segments of an epoch with servers: checkpoints come between two of them."""

    @property
    def settled(self) -> bool:
        """Whether every batch so far is in the weights."""

    def begin(self, epoch: int) -> None:
        """Begin an epoch, before its callbacks."""

    def work(self, number: int, epoch: int) -> Iterator[Any]:
        """The pieces of work of the `number`-th epoch of this training."""

    def arrive(self) -> None:
        """Bring the weights home for callbacks before a batch."""

    def take(self, work: Any) -> None:
        """Train on one piece of work: gradients, commit, sync."""

    def refresh(self) -> None:
        """Bring the weights home for callbacks after a batch."""

    def listen(self, *, between: bool = False) -> bool:
        """Send what callbacks changed to all replicas; returns whether to stop. `between`: between
        two batches."""

    def after_batch(self) -> bool:
        """As `listen` after a batch, where that cannot wait for the next batch."""

    def stop(self, work: Any) -> None:
        """End the epoch early, as a callback asked; `work`, if any, is not begun."""

    def end_epoch(self, started: float) -> dict[str, Any]:
        """Average the running statistics; returns loss and metrics over all rows."""

    def note(self, epoch: int, logs: dict[str, Any]) -> None:
        """Take the complete logs of the epoch."""

    def agree(self, mine: Any, *, chiefs: bool = False) -> list[Any]:
        """Gather a value from all that run the loop, the chief first; `chiefs`: its alone."""

    def progress(self) -> dict[str, Any] | None:
        """On the chief: the state of the training beside weights and optimizer."""

    def go_on(self, saved: dict[str, Any] | None) -> None:
        """Restore what `progress` returned; only the chief has it."""
