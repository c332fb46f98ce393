"""A dry run shows what engines get, byte for byte: fake programs record it.

Vertex AI's is in test_vertex.py, with Google's own client.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from stratagem import __version__
from stratagem.cluster.spec import Task
from stratagem.errors import StratagemError
from stratagem.launch import far_task, job_commands
from stratagem.launch.cli import main
from stratagem.launch.engines import ray
from stratagem.launch.engines.slurm import Slurm
from stratagem.launch.engines.ssh import Remote
from stratagem.launch.job_folder import JobFolder, JobRequest, JobState
from tests.hosts import ROOT

VALUE = "tok-4711"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose jobs all have the same folder, one after another."""
    for name in ("project", "bin", "sent"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    for name, value in (("PATH", tmp_path / "bin"), ("STRATAGEM_JOBS", tmp_path / "jobs")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TOKEN", VALUE)

    def create(name: str) -> JobFolder:
        path = tmp_path / "jobs" / f"{name}-20260102-030405-abc123"
        for each in ("logs", "tasks"):
            (path / each).mkdir(parents=True)
        return JobFolder(path)

    monkeypatch.setattr(JobFolder, "create", create)
    return tmp_path


def program(project: Path, name: str, text: str) -> None:
    file = project / "bin" / name
    file.write_text(f"#!/bin/sh\nsent={project / 'sent'}\n{text}\n")
    file.chmod(0o755)


def both(project: Path, capsys: Any, *words: str) -> str:
    """Do a dry run, then submit the same; check that output and kept files have no values."""
    assert main(["submit", *words[:2], "--dry-run", *words[2:], "train.py", "a b"]) == 0
    shown = str(capsys.readouterr().out)
    assert VALUE not in shown
    assert main(["submit", *words, "train.py", "a b"]) == 0
    kept = (project / "jobs" / "train-20260102-030405-abc123" / "script").read_text()
    assert kept == shown
    assert VALUE not in capsys.readouterr().out
    return shown


def test_slurm(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(project, "sbatch", '/bin/cat "$2" > $sent/script; echo 7')
    shown = both(project, capsys, "--on", "slurm", "--env", "TOKEN", "--ps", "1", "--time", "2m")
    assert (project / "sent" / "script").read_text() == shown
    assert "#SBATCH --signal=TERM@30\n" in shown


def far_away(project: Path, gpus: int = 0) -> None:
    """A fake ssh to hosts that have two free ports each."""
    answer = {"version": __version__, "folder": True, "script": True, "gpus": gpus}
    told = json.dumps({**answer, "ports": [1001, 1002]})
    program(
        project,
        "ssh",
        f"case \"$*\" in *probe) echo '{told}'; exit;; esac\n"
        'read line; for each in "$@"; do echo "$each"; done > $sent/words-$$\n'
        'echo "$line" > $sent/stdin-$$',
    )


@pytest.mark.timeout(60)
def test_ssh(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far_away(project)
    hosts = ["--hosts", "a,b", "--workers", "4", "--follow"]
    shown = both(project, capsys, "--on", "ssh", "--env", "TOKEN", *hosts).splitlines()
    found = []
    for file in (project / "sent").glob("words-*"):
        told = json.loads(file.with_name(file.name.replace("words", "stdin")).read_text())
        assert len(told["secret"]) == 64 and told["environ"] == {"TOKEN": VALUE}
        told |= {"secret": "(a secret)", "environ": {"TOKEN": "(as it is here)"}}
        command = shlex.join(["ssh", *file.read_text().splitlines()])
        assert VALUE not in command
        task = " ".join(map(str, told["task"]))
        found.append([f"# {task}", command, f"# stdin: {json.dumps(told)}"])
    assert [line for each in sorted(found) for line in each] == shown


@pytest.mark.parametrize(
    ("engine", "shown", "unchecked"),
    [
        ("slurm", "#SBATCH --nodes=2", "no sbatch"),
        ("ssh --hosts a,b", "(a free port)", "no ssh on this machine"),
        ("ray", "ray job submit", "no `ray`"),
        ("kubernetes --image i", '"kind": "Job"', "no kubectl"),
    ],
)
def test_a_dry_run_needs_nothing_of_the_engine(
    engine: str, shown: str, unchecked: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "--on", *engine.split(), "--workers", "2"]
    assert main([*words, "--dry-run", "train.py"]) == 0
    said = capsys.readouterr()
    assert shown in said.out
    assert said.err.startswith("Not checked from here: ") and unchecked in said.err
    assert main([*words, "train.py"]) == 2
    assert unchecked in capsys.readouterr().err


def test_hosts_of_a_file_and_their_gpus(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    far_away(project, gpus=4)
    (project / "project" / "hosts").write_text("# ours\nme@a=10.0.0.1\n\nb  # the old one\n")
    words = ["submit", "--on", "ssh", "--hosts", "hosts", "--gpus-per-worker", "2", "--dry-run"]
    assert main([*words, "--workers", "3", "--ps", "1", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [json.loads(x.removeprefix("# stdin: ")) for x in lines if x.startswith("# stdin")]
    assert [each["gpus"] for each in told] == [[0, 1], [0, 1], [2, 3], []]
    assert told[0]["cluster"]["worker"] == ["10.0.0.1:1001", "b:1001", "10.0.0.1:1002"]
    assert [line.split()[-5] for line in lines[1::3]] == ["me@a", "b", "me@a", "b"]
    assert main([*words[:-1], "--gpus-per-worker", "3", "--workers", "4", "train.py"]) == 2
    assert "me@a has 4 GPUs, and its workers need 6" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_kubernetes(kind: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Except for the secret, and for the owner of Service and Secret, which has the Job's id."""
    answer = json.dumps({"apiVersion": "v", "kind": "k", "metadata": {"uid": "u-1"}})
    program(
        project,
        "kubectl",
        f'case "$*" in *create*) n=$(/bin/ls $sent | /usr/bin/wc -l); /bin/cat > $sent/$n; '
        f"echo '{answer}';; *) echo \"$*\" > $sent/woken;; esac",
    )
    more = ["--env", "TOKEN", "--image", "i:1", "--kind", kind]
    _, *shown = both(project, capsys, "--on", "kubernetes", *more).split("---\n")
    assert (project / "sent" / "0").read_text() == shown[0], "the job itself: to the byte"
    owner = {"apiVersion": "v", "kind": "k", "name": "train-abc123", "uid": "u-1"}
    for number, text in enumerate(shown[1:], 1):
        made = json.loads((project / "sent" / str(number)).read_text())
        assert made["metadata"].pop("ownerReferences") == [owner]
        if made["kind"] == "Secret":
            assert len(made["stringData"]["STRATAGEM_SECRET"]) == 64
            assert made["stringData"]["TOKEN"] == VALUE
            made["stringData"] = {"TOKEN": "(as it is here)", "STRATAGEM_SECRET": "(a secret)"}
        assert f"{json.dumps(made, indent=2)}\n" == text
    assert '"suspend": false' in (project / "sent" / "woken").read_text()
    assert len(list((project / "sent").iterdir())) == len(shown) + 1


def test_ray(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "_ask", lambda *_: {})
    program(
        project,
        "ray",
        'for each in "$@"; do echo "$each"; done > $sent/words\n'
        '/bin/cat "${7#--runtime-env=}" > $sent/environ',
    )
    shown = both(project, capsys, "--on", "ray", "--env", "TOKEN", "--workers", "2")
    command, environ = shown.splitlines()
    assert shlex.join(["ray", *(project / "sent" / "words").read_text().splitlines()]) == command
    sent = json.loads((project / "sent" / "environ").read_text())
    assert sent["env_vars"].pop("TOKEN") == VALUE
    told = json.loads(environ.removeprefix("# runtime_env.json: "))
    assert told["env_vars"].pop("TOKEN") == "(as it is here)" and told == sent


def test_a_name_that_begins_with_a_digit(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a name is valid for a Job, but not for a Service."""
    program(project, "kubectl", "exit 1")
    assert main(["submit", "--on", "kubernetes", "--image", "i", "--name", "2a", "train.py"]) == 2
    assert "'2a' is no name on Kubernetes" in capsys.readouterr().err


def test_a_slurm_job_whose_client_was_killed_before_it_knew_the_number(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobFolder.create("train")
    job.sent("slurm", "", JobRequest("train", ("train.py",), "/x", "/p"))
    program(project, "squeue", "exit 0")
    assert main(["jobs"]) == 0 and "no job in" in capsys.readouterr().out
    listed = f'case "$*" in *--me*) echo "12 {job.path}/script";; *) echo "PENDING none";; esac'
    program(project, "squeue", listed)
    assert main(["jobs"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("slurm:12 ") and "waiting: pending none" in said


def test_whoever_follows_goes_on_when_an_engine_does_not_answer(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [StratagemError("no answer"), JobState("running"), JobState("ended", 3)]

    def state(engine: Slurm, job: JobFolder) -> JobState:
        answer = answers.pop(0)
        if isinstance(answer, StratagemError):
            raise answer
        return JobState(answer.phase, answer.code)

    monkeypatch.setattr(Slurm, "state", state)
    monkeypatch.setattr(job_commands, "_ASK", 0.0)
    job = JobFolder.create("train")
    job.sent("slurm", "7", JobRequest("train", ("train.py",), "/x", "/p"))
    assert main(["logs", "slurm:7", "--follow"]) == 3
    assert "no answer; the job goes on, and is asked again" in capsys.readouterr().err


def test_a_task_over_ssh_may_be_killed_twice(tmp_path: Path) -> None:
    """The supervisor still reports how the job ended."""
    far = Remote(Task("worker", 0), ["/bin/sleep", "60"], "{}", {}, tmp_path / "blame")
    for _ in range(2):
        far.signal(signal.SIGKILL)
    far.code = 0  # so that it is its own process that is meant
    far.kill()


def test_the_name_of_a_pod_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def resolve(host: str, port: None) -> None:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(far_task.time, "sleep", lambda seconds: None)
    far_task._await_name("train-1.train")
    assert asked == ["train-1.train"] * 3
    asked.clear()
    monkeypatch.setattr(far_task, "_NAMES", -1.0)
    with pytest.raises(StratagemError, match="is its pod waiting for a node"):
        far_task._await_name("train-1.train")
