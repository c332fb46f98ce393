"""Two hosts and a listener on the link between them, which must not see plain text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import Popen

import pytest

from tests.hosts import Hosts, needs_hosts

CLUSTER = {"worker": ["10.77.31.1:2222"], "ps": ["10.77.31.2:2222", "10.77.31.2:2223"]}
LISTENER = """
import socket, sys
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
tap.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb", buffering=0) as file:
    print("listening", flush=True)
    while True:
        file.write(tap.recv(1 << 16))
"""
SCRIPT = """
import torch
import stratagem as sg
from tests.served_support import apart, digits, net

torch.set_num_threads(1)
x, y, _, _ = digits()
made = []
served = sg.ParameterServerStrategy(updates=sg.Synchronous(), wire=None)
assert not served.replica_group.worker.lines.near  # tensors travel
for where in (served, None):
    one = sg.Model(net(), where)
    one.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
    torch.manual_seed(5)
    one.fit(x[:200], y[:200], epochs=2, batch_size=50, verbose=0)
    made.append(one)
assert apart(made[0].module, made[1].module) < 2e-5
print("as one device")
"""

pytestmark = pytest.mark.timeout(100)


def start(hosts: Hosts, host: int, role: str, index: int, *command: object) -> Popen[str]:
    task = {"cluster": CLUSTER, "task": {"type": role, "index": index}}
    return hosts.start(
        host,
        sys.executable,
        *command,
        TF_CONFIG=json.dumps(task),
        STRATAGEM_SECRET="a long and random text",
    )


@pytest.mark.slow
@needs_hosts
def test_between_hosts_everything_is_encrypted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    heard = tmp_path / "heard"
    with Hosts(2) as hosts:
        spy = start(hosts, 1, "ps", 0, "-c", LISTENER, "e0", heard)
        assert spy.stdout is not None and spy.stdout.readline() == "listening\n"
        tasks = [start(hosts, 1, "ps", i, "-m", "stratagem.ps") for i in (0, 1)]
        tasks.append(start(hosts, 0, "worker", 0, script))
        printed = [task.communicate(timeout=80)[0] for task in reversed(tasks)]
    assert [task.returncode for task in tasks] == [0, 0, 0], printed
    assert "as one device" in printed[0]
    bytes_on_the_wire = heard.read_bytes()
    assert len(bytes_on_the_wire) > 8 * 2 * 4 * 4810  # eight steps, there and back, all values
    assert b"STRATGM" in bytes_on_the_wire  # the greeting, which is not secret
    for word in (b'"serial"', b'"hello"', b'"plan"', b"a long and random text"):
        assert word not in bytes_on_the_wire
