"""The loop of a sweep: asks for trials, runs them in slots, writes how they ended.

Only this process writes to the journal, and writes that a trial has ended once none of its
processes is left. A trial without an end, because this process died, is run again under its number
when the sweep goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence

from stratagem.errors import UsageError
from stratagem.figures.trial_record import VARIABLE, read_epochs
from stratagem.launch.supervise import SignalQueue, ending
from stratagem.launch.sweep_folder import LOG, SweepFolder, SweepSettings
from stratagem.launch.sweep_study import SweepStudy
from stratagem.launch.sweep_view import (
    SweepView,
    TrialRow,
    summary,
    unknown_flag,
    without_metric,
    write_table,
)
from stratagem.launch.trial_places import TrialSlots
from stratagem.training.termination import EXIT_CODE

_TICK = 0.1
_LOOK = 0.5  # seconds between two looks at the metrics of running trials
_GRACE = 5.0
_TRIES = 2  # of a trial that is killed from outside


class SweepLoop:
    """One process's work on a sweep, from its beginning or from where it was."""

    def __init__(
        self,
        settings: SweepSettings,
        folder: SweepFolder,
        runner: TrialSlots,
        options: Sequence[str] = (),
    ) -> None:
        """`options`: flags of the command, to suggest for a misspelt one."""
        self._settings, self._folder, self._options = settings, folder, options
        self.study = SweepStudy(settings, folder)
        self._runner = runner
        self._todo = self.study.unfinished()
        self._again = set(self._todo)
        self._tries: Counter[int] = Counter()
        self._pruned: set[int] = set()
        self._looked = 0.0
        self.stopped: signal.Signals | None = None
        self.view = SweepView(settings.metric, settings.larger, settings.trials, runner.count)

    def run(self) -> None:
        """Return when every trial has ended, or the signal `stopped` has ended them."""
        for each in self.study.ended():
            self.view.rows[each.number] = TrialRow(**vars(each))
        with SignalQueue() as inbox, self._runner, self.view:
            self._keep()
            while True:
                while inbox.arrived:
                    self._stop(inbox.arrived.popleft())
                self._fill()
                if not self._runner.running:
                    break
                for number, code in self._runner.collect(_TICK):
                    self._take(number, code)
                self._look()
        write_table(self._settings, self._folder, self.study)

    # --- beginning ------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self.stopped is None and self._runner.free:
            if self._todo:
                self._start(self._todo.pop(0))
            elif self.study.count() < self._settings.trials:
                self._start(self.study.ask())
            else:
                return

    def _start(self, number: int) -> None:
        flags, folder = self.study.flags(number), self._folder.trial(number)
        if number in self._again and not self._tries[number]:
            found = self._runner.find(number, folder)
            if found is not None:
                self._tries[number] += 1
                self.view.began(TrialRow(number, flags, folder, slot=found.number), again=False)
                return
        _, fixed = self._settings.space
        ranged = [word for flag, value in flags.items() for word in (flag, value)]
        if any(value.startswith("-") for value in flags.values()):  # a negative number is no flag
            ranged = [f"{flag}={value}" for flag, value in flags.items()]
        command = [*self._settings.command, *fixed, *ranged]
        self._folder.clear(number, {"trial": number, "flags": flags, "command": command})
        environ = os.environ | {VARIABLE: str(folder.absolute())}
        slot = self._runner.start(number, command, environ, folder / LOG)
        self._tries[number] += 1
        again = number in self._again or self._tries[number] > 1
        self.view.began(TrialRow(number, flags, folder, slot=slot.number), again)

    # --- on the way -----------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the metrics of running trials; end those that are pruned."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        for number in self._runner.running:
            self._follow(number)
            if self._settings.prune and self.stopped is None and self._is_behind(number):
                self._pruned.add(number)
                self._runner.stop(number, signal.SIGTERM, _GRACE)
        self.view.refresh()

    def _follow(self, number: int) -> None:
        row, curve = self.view.rows[number], self._curve(number)
        row.epoch, row.value = len(curve), curve[-1] if curve else None

    def _curve(self, number: int) -> list[float | None]:
        """The metric after each epoch so far, in those lines that have it."""
        try:
            lines = read_epochs(self._folder.trial(number))
        except ValueError as flaw:
            self._give_up(f"trial {number} of {self._settings.script}: {flaw}")
            return []
        return [line[self._settings.metric] for line in lines if self._settings.metric in line]

    def _is_behind(self, number: int) -> bool:
        """Report a trial's epochs so far; whether it is to be pruned."""
        return self.study.report(number, self._curve(number)) and number not in self._pruned

    def _stop(self, number: signal.Signals) -> None:
        if self.stopped is None:
            self.view.say(f"{number.name}: ending {len(self._runner.running)} trials.")
        self.stopped = self.stopped or number
        for each in self._runner.running:
            self._runner.stop(each, number, _GRACE)

    # --- the end of a trial ---------------------------------------------------------------------

    def _take(self, number: int, code: int) -> None:
        """Write how a trial ended, unless a signal ended it or it is run again."""
        self._follow(number)
        if number in self._pruned:
            self.study.tell_pruned(number)
            self.view.ended(
                number, "pruned", "behind three quarters of the complete ones at this epoch"
            )
            self._folder.drop_models([number])
        elif self.stopped is not None:
            self.view.rows.pop(number)
        elif code == 0:
            self._complete(number)
        elif (code < 0 or code == EXIT_CODE) and self._tries[number] < _TRIES:
            self.view.say(f"trial {number} was {ending(code)}, and is run again.")
            self._todo.insert(0, number)
        else:
            last = self._folder.last_line(number)
            wrong = unknown_flag(self._settings, last, self._options)
            if code == 2 and wrong:
                self._give_up(wrong)
            self._fail(number, f"{ending(code)}; its last line: {last[:200]}")

    def _complete(self, number: int) -> None:
        metric, curve = self._settings.metric, self._curve(number)
        if not curve:
            lines = read_epochs(self._folder.trial(number))
            names = sorted({name for line in lines for name in line} - {"epoch"})
            self._give_up(without_metric(self._settings, number, names))
            self._fail(number, f"it wrote no {metric}")
        elif curve[-1] is None:
            self._fail(number, f"{metric} was not a finite number in the end")
        else:
            if self._settings.prune:  # others are compared with the whole curve
                self.study.report(number, curve)
            self.study.tell(number, curve[-1])
            self.view.ended(number, "done")
            self._keep()

    def _fail(self, number: int, why: str) -> None:
        self.study.tell_failed(number)
        self._folder.drop_models([number])
        self.view.ended(number, "failed", why)

    def _keep(self) -> None:
        """Remove the models of trials that are not among the best."""
        ranked = self.study.ranked()
        self._folder.drop_models(each.number for each in ranked[self._settings.keep :])

    def _give_up(self, why: str) -> None:
        """End the sweep for a mistake that every trial would repeat, unless a trial is complete.

        The folder may then be used for another sweep."""
        if self.study.ranked():
            return
        for number in self._runner.running:
            self._runner.stop(number, signal.SIGTERM, 0.0)
        while self._runner.running:
            self._runner.collect(_TICK)
        self._folder.forget()
        raise UsageError(why)

    @property
    def complete(self) -> int:
        """How many trials are complete."""
        return len(self.study.ranked())

    def summary(self) -> list[str]:
        """The result, in lines."""
        return summary(self._settings, self.study)
