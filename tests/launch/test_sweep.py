"""`stratagem sweep`: the same trials for any number at once, none lost, doubled or left over."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from stratagem.launch import cli
from tests.clock import SLOWER, wait_for

sys.path.insert(0, str(Path(__file__).parent))
from run_processes import alive

pytestmark = pytest.mark.timeout(90)

#: a training of no time: it says who it is, waits, and writes metrics and a model
TRAIN = """
import argparse, json, os, pathlib, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--units", type=int, default=8)
parser.add_argument("--wait", type=float, default=0.1)
args = parser.parse_args()
folder = pathlib.Path(os.environ["STRATAGEM_TRIAL"])
number = int(folder.name.split("-")[1])
def note(file, *words):
    with open(pathlib.Path(__file__).resolve().parent / file, "a") as out:
        print(*words, file=out, flush=True)
def epoch(**numbers):
    note(folder / "metrics.jsonl", json.dumps(numbers))
began = time.time()
note("runs", number, os.getpid())
{extra}
time.sleep(args.wait)
epoch(loss=1.0, val_accuracy=0.1)
epoch(loss=0.5, val_accuracy=args.lr * 5 + args.units / 1000)
(folder / "model.txt").write_text(str(args.lr))
note("spans", number, began, time.time(), os.environ.get("CUDA_VISIBLE_DEVICES"))
"""

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write train.py into a new folder, and change to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def write(extra: str = "") -> None:
        (tmp_path / "train.py").write_text(TRAIN.replace("{extra}", extra))

    write()
    return write


def sweep(*words: str, out: str = "out") -> int:
    space = ["--lr", "1e-3..1e-1:log", "--units", "8,16", "--metric", "val_accuracy:max"]
    return cli.main(["sweep", "train.py", *space, "--out", out, *words])


def table(out: str = "out") -> list[dict[str, str]]:
    with open(f"{out}/trials.csv") as file:
        return list(csv.DictReader(file))


def models(out: str = "out") -> list[str]:
    return sorted(path.parent.name for path in Path(out).glob("*/model*"))


def ran() -> Counter[int]:
    """Return how often each trial was begun."""
    return Counter(int(line.split()[0]) for line in Path("runs").read_text().splitlines())


def most_at_once() -> int:
    spans = [line.split() for line in Path("spans").read_text().splitlines()]
    edges = sorted(
        edge for _, began, ended, *_ in spans for edge in ((float(began), 1), (float(ended), -1))
    )
    levels = [sum(step for _, step in edges[: n + 1]) for n in range(len(edges))]
    return max(levels)


# --- the same trials ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_one_slot_and_three_give_the_same(write: Write, sampler: str) -> None:
    space = ["--lr", "0.01,0.05,0.02"] if sampler == "grid" else ["--lr", "1e-3..1e-1:log"]
    tables = []
    for slots in (1, 3):
        Path("spans").unlink(missing_ok=True)
        words = [*space, "--units", "8,16", "--metric", "val_accuracy:max", "--wait", "0.3"]
        words += ["--trials", "6", "--keep", "2", "--sampler", sampler, "--seed", "5"]
        code = cli.main(["sweep", "train.py", *words, "--slots", str(slots), "--out", f"{slots}"])
        assert code == 0
        assert most_at_once() <= slots and (most_at_once() > 1) == (slots > 1)
        tables.append(table(str(slots)))
    assert tables[0] == tables[1]
    best = sorted(tables[0], key=lambda row: -float(row["val_accuracy"]))[:2]
    assert models("1") == models("3") == sorted(f"trial-{int(row['trial']):03d}" for row in best)
    assert len({(row["--lr"], row["--units"]) for row in tables[0]}) == 6


def test_another_seed_gives_other_trials(write: Write) -> None:
    for seed in "1", "2":
        assert sweep("--trials", "2", "--seed", seed, "--slots", "2", "--wait", "0", out=seed) == 0
    assert {row["--lr"] for row in table("1")}.isdisjoint(row["--lr"] for row in table("2"))


def test_everything_of_a_trial_is_in_its_folder(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write('print("hello"); print("there", file=sys.stderr)')
    assert sweep("--trials", "1", "--sampler", "tpe", "--", "--wait", "0") == 0
    folder = Path("out/trial-000")
    found = {path.name for path in folder.iterdir()}
    assert found == {"args.json", "files", "log", "metrics.jsonl", "model.txt"}
    args = json.loads((folder / "args.json").read_text())
    assert args["command"][1:4] == ["train.py", "--wait", "0"]
    assert (folder / "model.txt").read_text() == args["flags"]["--lr"]
    assert (folder / "log").read_text() == "hello\nthere\n"
    text = capsys.readouterr().out
    assert "trial 0 begins in slot 0: --lr" in text and "1 of 1 trials ended: 1 done" in text
    assert "\033" not in text


def test_files_of_trials_are_apart(write: Write) -> None:
    """They read the same data by its name, and what they write under one name is each trial's."""
    Path("data").mkdir()
    Path("data/rows.txt").write_text("rows")
    text = 'pathlib.Path("data/rows.txt").read_text() + str(args.lr)'
    write(f'pathlib.Path("fitted").write_text({text})')
    assert sweep("--trials", "3", "--slots", "2") == 0
    wrote = {f"rows{row['--lr']}" for row in table()}
    assert {file.read_text() for file in Path("out").glob("*/files/fitted")} == wrote
    assert len(wrote) == 3 and not Path("fitted").exists()


def test_the_journal_is_one_that_optuna_reads(write: Write) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    assert sweep("--trials", "2", "--slots", "2", "--wait", "0") == 0
    storage = optuna.storages.JournalStorage(JournalFileBackend("out/journal"))
    study = optuna.load_study(study_name="sweep", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert study.best_trial.params["units"] in ("8", "16")


def test_each_trial_sees_its_own_gpus(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7,9")
    assert sweep("--trials", "5", "--replicas-per-trial", "2", "--wait", "0.3") == 0
    spans = [line.split() for line in Path("spans").read_text().splitlines()]
    assert {gpus for *_, gpus in spans} == {"3,5", "6,7"}
    for gpus in ("3,5", "6,7"):
        own = sorted((float(b), float(e)) for _, b, e, each in spans if each == gpus)
        assert all(one[1] <= two[0] for one, two in pairwise(own))


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_trial_that_fails_is_told_and_the_others_go_on(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write('number == 1 and sys.exit("no memory")\nnumber == 2 and epoch(val_accuracy=1) is None')
    assert sweep("--trials", "4", "--slots", "2", "--wait", "0") == 0
    assert [row["state"] for row in table()] == ["done", "failed", "done", "done"]
    assert "trial 1 failed: exit code 1; its last line: no memory" in capsys.readouterr().out
    assert ran() == Counter(range(4))


def test_a_number_that_is_none_fails_the_trial(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("args.lr = float('nan') if number == 0 else args.lr")
    assert sweep("--trials", "2", "--slots", "1", "--wait", "0") == 0
    assert [row["state"] for row in table()] == ["failed", "done"]
    assert "val_accuracy was not a finite number in the end" in capsys.readouterr().out
    assert models() == ["trial-001"]


def test_a_trial_that_is_killed_runs_again(write: Write) -> None:
    write(
        "if number == 1 and not os.path.exists('once'):\n"
        "    note('once'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "if number == 2:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert sweep("--trials", "4", "--slots", "2", "--wait", "0") == 0
    assert [row["state"] for row in table()] == ["done", "done", "failed", "done"]
    assert ran() == {0: 1, 1: 2, 2: 2, 3: 1}


# --- the parent ends ------------------------------------------------------------------------------


class Parent:
    """`stratagem sweep` as a process."""

    def __init__(self, *words: str) -> None:
        space = ["--lr", "1e-3..1e-1:log", "--units", "8,16", "--metric", "val_accuracy:max"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stratagem", "sweep", "train.py", *space, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, number: signal.Signals) -> tuple[str, str]:
        self.process.send_signal(number)
        return self.process.communicate(timeout=30 * SLOWER)


@pytest.fixture
def start() -> Iterator[Callable[..., Parent]]:
    started: list[Parent] = []

    def start(*words: str) -> Parent:
        started.append(Parent(*words))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()


def _told() -> int:
    """Return the number of ended trials in the journal."""
    path = Path("out/journal")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum('"state":1' in line and '"values":' in line for line in lines)


HOLDS = "child = __import__('subprocess').Popen(['sleep', '60']); note('children', child.pid)"
SLOW = f"if number == 3 and not os.path.exists('go'):\n    {HOLDS}; time.sleep(60)"


def _pids(file: str) -> list[int]:
    path = Path(file)
    return [int(line.split()[-1]) for line in path.read_text().splitlines() if path.exists()]


def test_a_parent_that_is_killed_goes_on_with_none_lost_or_doubled(
    write: Write, start: Callable[..., Parent]
) -> None:
    write(SLOW)
    words = ("--trials", "6", "--keep", "2", "--slots", "2", "--wait", "0")
    parent = start(*words, "--out", "out")
    wait_for(lambda: Path("children").exists() and _told() >= 5, 60, "for five trials and one")
    parent.end(signal.SIGKILL)
    wait_for(lambda: not any(map(alive, [*_pids("runs"), *_pids("children")])), 10, "for the end")
    with open("out/journal", "a") as journal:  # as if it had been killed while it wrote
        journal.write('{"op_code":5,"wor')
    Path("out/journal.lock").unlink(missing_ok=True)
    os.symlink("journal", "out/journal.lock")
    Path("go").touch()
    assert cli.main(["sweep", "--resume", "--out", "out"]) == 0
    assert ran() == Counter({0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1})
    assert sweep(*words, out="alone") == 0
    assert table("out") == table("alone") and models("out") == models("alone")
    assert [row["state"] for row in table()] == ["done"] * 6


def test_ctrl_c_ends_everything_and_says_how_to_go_on(
    write: Write, start: Callable[..., Parent]
) -> None:
    write(SLOW)
    parent = start("--trials", "5", "--slots", "2", "--wait", "0", "--out", "out")
    wait_for(lambda: Path("children").exists() and _told() >= 3, 60, "for trial 3")
    out, err = parent.end(signal.SIGINT)
    assert parent.process.returncode == 130
    assert "ended by SIGINT; go on with: stratagem sweep --resume --out out" in err
    assert "SIGINT: ending" in out
    assert not any(map(alive, [*_pids("runs"), *_pids("children")]))
    Path("go").touch()
    assert cli.main(["sweep", "--resume", "--out", "out"]) == 0
    assert [row["state"] for row in table()] == ["done"] * 5
    assert all(times == (2 if number == 3 else 1) for number, times in ran().items() if number < 4)


def test_a_sweep_that_is_over_can_get_more_trials(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("--trials", "2", "--slots", "2", "--wait", "0") == 0
    assert cli.main(["sweep", "--resume", "--out", "out"]) == 0
    assert ran() == Counter(range(2))
    assert sweep("--trials", "4", "--resume", "--slots", "1", "--wait", "0") == 0
    assert ran() == Counter(range(4))
    assert sweep("--trials", "4", "--resume", "--wait", "1") == 2
    assert "begun with words" in capsys.readouterr().err
    assert sweep("--trials", "4") == 2
    assert "has a sweep already; go on with it by --resume" in capsys.readouterr().err
    assert cli.main(["sweep", "--resume", "--out", "out", "--trials", "3"]) == 2
    assert "are fewer" in capsys.readouterr().err


def test_two_parents_do_not_share_a_folder(
    write: Write, start: Callable[..., Parent], capsys: pytest.CaptureFixture[str]
) -> None:
    write(SLOW.replace("number == 3", "True"))
    parent = start("--trials", "2", "--slots", "1", "--out", "out")
    wait_for(lambda: Path("children").exists(), 60, "for a trial")
    assert cli.main(["sweep", "--resume", "--out", "out"]) == 2
    assert "another process is at work on the sweep in out" in capsys.readouterr().err
    parent.end(signal.SIGTERM)
    assert parent.process.returncode == 128 + signal.SIGTERM


# --- pruning --------------------------------------------------------------------------------------


def test_a_trial_that_is_behind_is_ended(write: Write) -> None:
    write(
        "for step in range(4):\n"
        "    epoch(val_accuracy=0.9 if number < 5 else 0.01)\n"
        "time.sleep(0 if number < 5 else 60)"
    )
    assert sweep("--trials", "6", "--slots", "1", "--prune", "--wait", "0") == 0
    assert [row["state"] for row in table()] == ["done"] * 5 + ["pruned"]
    assert len(models()) == 3


# --- what cannot work -----------------------------------------------------------------------------

GOOD = "--lr 1e-3..1e-1:log --metric val_accuracy:max"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train.py --lr 0.1 --metric val_accuracy:max", "there is nothing to try"),
        (f"train.py {GOOD} --depth 2..6", "train.py has no flag --depth"),
        ("train.py --lr 1e-3..1e-1", "which metric decides? As in: --metric val_accuracy:max"),
        ("train.py --lr 1e-3..1e-1 --metric f1", "say which way is better: --metric f1:max"),
        ("train.py --lr 1..0 --metric val_loss", "goes from 1 to 0; the first must be smaller"),
        ("train.py --lr 0..1:log --metric val_loss", "begins at 0, which has no logarithm"),
        ("train.py --lr 1..2:lin --metric val_loss", "there is :log, and nothing else"),
        ("train.py --lr 1..x --metric val_loss", "--lr 1..x is not a range"),
        ("train.py --units 8,,16 --metric val_loss", "has an empty or a repeated value"),
        ("train.py --units 8,16 --units 4,5 --metric val_loss", "--units is given twice"),
        (f"train.py {GOOD} --sampler grid", "--lr has no end of values, and a grid tries each"),
        (f"train.py {GOOD} --sampler best", "invalid choice: 'best'"),
        (f"train.py {GOOD} --trials 0", "'0' is not a whole number, 1 or more"),
        (f"train.py {GOOD} --replicas-per-trial 999", "a trial needs 999 devices"),
        (f"none.py {GOOD}", "there is no script 'none.py'"),
        (f"--resume --out nowhere train.py {GOOD}", "there is no sweep in nowhere to go on with"),
        ("", "which script? As in: stratagem sweep train.py"),
    ],
)
def test_one_sentence(
    write: Write, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    assert cli.main(["sweep", *words.split()]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("extra", "words", "sentence"),
    [
        ("", "--metric val_acuracy:max", "writes no val_acuracy; it writes loss, val_accuracy; "),
        ("sys.exit()", "--metric val_loss", "has ended without writing any metric; its fit must"),
        ("note(folder / 'metrics.jsonl', 'x')", "--metric loss", "a line that is no JSON of"),
        ("", "--metric loss --trails 3", "no flag --trails; add it there, or was --trials of"),
    ],
)
def test_a_mistake_of_every_trial_ends_the_sweep_at_the_first(
    write: Write, capsys: pytest.CaptureFixture[str], extra: str, words: str, sentence: str
) -> None:
    write(extra)
    line = "sweep train.py --lr 1e-3..1e-1 --out out --slots 1 --wait 0"
    assert cli.main([*line.split(), *words.split()]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1
    assert not Path("runs").exists() or ran() == {0: 1}
    write()
    assert sweep("--trials", "1", "--wait", "0") == 0  # in the same folder
