"""Outsiders without the secret: servers go on; at Gloo's port they reach no tensor."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from subprocess import Popen

import pytest
import torch
import torch.distributed as dist

from stratagem.wire.link_time import sockets
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
epochs = int(max(1.0, float(sys.argv[1]) / (train(4) / 4)))
for part in (0.3, 1.0, 0.3):
    some = max(1, int(part * epochs))
    print(f"trained {train(some) / some:.5f}", flush=True)
    sys.stdin.readline()
"""


def start(hosts: Hosts, folder: Path) -> list[Popen[str]]:
    """Start a job over two hosts; the chief comes first."""
    train, serve = folder / "train.py", folder / "serve.py"
    train.write_text(WATCH + TRAIN)
    serve.write_text(WATCH + SERVE)
    here, there = hosts.address(0), hosts.address(1)
    spec = {"worker": [f"{here}:2222"], "ps": [f"{there}:2222", f"{there}:2223"]}
    found = []
    for role, addresses in spec.items():
        for index, address in enumerate(addresses):
            task = {"cluster": spec, "task": {"type": role, "index": index}}
            command = [serve] if role == "ps" else [train, SECONDS]
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


def seconds_an_epoch(chief: Popen[str]) -> float:
    """Wait for the training under way; return the chief's seconds."""
    heard, said = "", None
    while said is None:
        assert chief.stdout is not None
        line = chief.stdout.readline()
        heard += line
        assert line, f"the job has ended: {heard}"
        said = re.match(r"trained ([\d.]+)", line)
    return float(said[1])


def go_on(chief: Popen[str]) -> None:
    assert chief.stdin is not None
    chief.stdin.write("\n")
    chief.stdin.flush()


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
def test_servers_outlive_a_thousand_connections_at_every_port(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        tasks = start(hosts, tmp_path)
        before = seconds_an_epoch(tasks[0])
        places = [place for host in (0, 1) for place in ports(hosts, host)]
        # the servers' own; the chief listens nowhere
        assert {task.rpartition(":")[2] for task in places} == {"2222", "2223"}, places
        with crowd(1000, places, hosts.inside(2)) as outsider:
            quiet = attended(tmp_path)
            go_on(tasks[0])
            meanwhile = seconds_an_epoch(tasks[0])
            busy = attended(tmp_path)
        go_on(tasks[0])
        after = seconds_an_epoch(tasks[0])
        go_on(tasks[0])
        ends = [task.communicate(timeout=60)[0] for task in tasks]
    print(f"{before:.4f} {meanwhile:.4f} {after:.4f} s, {outsider.opened} opened")
    assert [task.returncode for task in tasks] == [0] * len(tasks), ends
    unless_late(outsider.opened > 1000, outsider.opened)
    assert sum("refused" in line for text in ends for line in text.splitlines()) < 20, ends
    assert len(busy) == len(tasks)
    for task, (when, spent) in busy.items():
        assert spent - quiet[task][1] < 0.05 * (when - quiet[task][0]), (task, quiet, busy)
    unless_late(meanwhile < SLOWER * max(before, after), (before, meanwhile, after))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_strangers_at_the_port_of_gloo_reach_no_tensor(host: str) -> None:
    """The port is on the address given; what docs/security.md says of it."""
    store, before = dist.HashStore(), set(sockets())
    meeting = Meeting(store, host, timedelta(seconds=20), lambda _: None, ("a", "b"))
    with ExitStack() as held:
        threads = held.enter_context(ThreadPoolExecutor(2))
        group = list(threads.map(lambda i: ProcessGroup("g", i, 2, "gloo", meeting), range(2)))
        listeners = [fd for name, fd in sockets().items() if name not in before and listens(fd)]
        assert len(listeners) == 2
        for fd in listeners:
            with socket.socket(fileno=os.dup(fd)) as port:
                where, number, *_ = port.getsockname()
            assert where == host
            for words in (b"half", os.urandom(64), bytes(1000)):
                stranger = socket.create_connection((where, number), timeout=20)
                held.enter_context(stranger).sendall(words)
        ours = [torch.full((1000,), 1.0 + rank) for rank in range(2)]
        list(threads.map(lambda i: group[i].sum(ours[i]).wait(), range(2)))
        assert all((each == 3.0).all() for each in ours)


def listens(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        return inet and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
