"""Hosts of tests are hosts to the library: machines of their own, and gradients travel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clock import wait_for
from tests.host_jobs import HostFault
from tests.hosts import ROOT, Hosts, needs_hosts

pytestmark = pytest.mark.timeout(100)

#: what the library tells machines apart by, and how many processes there are to be seen
WHO = "cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/pid; ls /proc | grep -c '^[0-9]'"
TRAIN = """
import torch
import stratagem as sg
from tests.support import data, mlp
torch.set_num_threads(1)
strategy = sg.MultiWorkerMirroredStrategy()
x, y = data(100)
with strategy.scope():
    model = sg.Model(mlp())
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
model.fit(x, y, batch_size=32, epochs=2, verbose=0)
print(strategy.run(lambda: type(sg.current_replica().collective).__name__))
print(round(float(sum(p.detach().double().sum() for p in model.module.parameters())), 4))
"""


@needs_hosts
def test_each_is_a_machine_of_its_own() -> None:
    with Hosts(2) as hosts:
        asked = [hosts.start(i, "sh", "-c", WHO) for i in (0, 0, 1)]
        here, too, there = [each.communicate(timeout=30)[0].split() for each in asked]
    assert here[:2] == too[:2]
    assert here[0] != there[0] and here[1] != there[1]
    assert all(int(each[2]) < 20 for each in (here, too, there))


@needs_hosts
def test_nothing_is_left_of_them_when_a_test_dies() -> None:
    """Killed in the middle, with a task that runs on a host: no process, no namespace stays."""
    source = """
import sys, time
from tests.clock import wait_for
from tests.host_jobs import HostFault
from tests.hosts import ROOT, Hosts
hosts = Hosts(2)
hosts.start(1, "sleep", "4711")
print(hosts._switch.removesuffix("switch"), hosts._folder.name, flush=True)
time.sleep(100)
"""
    command = [sys.executable, "-c", source]
    test = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert test.stdout is not None
    prefix, folder = test.stdout.readline().split()

    def left() -> list[str]:
        spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        running = subprocess.run(["ps", "-ewwo", "cmd"], capture_output=True, text=True).stdout
        lines = (spaces + running).splitlines()
        return [each for each in lines if each.startswith(prefix) or folder in each]

    try:
        assert len(left()) >= 5, "two hosts, their switch, and the first processes of both"
    finally:
        test.kill()
        test.communicate()
    wait_for(lambda: not left() and not Path(folder).exists(), 10, "for hosts to be gone")


def test_faults_are_read_as_they_are_written() -> None:
    assert HostFault.parse("cut worker 1 at step 40 for 5 s") == HostFault("cut", 1, 40, 5.0)
    assert HostFault.parse("kill worker 2 at step 7") == HostFault("kill", 2, 7)
    for wrong in ("kill worker 2 at step 7 for 5 s", "cut worker 1", "burn worker 1 at step 4"):
        with pytest.raises(ValueError, match="is no fault; write: cut"):
            HostFault.parse(wrong)


@pytest.mark.slow
@needs_hosts
def test_between_hosts_gradients_travel(tmp_path: Path) -> None:
    """And on one host they do not: the same script, the same cluster, another place."""
    (tmp_path / "train.py").write_text(TRAIN)

    def trained(places: tuple[int, int]) -> list[list[str]]:
        with Hosts(2) as hosts:
            workers = [f"{hosts.address(host)}:{2222 + i}" for i, host in enumerate(places)]
            running = [
                hosts.start(
                    host,
                    sys.executable,
                    tmp_path / "train.py",
                    STRATAGEM_SECRET="of a test",
                    TF_CONFIG=json.dumps(
                        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}
                    ),
                )
                for i, host in enumerate(places)
            ]
            return [each.communicate(timeout=60)[0].splitlines()[-2:] for each in running]

    apart, together = trained((0, 1)), trained((0, 0))
    assert [way for way, _ in apart] == ["['TorchCollective']"] * 2, apart
    assert [way for way, _ in together] == ["['SharedMemoryCollective']"] * 2, together
    assert len({weights for _, weights in (*apart, *together)}) == 1
