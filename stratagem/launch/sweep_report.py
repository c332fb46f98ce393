"""What came of a sweep: its last lines, its table, and mistakes that every trial would repeat."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from stratagem.launch.sweep_folder import SweepFolder
from stratagem.launch.sweep_settings import SweepSettings
from stratagem.launch.sweep_study import SweepStudy

_UNKNOWN = "unrecognized arguments: "  # as argparse says it


def summary(settings: SweepSettings, folder: SweepFolder, study: SweepStudy) -> list[str]:
    """How the trials ended, and the best of them."""
    ranked, ended = study.ranked(), study.ended()
    counts = Counter(each.state for each in ended)
    told = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    lines = [f"{len(ended)} of {settings.trials} trials ended: {told or 'none'}"]
    for place, each in enumerate(ranked[: max(1, settings.keep)], 1):
        words = " ".join(f"{flag} {value}" for flag, value in study.flags(each.number).items())
        kept = f"  {folder.trial(each.number)}" if place <= settings.keep else ""
        lines.append(f"{place}. {settings.metric} {each.value:.6g}  {words}{kept}")
    return lines


def write_table(settings: SweepSettings, folder: SweepFolder, study: SweepStudy) -> None:
    """The outcome of every trial, for spreadsheets."""
    best, rows = [each.number for each in study.ranked()][: settings.keep], []
    for each in study.ended():
        flags = study.flags(each.number).values()
        rows.append((each.number, each.state, each.value, each.number in best, *flags))
    names = [axis.flag for axis in settings.space[0]]
    folder.write_table(["trial", "state", settings.metric, "kept", *names], rows)


def without_metric(settings: SweepSettings, number: int, names: Sequence[str]) -> str:
    """The first trial to end has written these, and not the metric that decides."""
    metric, script = settings.metric, settings.script
    if not names:
        return (
            f"trial {number} of {script} has ended without writing any metric; its fit must be "
            f"that of an sg.Model, or of a Keras model in a scope, or append lines as "
            f'{{"{metric}": 0.9}} to $STRATAGEM_TRIAL/metrics.jsonl'
        )
    near = difflib.get_close_matches(metric, names, 1)
    meant = f"; --metric {near[0]}?" if near else ""
    return f"{script} writes no {metric}; it writes {', '.join(names)}{meant}"


def unknown_flag(settings: SweepSettings, last_line: str, options: Sequence[str]) -> str:
    """The sentence for a flag that a script's parser has refused; "" if it has refused none."""
    _, found, flags = last_line.partition(_UNKNOWN)
    if not found:
        return ""
    flag = flags.split()[0].partition("=")[0]
    near = difflib.get_close_matches(flag, options, 1)
    meant = f", or was {near[0]} of the sweep meant?" if near else ", or leave it out"
    return f"{settings.script} has no flag {flag}; add it there{meant}"
