"""`stratagem check` finds the tasks that can be reached, and says what to do about the others."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.launch import check as command
from stratagem.launch import probe
from stratagem.launch.check import CheckRow, add_arguments, check, main
from stratagem.launch.probe import Speed
from tests.clock import PATIENCE, in_time, unless_late
from tests.ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
from member_processes import MEMBER, Process

pytestmark = pytest.mark.timeout(60)

CHECK = """
import argparse, logging, sys
from stratagem.launch import check
logging.basicConfig(level=logging.INFO, format="%(message)s")
parser = argparse.ArgumentParser()
check.add_arguments(parser)
sys.exit(check.main(parser.parse_args()))
"""

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[Process] = []

    def begin(source: str, *args: str, **env: str) -> Process:
        wide = {"COLUMNS": "400", "TERM": "dumb", **env}
        running.append(Process(source, *args, **wide))
        return running[-1]

    yield begin
    for process in running:
        process.end()


def spec_of(count: int, **more: list[str]) -> ClusterSpec:
    return ClusterSpec({"worker": [f"127.0.0.1:{p}" for p in free_ports(count)], **more})


def tf_config(spec: ClusterSpec, index: int) -> str:
    return spec.tf_config(Task("worker", index))


def lines(process: Process, name: str) -> str:
    """The row of the printed table for this task."""
    return next(line for _, line in process.out if name in line)


def try_alone(
    spec: ClusterSpec, task: Task | None = None, wait: float = 1.0
) -> dict[str, CheckRow]:
    rows = check(spec, task, secret=b"s", wait=wait, size_bytes=1000)
    return {row.task: row for row in rows}


def test_three_tasks_find_and_measure_each_other(start: Start, tmp_path: Path) -> None:
    spec = spec_of(2, ps=[f"127.0.0.1:{free_ports(1)[0]}"])
    began = time.monotonic()
    configs = [tf_config(spec, 0), tf_config(spec, 1), spec.tf_config(Task("ps", 0))]
    files = [tmp_path / f"{i}.json" for i in range(3)]
    group = [
        start(CHECK, "--wait", "20", "--json", str(file), TF_CONFIG=config)
        for file, config in zip(files, configs, strict=True)
    ]
    for process in group:
        assert process.ends() == 0, process.err
    in_time(time.monotonic() - began, 15)  # not the whole of --wait
    for me, process in zip(("worker 0", "worker 1", "ps 0"), group, strict=True):
        assert "this task, listening" in lines(process, me)
        for other in {"worker 0", "worker 1", "ps 0"} - {me}:
            row = lines(process, other)
            assert "reached" in row and " ms " in row and " MB/s " in row
            assert "but it has not" not in row
    told = json.loads(files[0].read_text())["tasks"]
    assert {row["task"]: row["speed"] is not None and row["speed"]["up"] > 0 for row in told} == {
        "worker 0": False,
        "worker 1": True,
        "ps 0": True,
    }


def test_measurements_are_plausible() -> None:
    spec = spec_of(2)
    found: dict[int, list[CheckRow]] = {}

    def run(index: int) -> None:
        task = Task("worker", index)
        found[index] = check(spec, task, secret=b"s", wait=20, size_bytes=4_000_000)

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 1):
        speed = found[index][1 - index].speed
        assert speed is not None
        assert speed.latency > 1e-6 and max(speed.up, speed.down) < 1e12
        in_time(speed.latency, 0.5)
        unless_late(min(speed.up, speed.down) > 1e6, speed)


def test_one_that_starts_late_is_waited_for_and_named_meanwhile(start: Start) -> None:
    spec = spec_of(2)
    first = start(CHECK, "--wait", "25", TF_CONFIG=tf_config(spec, 0))
    first.logged(f"waiting for worker 1 at {spec.address(Task('worker', 1))}", 20)
    second = start(CHECK, "--wait", "25", TF_CONFIG=tf_config(spec, 1))
    assert first.ends() == 0
    assert second.ends() == 0


def test_refused_says_to_start_a_check_there(start: Start, tmp_path: Path) -> None:
    spec = spec_of(2)
    file = tmp_path / "cluster.json"
    file.write_text(spec.to_json())
    began = time.monotonic()
    process = start(CHECK, "--cluster", str(file), "--task", "worker:0", "--wait", "1")
    assert process.ends() == 1
    in_time(time.monotonic() - began, 5)
    row = lines(process, "worker 1")
    assert "refused" in row and "start `stratagem check` there too" in row


def test_another_secret_is_certain_and_ends_the_wait(start: Start) -> None:
    spec = spec_of(2)
    began = time.monotonic()
    group = [
        start(CHECK, "--wait", "30", TF_CONFIG=tf_config(spec, index), STRATAGEM_SECRET=secret)
        for index, secret in enumerate(("one", "two"))
    ]
    for process in group:
        assert process.ends() == 1
    in_time(time.monotonic() - began, 15)
    for process in group:
        table = " ".join(line for _, line in process.out)
        assert "handshake refused" in table and "same STRATAGEM_SECRET" in table
        assert not {"one", "two"} & set(table.split())


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # No name server is asked: traffic stays on this machine.
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    row = try_alone(ClusterSpec({"worker": ["no-such-host.invalid:2222"]}))["worker 0"]
    assert not row.ok and row.state == "unknown name"
    assert "no-such-host.invalid" in row.remedy and "/etc/hosts" in row.remedy


def test_a_port_in_use_here() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        spec = ClusterSpec({"worker": [f"127.0.0.1:{port}"]})
        row = try_alone(spec, Task("worker", 0))["worker 0"]
    assert not row.ok and row.state == "port in use"
    assert str(port) in row.remedy and "training itself" in row.remedy


@pytest.mark.parametrize(
    ("banner", "state"), [(b"SSH-2.0-OpenSSH_9.2\r\n", "something else"), (b"", "hung up")]
)
def test_something_else_answers(banner: bytes, state: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    conn, _ = server.accept()
                except OSError:
                    return
                with conn:
                    conn.sendall(banner)
                    conn.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        spec = ClusterSpec({"worker": [f"127.0.0.1:{server.getsockname()[1]}"]})
        row = try_alone(spec, wait=1.5)["worker 0"]
        server.shutdown(socket.SHUT_RDWR)
    unless_late(row.state == state, row)
    assert not row.ok and row.remedy


def test_a_peer_that_never_accepts_is_timed_out_or_silent() -> None:
    """A listener that never accepts: the kernel completes the connection, then nothing comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        spec = ClusterSpec({"worker": [f"127.0.0.1:{server.getsockname()[1]}"]})
        began = time.monotonic()
        row = try_alone(spec, wait=0.5)["worker 0"]
    in_time(time.monotonic() - began, 2)
    assert not row.ok and row.remedy


@pytest.mark.parametrize(
    ("problem", "state", "remedy"),
    [
        (TimeoutError("timed out"), "timed out", "open TCP port 2222 of 10.0.0.2"),
        (OSError(113, "No route to host"), "no route", "10.0.0.2"),
        (ConnectionRefusedError(111, "refused"), "refused", "stratagem check"),
        (OSError(1, "Operation not permitted"), "failed", "Operation not permitted"),
    ],
)
def test_each_failure_has_its_remedy(problem: OSError, state: str, remedy: str) -> None:
    row = probe.diagnose("worker 1", "10.0.0.2:2222", problem)
    assert (row.state, row.ok, row.certain) == (state, False, False)
    assert remedy in row.remedy


def test_the_training_that_waits_there_counts_as_reached(start: Start) -> None:
    spec = spec_of(2)
    how = {"cluster": {"worker": list(spec.jobs["worker"])}, "task": ["worker", 0]}
    training = start(MEMBER, json.dumps(how))
    training.logged("waiting for worker 1", 20)
    rows = try_alone(spec, Task("worker", 1), wait=10)
    unless_late(rows["worker 0"].ok, rows)
    assert "training" in rows["worker 0"].state
    assert not training.has_logged("refused")


def test_a_training_that_meets_a_check_waits_for_its_chief(start: Start) -> None:
    spec = spec_of(2)
    how = {"cluster": {"worker": list(spec.jobs["worker"])}, "task": ["worker", 1]}
    checking = threading.Thread(target=try_alone, args=(spec, Task("worker", 0), 3.0))
    checking.start()
    training = start(MEMBER, json.dumps(how))
    training.logged("waiting for worker 0", 20)
    checking.join()
    chief = start(MEMBER, json.dumps({**how, "task": ["worker", 0]}))
    for process in (chief, training):
        process.expect('"ready"', 20)


def test_another_task_at_the_address_is_told() -> None:
    """Two names for one machine: another task answers than the one that was called."""
    spec = spec_of(2)
    shifted = ClusterSpec({"worker": spec.jobs["worker"][::-1]})
    answering = threading.Thread(target=try_alone, args=(spec, Task("worker", 0), 4.0))
    answering.start()
    row = try_alone(shifted, None, wait=3)["worker 1"]
    answering.join()
    unless_late(row.state == "another task", row)
    assert not row.ok and "worker 0" in row.remedy


def test_one_way_only_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(2)
    answering = threading.Thread(
        target=check,
        args=(spec, Task("worker", 1)),
        kwargs={"secret": b"s", "wait": 4, "size_bytes": 1000},
    )

    held_back = threading.Event()

    def deaf(self: object, name: str) -> None:
        """Worker 1 connects to no task, as if behind a firewall."""
        held_back.set()

    from stratagem.launch.check import CheckRound

    call_on = CheckRound._call_on
    monkeypatch.setattr(CheckRound, "_call_on", deaf)
    answering.start()
    assert held_back.wait(PATIENCE)
    monkeypatch.setattr(CheckRound, "_call_on", call_on)
    row = try_alone(spec, Task("worker", 0), wait=1.5)["worker 1"]
    answering.join()
    unless_late(row.ok, row)
    assert "has not reached this task" in row.remedy


def parse(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(args)


def test_files_and_tasks_are_read_in_every_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TF_CONFIG", "CLUSTER_SPEC", "RANK", "SLURM_JOB_ID", "STRATAGEM_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    spec = ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"cluster": spec.jobs}))
    assert command._cluster(str(file)) == (spec, None)
    file.write_text(spec.to_json())
    assert command._cluster(str(file)) == (spec, None)
    file.write_text(tf_config(spec, 1))
    assert command._cluster(str(file)) == (spec, Task("worker", 1))
    assert command._task("worker:1", spec) == Task("worker", 1)
    for bad in ("worker:7", "worker:x", "cook:0"):
        assert main(parse("--cluster", str(file), "--task", bad)) == 2
        assert "worker" in capsys.readouterr().err
    file.write_text("{")
    assert main(parse("--cluster", str(file))) == 2
    assert main(parse("--cluster", str(tmp_path / "none.json"))) == 2
    assert main(parse()) == 2
    assert "--cluster" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["80", "200"])
def test_addresses_and_remedies_survive_the_table(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    command._print([CheckRow("worker 0", "[::1]:2222", "refused", remedy="[bold] is no markup")])
    printed = capsys.readouterr().out
    assert "[::1]:2222" in printed and "[bold]" in printed


def test_ctrl_c_ends_a_check_at_once(start: Start) -> None:
    spec = spec_of(2)
    process = start(CHECK, "--wait", "60", TF_CONFIG=tf_config(spec, 0))
    process.logged("waiting for", 20)
    when = process.signal(signal.SIGINT)
    assert process.ends() == 130
    in_time(time.monotonic() - when, 2)


@pytest.mark.parametrize("columns", ["60", "80", "140"])
def test_nothing_is_cut_off(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long host name is wrapped, not truncated."""
    monkeypatch.setenv("COLUMNS", columns)
    address = "a-rather-long-host-name-17.training.internal.example.com:20222"
    speed = Speed(latency=1.25e-4, up=3.2e9, down=4.8e9)
    command._print(
        [CheckRow("worker 17", address, "reached: training", ok=True, speed=speed, certain=True)]
    )
    printed = capsys.readouterr().out
    assert all(len(line) <= int(columns) for line in printed.splitlines())
    cells = "worker 17", address, "reached: training", "0.12 ms", "3200 / 4800 MB/s"
    body = printed.rpartition("─")[2]
    assert sorted("".join(body.split())) == sorted("".join(cells).replace(" ", ""))
