"""Two hosts with a wire between them: what a listener on it sees, and does not see."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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
for where in (sg.ParameterServerStrategy(updates=sg.Synchronous(), wire=None), None):
    one = sg.Model(net(), where)
    one.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
    torch.manual_seed(5)
    one.fit(x[:200], y[:200], epochs=2, batch_size=50, verbose=0)
    made.append(one)
assert apart(made[0].module, made[1].module) < 2e-5
print("as one device")
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(100),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
    ),
]


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.31.1 and 10.77.31.2, with one wire between them."""
    names = [f"stratagem-{os.getpid()}-{i}" for i in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "a0", "netns", names[0], "type", "veth", "peer", "name", "b0",
           "netns", names[1])  # fmt: skip
        for i, (name, wire) in enumerate(zip(names, ("a0", "b0"), strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.31.{i}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def inside(host: str, role: str, index: int, *command: object) -> subprocess.Popen[str]:
    task = {"cluster": CLUSTER, "task": {"type": role, "index": index}}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, *map(str, command)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "TF_CONFIG": json.dumps(task), "STRATAGEM_SECRET": "a long and random text",
             "STRATAGEM_SHARED_MEMORY": "0"},
    )  # fmt: skip


@pytest.mark.slow
def test_between_hosts_everything_is_encrypted(hosts: tuple[str, str], tmp_path: Path) -> None:
    here, there = hosts
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    heard = tmp_path / "heard"
    spy = inside(there, "ps", 0, "-c", LISTENER, "b0", heard)
    tasks: list[subprocess.Popen[str]] = []
    try:
        assert spy.stdout is not None and spy.stdout.readline() == "listening\n"
        tasks = [inside(there, "ps", i, "-m", "stratagem.ps") for i in (0, 1)]
        tasks.append(inside(here, "worker", 0, script))
        printed = [task.communicate(timeout=80)[0] for task in reversed(tasks)]
    finally:
        for process in (*tasks, spy):
            process.kill()
            process.wait()
    assert [task.returncode for task in tasks] == [0, 0, 0], printed
    assert "as one device" in printed[0]
    bytes_on_the_wire = heard.read_bytes()
    assert len(bytes_on_the_wire) > 8 * 2 * 4 * 4810  # eight steps, there and back, all values
    assert b"STRATGM" in bytes_on_the_wire  # the greeting, which is not secret
    for word in (b'"serial"', b'"hello"', b'"plan"', b"a long and random text"):
        assert word not in bytes_on_the_wire
