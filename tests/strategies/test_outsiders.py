"""An outsider without the secret cannot read or write data of a job, end it or slow it down."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from subprocess import Popen

import pytest
import torch.distributed as dist

from stratagem.wire import port_filter as shutting
from stratagem.wire.link_time import sockets
from stratagem.wire.port_filter import _address, listening, shut
from stratagem.wire.process_group import Meeting, ProcessGroup
from tests.clock import unless_late
from tests.cluster.crowd import crowd
from tests.hosts import Hosts, needs_hosts

pytestmark = pytest.mark.timeout(240)

#: how long an outsider knocks; there is a shorter training before, and one after
SECONDS = float(os.environ.get("STRATAGEM_TEST_CROWD", "5"))
#: of a step: what it may cost. Without a machine of one's own the wall clock shows only that
#: nothing stands still; that strangers have no more than 5% of a processor shows anywhere
SLOWER = 1.05 if "STRATAGEM_TEST_CROWD" in os.environ else 2.0

#: keeps a file with the processor time of the threads that attend to strangers
WATCH = """
import json, os, threading, time
def look():
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    name = os.path.join(os.path.dirname(__file__), task["type"] + str(task["index"]))
    while True:
        doors = [t for t in threading.enumerate() if t.name == "stratagem-acceptor"]
        spent = sum(time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in doors)
        with open(name + ".part", "w") as file:
            file.write(f"{time.monotonic()} {spent}")
        os.replace(name + ".part", name + ".door")
        time.sleep(0.1)
threading.Thread(target=look, daemon=True).start()
"""

SERVE = """
import runpy
runpy.run_module("stratagem.ps", run_name="__main__")
"""

TRAIN = """
import sys, time
import torch
import stratagem as sg
from tests.support import data, mlp
torch.set_num_threads(1)
kind, seconds = sys.argv[1], float(sys.argv[2])
if kind == "ring":
    strategy = sg.MultiWorkerMirroredStrategy()
else:
    strategy = sg.ParameterServerStrategy(updates=sg.Synchronous())
x, y = data(640)
with strategy.scope():
    model = sg.Model(mlp())
    model.compile(lambda p: torch.optim.SGD(p, lr=0.01), "cross_entropy")

def train(epochs):
    began = time.perf_counter()
    model.fit(x, y, batch_size=8, epochs=epochs, verbose=0)
    return time.perf_counter() - began

train(2)
epochs = torch.tensor(max(1.0, seconds / (train(4) / 4)))
if kind == "ring":  # as many on both
    epochs = strategy.run(lambda: sg.current_replica().all_reduce(epochs, "min"))[0]
epochs = int(epochs)
for part in (0.3, 1.0, 0.3):
    some = max(1, int(part * epochs))
    print(f"trained {train(some) / some:.5f}", flush=True)
    sys.stdin.readline()
"""


def start(hosts: Hosts, kind: str, folder: Path) -> list[Popen[str]]:
    """Start a job over two hosts; the chief comes first."""
    train, serve = folder / "train.py", folder / "serve.py"
    train.write_text(WATCH + TRAIN)
    serve.write_text(WATCH + SERVE)
    here, there = hosts.address(0), hosts.address(1)
    spec = {"worker": [f"{here}:2222"], "ps": [f"{there}:2222", f"{there}:2223"]}
    if kind == "ring":
        spec = {"worker": [f"{here}:2222", f"{there}:2222"]}
    found = []
    for role, addresses in spec.items():
        for index, address in enumerate(addresses):
            task = {"cluster": spec, "task": {"type": role, "index": index}}
            command = [serve] if role == "ps" else [train, kind, SECONDS]
            found.append(
                hosts.start(
                    int(address.startswith(there)),
                    sys.executable,
                    *command,
                    TF_CONFIG=json.dumps(task),
                    STRATAGEM_SECRET="of a test",
                )
            )
    return found


def seconds_an_epoch(tasks: list[Popen[str]]) -> float:
    """Wait for the training under way; return the chief's seconds."""
    found, heard = [], ""
    for task in tasks:
        said = None if "train.py" in str(task.args) else True  # a server says nothing
        while said is None:
            assert task.stdout is not None
            line = task.stdout.readline()
            heard += line
            assert line, f"the job has ended: {heard}"
            said = re.match(r"trained ([\d.]+)", line)
        if isinstance(said, re.Match):
            found.append(float(said[1]))
    return found[0]


def go_on(tasks: list[Popen[str]]) -> None:
    for task in tasks:
        assert task.stdin is not None
        task.stdin.write("\n")
        task.stdin.flush()


def attended(folder: Path) -> dict[str, tuple[float, float]]:
    """Return a time for each task, and the processor time that outsiders had cost it by then."""
    found = {file.stem: file.read_text().split() for file in folder.glob("*.door")}
    return {task: (float(when), float(spent)) for task, (when, spent) in found.items()}


def ports(hosts: Hosts, host: int) -> list[str]:
    """Return the addresses at which a host listens, except for loopback."""
    table = hosts.start(host, "cat", "/proc/net/tcp", "/proc/net/tcp6").communicate(timeout=20)[0]
    rows = [line.split() for line in table.splitlines() if ": " in line]
    found = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [f"{hosts.address(host)}:{int(port, 16)}" for at, port in found if at != "0100007F"]


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("kind", ["ring", "servers"])
def test_a_job_outlives_a_thousand_connections_at_every_port(kind: str, tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        tasks = start(hosts, kind, tmp_path)
        before = seconds_an_epoch(tasks)
        places = [place for host in (0, 1) for place in ports(hosts, host)]
        own = {task for task in places if task.rpartition(":")[2] in ("2222", "2223")}
        # The chief's port is shut when all have come, and there is no store; Gloo's ports are
        # there, and accept nobody.
        assert places and len(own) == (0 if kind == "ring" else len(places)), places
        with crowd(1000, places, hosts.inside(2)) as outsider:
            quiet = attended(tmp_path)
            go_on(tasks)
            meanwhile = seconds_an_epoch(tasks)
            busy = attended(tmp_path)
        go_on(tasks)
        after = seconds_an_epoch(tasks)
        go_on(tasks)
        ends = [task.communicate(timeout=60)[0] for task in tasks]
    print(f"{kind}: {before:.4f} {meanwhile:.4f} {after:.4f} s, {outsider.opened} opened")
    assert [task.returncode for task in tasks] == [0] * len(tasks), ends
    assert outsider.opened == 0 if kind == "ring" else outsider.opened > 0
    unless_late(kind == "ring" or outsider.opened > 1000, outsider.opened)
    assert sum("refused" in line for text in ends for line in text.splitlines()) < 20, ends
    assert len(busy) == len(tasks)
    for task, (when, spent) in busy.items():
        assert spent - quiet[task][1] < 0.05 * (when - quiet[task][0]), (task, quiet, busy)
    unless_late(meanwhile < SLOWER * max(before, after), (before, meanwhile, after))


def test_a_port_that_is_shut_accepts_nobody_and_keeps_who_is_there() -> None:
    def make() -> tuple[socket.socket, socket.socket]:
        """The socket to shut, and the server of another thread."""
        return socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))

    (server, other), found = listening(make)
    with server, other, socket.create_connection(server.getsockname()) as member:
        ours, _ = server.accept()
        assert {each.getsockname() for each in found} == {
            server.getsockname(),
            other.getsockname(),
        }
        shut(found, b"its address: " + _address(server))
        assert all(each.fileno() < 0 for each in found)
        socket.create_connection(other.getsockname(), timeout=2).close()
        with pytest.raises(TimeoutError):
            socket.create_connection(server.getsockname(), timeout=0.3)
        with ours:
            ours.sendall(b"a")
            assert member.recv(1) == b"a"


def groups(host: str, size: int) -> tuple[list[ProcessGroup], list[socket.socket]]:
    """Return the members of a Gloo group, in threads of this process, and its new listeners."""
    store = dist.HashStore()

    def make() -> list[ProcessGroup]:
        meeting = Meeting(store, host, timedelta(seconds=20), lambda _: None, ("a", "b")[:size])
        with ThreadPoolExecutor(size) as threads:
            return list(
                threads.map(lambda i: ProcessGroup("g", i, size, "gloo", meeting), range(size))
            )

    before = set(sockets())
    made = make()
    fds = [fd for name, fd in sockets().items() if name not in before]
    return made, [sock for fd in fds for sock in shutting._listener(fd)]


@pytest.mark.parametrize(("host", "size"), [("127.0.0.1", 2), ("127.0.0.1", 1), ("::1", 2)])
def test_the_port_of_gloo_is_shut(
    host: str, size: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutting, "_warned", threading.Event())
    made, ports = groups(host, size)
    assert len(ports) == size and "stays open" not in caplog.text
    for port in ports:
        with port, pytest.raises(TimeoutError):
            socket.create_connection(port.getsockname()[:2], timeout=0.3)
    del made


def test_a_kernel_that_cannot_shut_a_port_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutting, "_warned", threading.Event())
    monkeypatch.setattr(shutting, "_SO_ATTACH_FILTER", 12345)  # one that no kernel has
    made, ports = groups("127.0.0.1", 2)
    numbers = [port.getsockname()[1] for port in ports]
    (line,) = [each.getMessage() for each in caplog.records if "stays open" in each.getMessage()]
    assert "docs/security.md" in line and any(
        f"port {number} of Gloo" in line for number in numbers
    )
    for port in ports:
        port.close()
    del made
