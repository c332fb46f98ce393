"""A real Slurm on hosts of network namespaces: a controller on host 0, nodes on the others."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.hosts import ROOT, Hosts

_CONFIGURATION = """ClusterName=test
SlurmctldHost=host0({first})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=15
"""


class Slurm:
    """A controller and `nodes` nodes; commands run on host 0."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self._folder, self._nodes = folder, range(1, nodes + 1)
        self.hosts = Hosts(nodes + 1)
        self._munged: subprocess.Popen[bytes] | None = None
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self._folder
        names = "".join(f"{self.hosts.address(i)} host{i}\n" for i in (0, *self._nodes))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        lines = [
            f"NodeName=host{i} NodeAddr={self.hosts.address(i)} CPUs=4 State=UNKNOWN"
            for i in self._nodes
        ]
        listed = ",".join(f"host{i}" for i in self._nodes)
        lines.append(f"PartitionName=all Nodes={listed} Default=YES MaxTime=INFINITE State=UP")
        conf = _CONFIGURATION.format(folder=folder, first=self.hosts.address(0))
        (folder / "slurm.conf").write_text(conf + "\n".join(lines) + "\n")
        for name in ("state", *(f"spool-host{i}" for i in self._nodes)):
            (folder / name).mkdir()
        # `ip netns exec` hides the groups, of which slurmd would ask which kind they are
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._munge()
        for i in (0, *self._nodes):
            self._on(i, "mount", "--bind", folder / "hosts", "/etc/hosts")
        self.hosts.start(0, "slurmctld", "-D", "-c", **self.environ)
        for i in self._nodes:
            self.hosts.start(i, "slurmd", "-D", "-N", f"host{i}", **self.environ)
        until = time.monotonic() + 30
        while self.run("sinfo", "-h", "-o", "%T").stdout.strip() != "idle":
            assert time.monotonic() < until, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)

    def _munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        options = [
            *("--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={self._folder}/munge.socket", f"--pid-file={self._folder}/munge.pid"),
            *(f"--seed-file={self._folder}/munge.seed", f"--log-file={self._folder}/munge.log"),
        ]
        self._munged = subprocess.Popen(["munged", *options], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while not (self._folder / "munge.socket").exists():
            assert time.monotonic() < until, "munged has not begun"
            time.sleep(0.05)

    def _on(self, host: int, *command: object) -> None:
        words = [*self.hosts.inside(host), *map(str, command)]
        subprocess.run(words, check=True, capture_output=True, timeout=20)

    def _at(self, folder: Path) -> list[str]:
        return ["env", f"--chdir={folder}"]  # whoever enters a host is in its root

    def start(self, *command: object, cwd: Path = ROOT, **environ: str) -> subprocess.Popen[str]:
        """Start a command on host 0."""
        return self.hosts.start(0, *self._at(cwd), *command, **self.environ, **environ)

    def run(
        self, *command: object, cwd: Path = ROOT, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on host 0."""
        return subprocess.run(
            [*self.hosts.inside(0), *self._at(cwd), *map(str, command)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **self.environ, **environ},
        )

    def close(self) -> None:
        self.hosts.close()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()
