"""Places to submit jobs to, for tests: a real Slurm, and real sshd, on hosts of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.clock import wait_for
from tests.hosts import ROOT, Hosts
from tests.kubernetes_server import KubernetesServer, bind_names
from tests.ports import free_ports
from tests.slurm import Slurm

#: what every test script begins with, after `at`, the site's folder
HEAD = """
import json, os, pathlib, signal, sys, time
os.chdir(at)
told = json.loads(os.environ.get("TF_CONFIG") or os.environ["CLUSTER_SPEC"])
task, roles = told["task"], sorted(told["cluster"])
if "TF_CONFIG" not in os.environ:  # on Vertex AI
    names, pool = ("worker", "worker", "ps", "evaluator"), int(task["type"][-1])
    task = {"type": names[pool], "index": task["index"] + (pool == 1)}
    roles = sorted({names[int(each[-1])] for each in roles})
me = f"{task['type']}-{task['index']}"
def note(name, value):
    pathlib.Path(f"{name}.part").write_text(str(value))
    os.replace(f"{name}.part", name)
note(f"pid-{me}", os.getpid())
"""


class Site:
    """A folder with a project, and the commands that its user runs there."""

    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Run a command of stratagem."""
        return self.run_there([sys.executable, "-m", "stratagem", *words])

    def shell(self, line: str) -> subprocess.Popen[str]:
        """Run a line of a documentation page."""
        bin_ = self.folder / "bin"
        bin_.mkdir(exist_ok=True)
        python = Path(sys.executable).parent
        program(bin_ / "stratagem", f'exec {python}/python -m stratagem "$@"')
        return self.run_there(["bash", "-c", f"PATH={bin_}:{python}:$PATH; {line}"])

    def run_there(self, command: list[str]) -> subprocess.Popen[str]:
        raise NotImplementedError

    def here(self, command: list[str], **environ: str) -> subprocess.Popen[str]:
        """Run a command on this machine, in the project."""
        return subprocess.Popen(
            command,
            cwd=self.folder / "project",
            env={**os.environ, **environ},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


class _OnHosts(Site):
    hosts: Hosts
    environ: dict[str, str]

    def run_there(self, command: list[str]) -> subprocess.Popen[str]:
        at = ["env", f"--chdir={self.folder / 'project'}"]  # whoever enters a host is in its root
        jobs = str(self.folder / "jobs")
        return self.hosts.start(0, *at, *command, STRATAGEM_JOBS=jobs, **self.environ)


class SlurmSite(_OnHosts):
    name = "slurm"

    def __init__(self, folder: Path) -> None:
        (folder / "slurm").mkdir()
        self.folder, self._slurm = folder, Slurm(folder / "slurm", nodes=4)
        self.hosts, self.environ = self._slurm.hosts, self._slurm.environ

    def options(self) -> list[str]:
        return ["--on", "slurm"]

    def run(self, *words: str) -> str:
        return self._slurm.run(*words).stdout

    def close(self) -> None:
        self._slurm.close()


class SshSite(_OnHosts):
    """sshd on hosts 1 and 2."""

    name = "ssh"

    def __init__(self, folder: Path) -> None:
        self.folder, self.environ = folder, {}
        self._keys = folder / "keys"
        self._keys.mkdir(mode=0o700)
        self.hosts = Hosts(3)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / name)]
            subprocess.run(words, check=True, timeout=20)
        Path("/run/sshd").mkdir(exist_ok=True)
        (self._keys / "sshd").write_text(
            f"HostKey {self._keys}/host\nAuthorizedKeysFile {self._keys}/user.pub\n"
            "StrictModes no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin yes\n"
            f"SetEnv PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n"
        )
        names = self.folder / "names"
        bind_names(self.hosts, 3, names, first=0)
        with names.open("a") as file:
            file.writelines(f"{self.hosts.address(i)} node{i}\n" for i in (1, 2))
        (self._keys / "ssh").write_text(
            f"Host *\n IdentityFile {self._keys}/user\n StrictHostKeyChecking no\n"
            f" UserKnownHostsFile {self._keys}/known\n LogLevel ERROR\n"
        )
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        for i in (1, 2):
            self.hosts.start(i, sshd, "-D", "-f", self._keys / "sshd")
        for i in (1, 2):
            self._await(i)

    def _await(self, host: int) -> None:
        until = time.monotonic() + 30
        words = [*self.hosts.inside(0), "ssh", "-F", self._keys / "ssh", f"node{host}", "true"]
        while subprocess.run(list(map(str, words)), capture_output=True, check=False).returncode:
            assert time.monotonic() < until, "sshd has not begun"
            time.sleep(0.1)

    def options(self) -> list[str]:
        nodes = ",".join(f"node{i}={self.hosts.address(i)}" for i in (1, 2))
        return ["--on", "ssh", "--hosts", nodes, "--ssh", f"ssh -F {self._keys}/ssh"]

    def shell(self, line: str) -> subprocess.Popen[str]:
        (self.folder / "bin").mkdir(exist_ok=True)
        program(self.folder / "bin" / "ssh", f'exec /usr/bin/ssh -F {self._keys}/ssh "$@"')
        return super().shell(line)

    def close(self) -> None:
        self.hosts.close()


class KubernetesSite(Site):
    """A fake API server that runs pods on hosts, and real kubectl on this machine."""

    name = "kubernetes"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        # the server has no schemas to check manifests with
        wrapper = '[ "$1" = create ] && set -- "$@" --validate=false\nexec {} "$@"'
        program(folder / "bin" / "kubectl", wrapper.format(shutil.which("kubectl")))
        self.hosts = Hosts(5)
        try:
            bind_names(self.hosts, 4, folder / "names")
            self.server = KubernetesServer(self.hosts, folder / "names", folder / "project")
        except BaseException:
            self.hosts.close()
            raise
        (folder / "config").write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "c",
                            "cluster": {"server": f"http://127.0.0.1:{self.server.port}"},
                        }
                    ],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
                    "current-context": "c",
                }
            )
        )

    def options(self) -> list[str]:
        return ["--on", "kubernetes", "--image", "here"]

    def run_there(self, command: list[str]) -> subprocess.Popen[str]:
        return self.here(
            command,
            STRATAGEM_JOBS=str(self.folder / "jobs"),
            PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}",
            KUBECONFIG=str(self.folder / "config"),
            HOME=str(self.folder),
            PYTHONPATH=str(ROOT),
        )

    def lose(self, task: str) -> None:
        """Kill the pod of a task."""
        role, _, index = task.partition("-")
        alive = (pod for pod in self.server.pods if pod.code is None)
        (pod,) = (pod for pod in alive if f"-{role}-0-{index}-" in pod.name)
        pod.end(signal.SIGKILL)

    def close(self) -> None:
        self.server.close()
        self.hosts.close()


def _below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [int(c) for t in threads for c in (t / "children").read_text().split()]
    except FileNotFoundError:
        return []  # it has ended meanwhile
    return children + [each for child in children for each in _below(child)]


class RaySite(Site):
    """Two nodes of a real Ray, which is installed in the folder STRATAGEM_TEST_RAY."""

    name = "ray"

    def __init__(self, folder: Path, packages: Path) -> None:
        self.folder = folder
        self._port, head = free_ports(2)
        self.address = f"127.0.0.1:{head}"
        self._temp = tempfile.mkdtemp(prefix="r", dir="/tmp")  # names of sockets are short
        self.logs = Path(self._temp)
        self._environ = {
            "PYTHONPATH": f"{packages}:{ROOT}",
            "PATH": f"{packages / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "STRATAGEM_JOBS": str(self.folder / "jobs"),
            "RAY_raylet_start_wait_time_s": "120",  # 30 are too few on a busy machine
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self._port}",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        try:
            dashboard = f"--dashboard-port={self._port}"
            self._node("--head", f"--port={head}", dashboard, f"--temp-dir={self._temp}")
            wait_for(self._answers, 120)
            wait_for(lambda: self._count() == 1, 120)
            self._second_node()
        except BaseException:
            self.close()
            raise

    def _second_node(self) -> None:
        self._node(f"--address={self.address}", "--node-ip-address=127.0.0.2")
        # as it comes it clears what jobs before it have in the folder that both share
        wait_for(lambda: self._count() == 2, 120)

    def _node(self, *options: str) -> None:
        common = ["--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"]
        common.append("--num-gpus=2")  # which nobody looks for
        common += ["--min-worker-port=40000", "--max-worker-port=44999"]  # none of the tests' own
        if not any("node-ip" in option for option in options):
            common.append("--node-ip-address=127.0.0.1")
        node = subprocess.Popen(
            ["ray", "start", "--block", *options, *common],
            env={**os.environ, **self._environ},
            stdout=(self.folder / "ray.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        self._nodes.append(node)

    def _answers(self) -> bool:
        assert self._nodes[0].poll() is None, (self.folder / "ray.log").read_text()
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/api/version", timeout=5):
                return True
        except OSError:
            return False

    def _count(self) -> int:
        """Return the number of nodes."""
        assert self._nodes[-1].poll() is None, (self.folder / "ray.log").read_text()
        with urlopen(f"http://127.0.0.1:{self._port}/nodes?view=summary", timeout=20) as answer:
            nodes = json.load(answer)["data"]["summary"]
        return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)

    def options(self) -> list[str]:
        return ["--on", "ray"]

    def run_there(self, command: list[str]) -> subprocess.Popen[str]:
        return self.here(command, **self._environ)

    def python(self, code: str, *words: str) -> subprocess.Popen[str]:
        """Run code without a file, like a notebook."""
        return self.run_there([sys.executable, "-c", code, *words])

    def lose(self, task: str) -> None:
        """Kill the actor of a task, which is a process of this machine."""
        place = int((self.folder / f"pid-{task}").read_text())
        while b"TaskPlace" not in Path(f"/proc/{place}/cmdline").read_bytes():
            place = int(Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()[1])
            assert place > 1, "it is no child of an actor"
        os.kill(place, signal.SIGKILL)

    def lose_node(self) -> None:
        """Kill all processes of the second node at once, as if its power failed."""
        node = self._nodes.pop()
        for pid in [*_below(node.pid), node.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait(60)

    def mend(self) -> None:
        """Start the second node again."""
        if len(self._nodes) == 1:
            self._second_node()

    def close(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()
            node.wait(60)
        shutil.rmtree(self._temp, ignore_errors=True)


class VertexSite(Site):
    """A loopback server that imitates Vertex AI and Cloud Logging, and Google's real clients."""

    name = "vertex"

    def __init__(self, folder: Path, packages: str) -> None:
        self.folder = folder
        (folder / "project").mkdir(exist_ok=True)
        (self.port,) = free_ports(1)
        self.environ = {
            "PYTHONPATH": f"{packages}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "STRATAGEM_JOBS": str(folder / "jobs"),
        }
        server = [sys.executable, "-m", "tests.vertex_server", str(self.port), str(folder)]
        self._server = self.here(server, **self.environ)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "serving\n"

    def options(self, **more: str) -> list[str]:
        given = {"project": "p", "region": "r", "image": "i:1", "bucket": "gs://b/jobs", **more}
        given["vertex_endpoint"] = f"http://127.0.0.1:{self.port}"
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value]
        return ["--on", "vertex", *options]

    def run_there(self, command: list[str], **more: str) -> subprocess.Popen[str]:
        return self.here(command, **{**self.environ, **more})

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(20)


def needs(tools: tuple[str, ...], packages: tuple[str, ...]) -> None:
    """Install missing programs, or skip the test if that is impossible."""

    def missing() -> list[str]:
        path = os.environ.get("PATH", "") + ":/usr/sbin"
        return [tool for tool in tools if shutil.which(tool, path=path) is None]

    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update"], capture_output=True, timeout=120, check=False)
        words = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
        subprocess.run(words, capture_output=True, timeout=300, check=False)
    if missing():
        pytest.skip(f"not here and cannot be installed: {', '.join(missing())}")


def finished(child: subprocess.Popen[str], within: float = 90) -> tuple[int, str]:
    """Wait for the command's end; return its exit code and all output."""
    said = child.communicate(timeout=within)[0]
    return child.returncode, said


def running(pattern: str) -> list[str]:
    """The command lines, on this machine and its hosts, that contain a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if pattern in line:
            found.append(line)
    return found


def site(name: str, folder: Path) -> Any:
    """Make a site of that kind."""
    if name == "slurm":
        needs(("slurmctld", "slurmd", "sbatch", "munged"), ("slurm-wlm", "munge"))
        return SlurmSite(folder)
    if name == "ray":
        packages = os.environ.get("STRATAGEM_TEST_RAY", "")
        if not packages:
            pytest.skip("pip install --target DIR 'ray[default]', and STRATAGEM_TEST_RAY=DIR")
        return RaySite(folder, Path(packages))
    if name == "vertex":
        packages = os.environ.get("STRATAGEM_TEST_VERTEX", "")
        if not packages:
            pytest.skip(
                "pip install --target DIR google-cloud-aiplatform google-cloud-logging, and "
                "STRATAGEM_TEST_VERTEX=DIR"
            )
        return VertexSite(folder, packages)
    if name == "kubernetes":
        needs(("kubectl",), ("kubernetes-client",))
        return KubernetesSite(folder)
    needs(("sshd", "ssh", "ssh-keygen"), ("openssh-server", "openssh-client"))
    return SshSite(folder)
