"""The study of a sweep: parsed ranges, values by trial number, slots, pruned curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from stratagem.errors import UsageError
from stratagem.launch.sweep_folder import (
    Choices,
    NumberRange,
    SweepFolder,
    SweepSettings,
    check_flags,
    grid,
    read,
)
from stratagem.launch.sweep_study import SweepStudy, pruner
from stratagem.launch.sweep_view import SweepView, TrialRow, in_words, time_left
from stratagem.launch.trial_places import slots

pytestmark = pytest.mark.timeout(60)

SETTINGS = SweepSettings(
    command=("python", "train.py"),
    words=("--lr", "1e-4..1e-1:log", "--depth", "2..6", "--drop", "0..0.5", "--act", "relu,tanh"),
    metric="val_loss",
    larger=False,
    trials=8,
    keep=3,
    replicas=1,
    sampler="random",
    seed=3,
    prune=False,
    where="/",
)


# --- ranges -----------------------------------------------------------------------------------


def test_ranges_lists_and_plain_values() -> None:
    words = "data --lr 1e-4..1e-1:log --depth=2..6 --act relu,tanh --dir ../a --shift -1..1 -v"
    axes, fixed = read([*words.split(), "--", "--range", "1..2"])
    assert axes == [
        NumberRange("--lr", 1e-4, 1e-1, log=True, whole=False),
        NumberRange("--depth", 2, 6, log=False, whole=True),
        Choices("--act", ("relu", "tanh")),
        NumberRange("--shift", -1, 1, log=False, whole=True),
    ]
    assert fixed == ["data", "--dir", "../a", "-v", "--range", "1..2"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_every_pair_of_numbers_is_read_as_it_is(low: float, width: float) -> None:
    high = low + width
    (axis,), fixed = read(["--x", f"{low!r}..{high!r}"])
    assert isinstance(axis, NumberRange) and not fixed
    assert (axis.low, axis.high, axis.whole) == (low, high, False)


@given(st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=4, unique=True), max_size=3))
def test_a_grid_has_every_combination_once(lists: list[list[int]]) -> None:
    axes = [Choices(f"--p{n}", tuple(map(str, each))) for n, each in enumerate(lists)]
    points = [tuple(point.values()) for point in grid(axes)]
    size = 1
    for each in lists:
        size *= len(each)
    assert len(points) == len(set(points)) == size


def test_settings_survive_their_file() -> None:
    assert SweepSettings.from_json(SETTINGS.to_json(), Path("x")) == SETTINGS
    with pytest.raises(UsageError, match="x is not what a sweep writes"):
        SweepSettings.from_json('{"a": 1}', Path("x"))


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ('parser = ArgumentParser(); parser.add_argument("--batch-size")', True),
        ("import fire\ndef train(batch_size): ...", True),
        ("from mine import parser\nargs = parser.parse_args()", True),  # the first trial tells
        ('parser = ArgumentParser(); parser.add_argument("--lr")', False),
        ("print(1)", False),
    ],
)
def test_a_flag_that_nobody_reads(tmp_path: Path, text: str, known: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    axes = [Choices("--batch-size", ("1", "2"))]
    if known:
        check_flags(tmp_path / "train.py", axes)
    else:
        with pytest.raises(UsageError, match=r"train.py has no flag --batch-size"):
            check_flags(tmp_path / "train.py", axes)


# --- trials -----------------------------------------------------------------------------------


def study_in(folder: Path, settings: SweepSettings = SETTINGS) -> SweepStudy:
    folder.mkdir(exist_ok=True)
    return SweepStudy(settings, SweepFolder(folder))


def test_values_follow_from_the_number_alone(tmp_path: Path) -> None:
    study = study_in(tmp_path / "a")
    at_once = [study.flags(study.ask()) for _ in range(8)]
    parts = []
    for _ in range(8):  # a process each, which tells what it asked for
        again = study_in(tmp_path / "b")
        number = again.ask()
        parts.append(again.flags(number))
        again.tell(number, float(number))
    assert at_once == parts
    assert len({json.dumps(flags) for flags in at_once}) == 8
    for flags in at_once:
        assert 1e-4 <= float(flags["--lr"]) <= 1e-1 and int(flags["--depth"]) in range(2, 7)
        assert 0 <= float(flags["--drop"]) <= 0.5 and flags["--act"] in ("relu", "tanh")


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_trial_is_in_the_journal_with_its_values_or_not_at_all(
    tmp_path: Path, sampler: str
) -> None:
    """The process may be killed after any line of the journal."""
    settings = replace(SETTINGS, sampler=sampler)
    whole = study_in(tmp_path / "whole", settings)
    before = len((tmp_path / "whole" / "journal").read_text().splitlines())
    expected = [whole.flags(whole.ask()) for _ in range(3)]
    text = (tmp_path / "whole" / "journal").read_text().splitlines(keepends=True)
    assert len(text) == before + 3
    for count in range(4):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        (folder / "journal").write_text("".join(text[: before + count]))
        study = study_in(folder, settings)
        assert study.unfinished() == list(range(count))
        asked = [study.ask() for _ in range(count, 3)]
        assert [study.flags(each) for each in [*range(count), *asked]] == expected


def test_the_best_first_and_of_equals_the_first(tmp_path: Path) -> None:
    for larger, order in ((False, [1, 2, 0]), (True, [0, 1, 2])):
        study = study_in(tmp_path / f"{larger}", replace(SETTINGS, larger=larger))
        for value in (2.0, 1.0, 1.0):
            study.tell(study.ask(), value)
        study.tell_failed(study.ask())
        assert [each.number for each in study.ranked()] == order
        assert [each.state for each in study.ended()] == ["done"] * 3 + ["failed"]


# --- slots ------------------------------------------------------------------------------------


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 64), st.none() | st.integers(1, 9))
def test_no_gpu_is_dealt_twice(count: int, replicas: int, cores: int, asked: int | None) -> None:
    gpus = [str(number) for number in range(count)]
    if (asked or 1) * replicas > count:
        with pytest.raises(UsageError, match=r"a trial needs|no GPU is shared"):
            slots(asked, replicas, gpus, cores)
        return
    made = slots(asked, replicas, gpus, cores)
    dealt = [gpu for slot in made for gpu in slot.gpus]
    assert len(dealt) == len(set(dealt)) == replicas * len(made)
    assert len(made) == (asked or count // replicas)
    assert {slot.threads for slot in made} == {max(1, cores // count)}


def test_slots_of_processors() -> None:
    assert len(slots(None, 1, [], 4)) == 4 and len(slots(None, 3, [], 4)) == 1
    assert len(slots(7, 1, [], 4)) == 7  # processors can be shared
    assert slots(1, 1, [], 4)[0].threads == slots(4, 1, [], 4)[0].threads
    with pytest.raises(UsageError, match=r"a trial needs 5 devices, and here are 4 processors"):
        slots(None, 5, [], 4)


# --- the view ---------------------------------------------------------------------------------


def test_time_left() -> None:
    assert time_left([], [3.0], 5, 2) is None
    assert time_left([10.0, 20.0], [5.0, 20.0], 4, 2) == (4 * 15 + 10) / 2
    assert [in_words(n) for n in (40, 200, 9000)] == ["40 s", "3 min", "2.5 h"]


def test_a_table_on_a_terminal(tmp_path: Path) -> None:
    from io import StringIO

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with SweepView("val_loss", False, 3, 2, stream) as view:
        for number in range(2):
            row = TrialRow(number, {"--lr": "0.0123456789"}, tmp_path, slot=number)
            view.began(row, again=False)
        view.rows[0].value = 0.25
        view.ended(0, "done")
        view.refresh()
    text = stream.getvalue()
    assert "1 of 3 ended, best 0.25 (trial 0), about" in text
    assert "0.0123457" in text and "slot 1" in text and "val_loss" in text


# --- pruning ----------------------------------------------------------------------------------

#: validation accuracy of 20 networks on digits: rates of 1e-4 to 1, 8 to 64 units, 8 epochs
CURVES = [
    [0.816, 0.879, 0.861, 0.763, 0.892, 0.884, 0.94, 0.924],
    [0.154, 0.161, 0.164, 0.169, 0.174, 0.176, 0.176, 0.181],
    [0.257, 0.547, 0.733, 0.796, 0.856, 0.882, 0.892, 0.892],
    [0.136, 0.086, 0.106, 0.108, 0.108, 0.103, 0.103, 0.101],
    [0.353, 0.705, 0.831, 0.846, 0.894, 0.897, 0.919, 0.94],
    [0.257, 0.37, 0.552, 0.685, 0.809, 0.902, 0.909, 0.929],
    [0.065, 0.06, 0.073, 0.081, 0.093, 0.096, 0.106, 0.123],
    [0.572, 0.866, 0.897, 0.922, 0.94, 0.937, 0.952, 0.942],
    [0.408, 0.285, 0.176, 0.199, 0.179, 0.285, 0.277, 0.292],
    [0.63, 0.292, 0.305, 0.156, 0.103, 0.101, 0.096, 0.108],
    [0.66, 0.584, 0.433, 0.388, 0.378, 0.395, 0.38, 0.398],
    [0.131, 0.134, 0.139, 0.139, 0.146, 0.146, 0.156, 0.156],
    [0.892, 0.907, 0.889, 0.887, 0.914, 0.922, 0.859, 0.924],
    [0.292, 0.544, 0.695, 0.741, 0.753, 0.763, 0.791, 0.804],
    [0.103, 0.116, 0.121, 0.128, 0.136, 0.146, 0.151, 0.161],
    [0.113, 0.242, 0.388, 0.547, 0.637, 0.708, 0.743, 0.758],
    [0.781, 0.874, 0.836, 0.683, 0.814, 0.831, 0.756, 0.725],
    [0.577, 0.778, 0.846, 0.882, 0.889, 0.924, 0.919, 0.927],
    [0.166, 0.209, 0.264, 0.325, 0.433, 0.526, 0.602, 0.647],
    [0.383, 0.315, 0.365, 0.368, 0.363, 0.363, 0.363, 0.375],
]


def pruned_of(
    curves: Sequence[Sequence[float]], larger: bool, keep: int
) -> tuple[list[int], list[int]]:
    """Return the recorded curves that pruning would have ended, and those among the `keep` best.

    The curves come one after another.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if larger else "minimize", pruner=pruner())
    ended = []
    for number, curve in enumerate(curves):
        trial = study.ask()
        for epoch, value in enumerate(curve, 1):
            trial.report(value, epoch)
            if trial.should_prune():
                ended.append(number)
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, curve[-1])
    sign = -1.0 if larger else 1.0
    best = sorted(range(len(curves)), key=lambda n: (sign * curves[n][-1], n))[:keep]
    return ended, [number for number in ended if number in best]


def test_what_pruning_costs_on_recorded_curves() -> None:
    """The numbers of docs/sweep.md."""
    ended, lost = pruned_of(CURVES, larger=True, keep=5)
    assert len(ended) == 6 and lost == []
    falling = [[1 - value for value in curve] for curve in CURVES]
    assert pruned_of(falling, larger=False, keep=5) == (ended, lost)
    late = [[0.5] * 8] * 5 + [[0.1] * 7 + [0.9]]
    assert pruned_of(late, larger=True, keep=1) == ([5], [5])  # what it cannot know
