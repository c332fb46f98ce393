"""Kubernetes: an Indexed Job behind a headless Service.

Kubernetes sets JOB_COMPLETION_INDEX. The manifest sets STRATAGEM_WORKERS (its `completions`) and
STRATAGEM_SERVICE (its `subdomain`); STRATAGEM_PORT (2222) and STRATAGEM_JOB (the hostname less
its index) are optional. Pod i is reached as <job>-<i>.<service>.
"""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster.parsing import MAX_TASKS, join, number, port, quote, wrong
from stratagem.cluster.spec import ClusterSpec, Place, Task

DEFAULT_PORT = 2222


def detect(environ: Mapping[str, str]) -> Place | None:
    """The place of this pod, if its Job is indexed and says how many workers it has."""
    if not environ.get("STRATAGEM_WORKERS"):
        return None
    service = environ.get("STRATAGEM_SERVICE", "").strip()
    if not service and not environ.get("JOB_COMPLETION_INDEX"):
        return None
    size = number(environ, "STRATAGEM_WORKERS", 1, MAX_TASKS)
    # A Service without an index is an error: every pod would train alone and nobody would know.
    why = f"completionMode: Indexed sets it; STRATAGEM_WORKERS is {size}"
    index = number(environ, "JOB_COMPLETION_INDEX", 0, size - 1, why=why)
    if not service:
        raise wrong(
            "not set; it must be the headless Service that names the pods",
            "STRATAGEM_SERVICE",
            "STRATAGEM_SERVICE=trainer",
        )
    job, at = _job(environ, index), port(environ, DEFAULT_PORT)
    spec = ClusterSpec(
        {"worker": [join(f"{job}-{i}.{service}", at) for i in range(size)]},
        where="STRATAGEM_JOB, STRATAGEM_SERVICE",
        example="STRATAGEM_JOB=train STRATAGEM_SERVICE=trainer",
    )
    return Place(spec, Task("worker", index), "Kubernetes")


def _job(environ: Mapping[str, str], index: int) -> str:
    """The Job's name: pods are called <job>-<index>."""
    if named := environ.get("STRATAGEM_JOB", "").strip():
        return named
    pod = environ.get("HOSTNAME", "").strip().partition(".")[0]
    job = pod.removesuffix(f"-{index}")
    if job in ("", pod):
        raise wrong(
            f"{quote(pod)} does not end in -{index} (JOB_COMPLETION_INDEX), "
            "so the Job's name is unknown; set STRATAGEM_JOB",
            "HOSTNAME",
            "STRATAGEM_JOB=train",
        )
    return job
