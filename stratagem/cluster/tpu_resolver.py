"""The hosts of a TPU slice, from the environment of TPU VMs and GKE."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stratagem.cluster.parsing import MAX_TASKS, join, number, port, wrong
from stratagem.cluster.spec import ClusterSpec, Place, Task
from stratagem.errors import UsageError

_HOSTS = "TPU_WORKER_HOSTNAMES"
#: variables of this host's index; the first that is set counts
_INDEX = ("JOB_COMPLETION_INDEX", "TPU_WORKER_ID", "NODE_RANK")
_PORT = 2222


class TPUClusterResolver:
    """The hosts of this TPU slice, and this host's index.

    sg.TPUStrategy(sg.TPUClusterResolver())

    Args:
        tpu: None, "" or "local": the TPU of this machine. TPUs elsewhere cannot be named; the
            script runs on their hosts.
        environ: used instead of os.environ.

    TPU_WORKER_HOSTNAMES lists the hosts; a single name, as on a lone TPU VM, is no cluster. The
    index is JOB_COMPLETION_INDEX, TPU_WORKER_ID or NODE_RANK.
    """

    def __init__(self, tpu: str | None = None, environ: Mapping[str, str] | None = None) -> None:
        if tpu not in (None, "", "local"):
            raise UsageError(
                f"tpu={tpu!r}: a TPU is not reached over the network; run the script on each host "
                "of it, with TPUClusterResolver()."
            )
        self._environ = os.environ if environ is None else environ
        listed = self._environ.get(_HOSTS, "").split(",")
        self.hosts = tuple(name.strip() for name in listed if name.strip())

    @property
    def index(self) -> int:
        """The index of this host."""
        if len(self.hosts) < 2:
            return 0
        name = next((each for each in _INDEX if self._environ.get(each)), _INDEX[0])
        why = f"{_HOSTS} lists {len(self.hosts)} hosts"
        return number(self._environ, name, 0, len(self.hosts) - 1, why=why)

    def place(self) -> Place | None:
        """Return this host's place in the cluster, or None for a single host."""
        if len(self.hosts) < 2:
            return None
        if len(self.hosts) > MAX_TASKS:
            raise wrong(f"more than {MAX_TASKS} hosts", _HOSTS, "host-0,host-1")
        at = port(self._environ, _PORT)
        spec = ClusterSpec(
            {"worker": [join(host, at) for host in self.hosts]},
            where=_HOSTS,
            example="host-0,host-1",
        )
        return Place(spec, Task("worker", self.index), _HOSTS)
