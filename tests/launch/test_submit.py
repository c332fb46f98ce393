"""`stratagem submit`: its options and the job's folder; other tests run the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.cli import main
from stratagem.launch.engines import kubernetes
from stratagem.launch.engines.slurm import Slurm
from stratagem.launch.job_folder import (
    JobFolder,
    JobRequest,
    LogFile,
    LogReader,
    TaskEnd,
    append_missing,
)
from stratagem.launch.supervise import write_end


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STRATAGEM_JOBS", str(tmp_path / "jobs"))
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    monkeypatch.setenv("PATH", str(bin_))
    return folder


def with_program(project: Path, name: str, text: str = "exit 1") -> None:
    file = project.parent / "bin" / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("submit train.py", "where to? As in: --on slurm"),
        (
            "submit --on sge train.py",
            "there is no engine 'sge'; there are slurm, ssh, kubernetes, ray, vertex",
        ),
        ("submit --on slurm train.py", "there is no sbatch on this machine"),
        ("submit --on ssh train.py", "which hosts?"),
        ("submit --on ssh --hosts a,a train.py", "a is named twice"),
        ("submit --on ssh --hosts=-oProxyCommand=x train.py", "is no host"),
        ("submit --on ssh --hosts a train.py", "there is no ssh on this machine"),
        ("submit --on slurm", "which script?"),
        ("submit --on kubernetes --image i train.py", "there is no kubectl on this machine"),
        ("submit --on ray train.py", "there is no `ray` on this machine"),
        (
            "submit --on vertex --project p --region r --image i train.py",
            "Vertex AI needs Google's client",
        ),
        ("submit --on slurm --time 5x train.py", "--time '5x' is no time: write 30m, 2h or 1d"),
        ("submit --on slurm --name No_Label train.py", "'No_Label' is no name for a job"),
        ("submit --on slurm train.py a\nb", "no room for arguments with line breaks"),
        ("submit --on slurm --env NOBODY_SET_IT train.py", "--env NOBODY_SET_IT: it is not set"),
        ("submit --on slurm --wrokers 2 train.py", "there is no option --wrokers; --workers?"),
        ("logs slurm:7", "there is no job slurm:7"),
        ("cancel ssh:x", "there is no job ssh:x"),
    ],
)
def test_bad_input(
    words: str, said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "\n" in words:
        with_program(project, "sbatch")
    assert main(words.split(" ")) == 2
    assert said in capsys.readouterr().err
    assert not list(project.parent.glob("jobs/*"))


def test_a_script_that_is_not_there(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_program(project, "sbatch")
    assert main(["submit", "--on", "slurm", "nothing.py"]) == 2
    assert "there is no script 'nothing.py' in" in capsys.readouterr().err


def test_a_host_that_refuses(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_program(project, "ssh", "echo 'ssh: connect to host a port 22: refused' >&2; exit 255")
    assert main(["submit", "--on", "ssh", "--hosts", "a", "train.py"]) == 2
    assert "a cannot be reached: ssh: connect to host a port 22: refused" in capsys.readouterr().err
    with_program(project, "ssh", "echo 'No module named stratagem' >&2; exit 1")
    assert main(["submit", "--on", "ssh", "--hosts", "a", "train.py"]) == 2
    assert "install the package there, or say --python" in capsys.readouterr().err


def test_what_kubernetes_needs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_program(project, "kubectl", "echo 'Error: connection refused' >&2; exit 1")
    start = ["submit", "--on", "kubernetes"]
    assert main([*start, "train.py"]) == 2
    assert "which image?" in capsys.readouterr().err
    image = ["--image", "a:1"]
    assert main([*start, *image, "--volume", "models", "train.py"]) == 2
    assert "as in --volume models=/models" in capsys.readouterr().err
    assert main([*start, *image, "--gpus-per-worker", "1", "--ps", "1", "train.py"]) == 2
    assert "all tasks have the same resources" in capsys.readouterr().err
    assert main([*start, *image, "train.py"]) == 2
    assert "kubectl create failed: Error: connection refused" in capsys.readouterr().err
    assert main([*start, *image, "--time", "2h", "--dry-run", "train.py", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    job, service, secret = (json.loads(text) for text in shown.split("---\n")[1:])
    assert job["spec"]["activeDeadlineSeconds"] == 7200
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["train.py", "--lr", "1"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert secret["stringData"] == {"STRATAGEM_SECRET": "(a secret)"}
    assert not list(project.parent.glob("jobs/*"))


def test_a_ray_that_is_not_there(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_program(project, "ray")
    words = ["submit", "--on", "ray", "--ray-address", "http://127.0.0.1:1", "train.py"]
    assert main(words) == 2
    assert "there is no Ray at http://127.0.0.1:1" in capsys.readouterr().err


def test_an_sbatch_that_refuses_leaves_no_folder(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_program(project, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert main(["submit", "--on", "slurm", "train.py"]) == 2
    assert "sbatch refused the job: sbatch: error: invalid partition" in capsys.readouterr().err
    assert not list(project.parent.glob("jobs/*"))


def test_flags_beat_the_settings_of_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_program(project, "sbatch")
    (project / "stratagem.toml").write_text(
        '[submit]\non = "slurm"\nworkers = 4\ngpus_per_worker = 2\ntime = "2h"\n'
        'sbatch = ["--partition=gpu"]\n'
    )
    below = project / "below"
    below.mkdir()
    (below / "train.py").write_text("")
    monkeypatch.chdir(below)
    assert main(["submit", "--workers", "3", "--dry-run", "train.py", "--lr", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in ("--nodes=3", "--gpus-per-node=2", "--time=120", "--partition=gpu"):
        assert f"#SBATCH {line}" in lines
    assert "# python train.py --lr 0.1" in lines
    assert not list(project.parent.glob("jobs/*")), "a dry run leaves nothing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[submit]\nworkers = '4'", "workers = '4' is of the wrong kind"),
        ("[submit]\nwrokers = 4", "there is no setting 'wrokers'"),
        ("[submit", "cannot be read"),
        ("submit = 3", "[submit] is a table"),
    ],
)
def test_settings_that_are_wrong(
    text: str, said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "stratagem.toml").write_text(text)
    assert main(["submit", "--on", "slurm", "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_tasks_of_other_roles_are_components(project: Path) -> None:
    request = JobRequest("a", ("train.py",), "/x y", "/p", workers=2, ps=1, evaluator=True, gpus=1)
    script = Slurm().describe(request, JobFolder(Path("/jobs/a b")))
    assert script.count("#SBATCH hetjob") == 2 and script.count("--gpus-per-node=1") == 1
    assert "--het-group=0-2" in script and "job='/jobs/a b'" in script
    assert '#SBATCH --chdir="/x y"' in script and '#SBATCH --output="/jobs/a b/batch.log"' in script


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Task("worker", 0), Task("worker", 1), Task("ps", 0)]),
            st.lists(st.text(st.characters(exclude_categories=["C", "Z"])), max_size=4),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_every_line_is_read_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[Task, list[str], bool]],
) -> None:
    """Lines may be written in pieces, and read at any time."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "logs").mkdir()
    job = JobFolder(folder)
    job.sent("ssh", "x", JobRequest("a", ("t.py",), "/", "/p", workers=2, ps=1))
    reader, found = LogReader(job), list[tuple[Task, str]]()
    for task, lines, look in writes:
        with LogFile(job.log(task)) as log:
            log.write(b"".join(f"{line}\n".encode() for line in lines))
        if look:
            found += [(task, line) for task, _, line in reader.lines()]
    found += [(task, line) for task, _, line in reader.lines()]
    for each in {task for task, _, _ in writes}:
        expected = [line for task, lines, _ in writes if task == each for line in lines]
        assert [line for task, line in found if task == each] == expected


def test_whoever_the_others_blame_has_failed_first(project: Path) -> None:
    job = JobFolder.create("a")
    job.sent("ssh", "x", JobRequest("a", ("t.py",), "/", "/p", workers=3))
    job.task_ended(TaskEnd(Task("worker", 0), 1, "worker 2", "2", ("lost worker 2",)))
    job.task_ended(TaskEnd(Task("worker", 2), 3, "", "3", ("no data",)))
    job.task_ended(TaskEnd(Task("worker", 1), 1, "worker 0", "4", ()))
    assert write_end(job, 1) == 3
    end = job.end()
    assert end is not None and end.code == 3
    assert end.text.splitlines() == [
        "worker 2 failed first: exit code 3; its last lines:",
        "    no data",
    ]


def test_a_folder_that_cannot_be_made(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "file").write_text("")
    monkeypatch.setenv("STRATAGEM_JOBS", str(project / "file"))
    with pytest.raises(UsageError, match="STRATAGEM_JOBS says where"):
        JobFolder.create("a")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"containerStatuses": [{"state": {"running": {}}}]}, ""),
        ({"containerStatuses": [{"state": {"terminated": {}}}]}, ""),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}, "ErrImage"),
        ({"conditions": [{"status": "False", "message": "0/2 nodes: no GPU"}]}, "0/2 nodes: no"),
        ({}, "a node"),
    ],
)
def test_what_a_pod_waits_for(status: dict[str, object], said: str) -> None:
    found = kubernetes._waits_for({"status": status})
    assert said in found and bool(said) == bool(found)


def test_lines_that_are_brought_home(tmp_path: Path) -> None:
    """Each line is copied once and whole, by any process; of a progress bar its last state."""
    log = tmp_path / "log"
    lines = [b"1 a", b"2 10%\r 50%\r100%\r", b"3 \xff\x0cb"]
    for some in (1, 2, 2, 3):
        append_missing(log, lines[:some])
    assert log.read_bytes() == b"1 a\n2 100%\n3 \xff\x0cb\n"


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([(75, True), (143, True)], 75, "saved"),
        ([(75, True), (3, False)], 3, "worker 1 failed first: exit code 3"),
        ([(143, True), (0, False)], 143, "told to end"),
        ([(255, False), (0, False)], 255, "worker 0 failed first: exit code 255"),
        ([(137, False), (0, False)], 137, "worker 0 failed first: killed by SIGKILL"),
        ([(0, False), (0, False)], 0, ""),
    ],
)
def test_how_a_job_ended(ends: list[tuple[int, bool]], code: int, said: str, project: Path) -> None:
    job = JobFolder.create("a")
    job.sent("ssh", "x", JobRequest("a", ("t.py",), "/", "/p", workers=2))
    for i, (each, stopped) in enumerate(ends):
        job.task_ended(TaskEnd(Task("worker", i), each, "", str(i), (), stopped))
    assert write_end(job, 0) == code
    end = job.end()
    assert end is not None and end.code == code and end.text.startswith(said)
