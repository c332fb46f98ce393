"""One call of `fit`: what it is given, and what it asks of those who train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from stratagem.frontends.callback_list import CallbackList
from stratagem.frontends.callback_states import CallbackStates
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
    #: the same around a validation, and between its batches
    around_tests: bool = False
    between_tests: bool = False
    #: whether callbacks read the optimizer's state at the end of an epoch, which servers then send
    wants_state: bool = False
    #: whether this is the call of a script, not what another process was sent of it
    by_itself: bool = True
    #: the epochs that end with a validation, and of how many batches
    validated: Collection[int] = range(sys.maxsize)
    validation_steps: int | None = None
    #: where checkpoints go, if anywhere; whether all take part in them
    checkpoints: Checkpoints | None = None
    saves: bool = False
    #: whether it goes back to the last of them, in the same processes, where a server is lost
    goes_back: bool = False
    #: on the chief: what to go on from
    resumed: dict[str, Any] | None = None
    #: on the chief: what callbacks were when the training began; the last checkpoint's step, time
    callback_states: CallbackStates | None = None
    last_saved: tuple[int, float] | None = None
    #: where replicas may leave and join
    journal: FitJournal | None = None
    #: where another process takes the chief's place when that dies
    succession: Succession | None = None
    #: whether SIGTERM has ended the training, of which a checkpoint was made
    terminated: bool = False

    def for_followers(self) -> Fit:
        """The same without what only the chief has."""
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
        """Note what every replica must know of the callbacks."""
        given = self.callbacks
        self.between_steps, self.around_tests = given.between_steps, given.around_tests
        self.between_tests, self.wants_state = given.between_tests, given.reads_optimizer_state

    def once(self, call: str, epoch: int = -1, batch: int = -1) -> bool:
        """Whether this call of callbacks is still to be made."""
        return self.journal is None or self.journal.once(call, epoch, batch)

    def done(self) -> int:
        """How many updates were made."""
        return 0 if self.journal is None else self.journal.updates

    def asked_to_end(self) -> bool:
        """Whether SIGTERM has come, so that only a checkpoint is left to be made."""
        return self.journal is not None and self.journal.termination.asked

    def look(self, call: str = "fit") -> fingerprint.Look:
        """What must be the same on every worker."""
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
        """A validation on the way, with weights that are alike already."""
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
    """An epoch that is dealt in pieces, after each of which all that was dealt is done."""

    #: whether no more is dealt for now, given how many batches of the epoch are
    ends: Callable[[int], bool] = lambda dealt: False
    #: called after a segment with the epoch and that number; says whether the training ends
    rest: Callable[[int, int], bool] = lambda epoch, dealt: False
    #: that number
    dealt: int = 0
    #: segments of all epochs so far
    count: int = 0


class FitSide(Protocol):
    """What differs between replicas that all-reduce and workers of servers."""

    #: where a validation runs
    tester: Replica
    #: what batch callbacks see of the loss so far
    tally: Any
    #: whether it has the callbacks, and writes checkpoints
    is_chief: bool

    @property
    def segments(self) -> Segments | None:
        """Where work is dealt: its segments, between which alone a checkpoint can be made."""

    @property
    def settled(self) -> bool:
        """Whether everything that was trained on is in the weights."""

    def begin(self, epoch: int) -> None:
        """An epoch begins; its callbacks come next."""

    def work(self, number: int, epoch: int) -> Iterator[Any]:
        """What is to be done in the `number`-th epoch of this training, piece by piece."""

    def arrive(self) -> None:
        """Callbacks look at the weights before a batch."""

    def take(self, work: Any) -> None:
        """Train on one piece of work: gradients, commit, sync."""

    def refresh(self) -> None:
        """Callbacks look at the weights after a batch."""

    def listen(self, *, between: bool = False) -> bool:
        """Have everybody follow what callbacks changed here; returns whether to stop. `between`:
        two batches."""

    def after_batch(self) -> bool:
        """The same once a batch is done, where it cannot wait for the next one."""

    def stop(self, work: Any) -> None:
        """A callback ends the training in mid-epoch; `work`, if any, is not begun."""

    def end_epoch(self, started: float) -> dict[str, Any]:
        """Loss and metrics over everybody's rows; running statistics become one."""

    def note(self, epoch: int, logs: dict[str, Any]) -> None:
        """The epoch's logs are complete."""

    def agree(self, mine: Any, *, chiefs: bool = False) -> list[Any]:
        """What each of those who run the loop says, the chief's first; or what it says alone."""

    def progress(self) -> dict[str, Any] | None:
        """On the chief: what those who train have, beside the weights and the optimizer."""

    def go_on(self, saved: dict[str, Any] | None) -> None:
        """Go on from what `progress` returned, which the chief has."""
