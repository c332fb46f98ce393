"""The command `stratagem` answers fast, in full, and in one sentence when it is misused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stratagem
from stratagem.errors import ReplicaLost
from stratagem.launch import check, cli
from stratagem.launch import run as run_command

pytestmark = pytest.mark.timeout(60)


def test_answers_without_torch_or_rich() -> None:
    source = """
import sys
from stratagem.launch import cli
import stratagem.launch.run
before = set(sys.modules)
assert all(cli.main([*name, "--help"]) == 0 for name in ([], ["run"], ["sweep"], ["ensemble"]))
heavy = {"torch", "numpy", "rich", "keras", "optuna"} & (before | set(sys.modules))
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in text and summary in text
    assert "examples:" in text


def test_help_of_run_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for option in (
        "--replicas N",
        "--workers W",
        "--ps P",
        "--evaluator",
        "--port BASE",
        "--gpu-memory LIMIT",
        "--no-color",
        "--grace SECONDS",
        "-m ",
    ):
        assert option in text
    assert "examples:\n  stratagem run --replicas 2 train.py" in text
    assert "50% or 0.5" in text


def test_help_of_check_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--help"]) == 0
    assert "--cluster FILE" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"stratagem {stratagem.__version__}\n"


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stratagem"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"stratagem {stratagem.__version__}\n")
    done = subprocess.run([*command, "run", "no.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "no.py" in done.stderr and done.stderr.count("\n") == 1


def test_our_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise ReplicaLost("worker 1 died\nRestart it.", "worker 1")

    monkeypatch.setattr(check, "main", fail)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "stratagem check: worker 1 died Restart it.\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(check, "main", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["check"])


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "main", interrupt)
    assert cli.main(["run", "train.py"]) == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bogus"], "'bogus'"),
        (["run"], "which script?"),
        (["run", "no.py"], "there is no script 'no.py'"),
        (["run", "--replicas", "0", "train.py"], "'0' is not a whole number, 1 or more"),
        (["run", "--workers", "-1", "train.py"], "--workers"),
        (["run", "--workers", "two", "train.py"], "'two' is not a whole number"),
        (["run", "--replicas", "2", "--workers", "2", "train.py"], "not both"),
        (["run", "--ps", "-1", "train.py"], "--ps"),
        (["run", "--port", "65535", "--workers", "2", "train.py"], "65535 is the last"),
        (["run", "--gpu-memory", "8", "train.py"], "write 8GiB, 50% or 0.5"),
        (["run", "--grace", "nan", "train.py"], "'nan' is not a number of seconds"),
        (["run", "--no-such-option", "train.py"], "--no-such-option"),
        (["run", "-m"], "-m needs the name of a module"),
        (["run", "-m", "no_such_package.train"], "no module 'no_such_package.train'"),
    ],
)
def test_misuse_is_one_sentence(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('this should not have run')")
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--hots", "3", "train.py"], "no option --hots; --hosts? (see stratagem plan"),
        (["simulate", "--zzz"], "no option --zzz (see stratagem simulate --help)"),
        (["simulate", "more"], "'more' is one argument too many"),
    ],
)
def test_an_unknown_option(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
