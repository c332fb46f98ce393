"""Jobs for Kubernetes: an Indexed Job, a headless Service that names its pods, and a Secret.

They are sent with kubectl, which has the user's clusters and logins. The Job is made suspended and
woken when the rest is there; Service and Secret belong to it and go when it goes. All tasks of a
Job have the same resources. Logs and ends of pods are brought into the job's folder when somebody
asks, since Kubernetes forgets them with the pods.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from dataclasses import replace
from typing import Any

from stratagem.cluster.exit_cause import VARIABLE as BLAME_VARIABLE
from stratagem.cluster.handshake import SECRET_VARIABLE
from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.job_folder import JobFolder, TaskEnd, append_missing
from stratagem.launch.job_request import JobRequest, JobState
from stratagem.launch.verdict import write_end

_PORT = 2222
_KEPT = 7 * 24 * 3600  # seconds that an ended job stays on the cluster
_TAIL = 10  # lines that explain a failure
_CANCELLED = 143


class Kubernetes:
    """kubectl of this machine."""

    def prepare(self, request: JobRequest) -> JobRequest:
        if shutil.which("kubectl") is None:
            raise UsageError("there is no kubectl on this machine")
        if not request.settings.get("image"):
            raise UsageError(
                "which image? As in: --image registry/digits:1, with the script and stratagem in it"
            )
        if request.gpus and (request.ps or request.evaluator):
            raise UsageError(
                "on Kubernetes all tasks of a job have the same resources: leave out "
                "--gpus-per-worker, or --ps and --evaluator"
            )
        return request

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """The manifests; the secret itself is made when they are sent."""
        hidden = replace(request, environ=dict.fromkeys(request.environ, "(as it is here)"))
        documents = _manifests(hidden, _name(request, job), "(a secret)")
        return "\n".join(f"---\n{json.dumps(each, indent=2)}" for each in documents) + "\n"

    def send(self, request: JobRequest, job: JobFolder) -> str:
        name, (training, *rest) = _name(request, job), _manifests(request, _name(request, job))
        (job.path / "script").write_text(self.describe(request, job))
        job.sent("kubernetes", name, request)
        made = json.loads(_kubectl(request, "create", "-o", "json", "-f", "-", told=training))
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name}
        owner["uid"] = made["metadata"]["uid"]
        try:
            for each in rest:
                each["metadata"]["ownerReferences"] = [owner]
                _kubectl(request, "create", "-o", "json", "-f", "-", told=each)
            wake = json.dumps({"spec": {"suspend": False}})
            _kubectl(request, "patch", "job", name, "--type=merge", f"--patch={wake}")
        except BaseException:
            _kubectl(request, "delete", "job", name, "--ignore-not-found", "--wait=false")
            raise
        return name

    def state(self, job: JobFolder) -> JobState:
        if (end := job.end()) is not None:
            return end
        request, name = job.request, str(job.told["name"])
        found = _kubectl(request, "get", "job", name, "-o", "json", "--ignore-not-found")
        if not found.strip():
            job.ended(_CANCELLED, "somebody has deleted it")
            return job.end() or JobState("ended")
        waits = self._bring(job)
        status = json.loads(found).get("status", {})
        conditions = {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}
        if conditions & {"Complete", "Failed"}:
            write_end(job, int("Complete" not in conditions))
            return job.end() or JobState("ended")
        if waits or not status.get("active"):
            return JobState("waiting", text=waits or "for its pods")
        return JobState("running")

    def cancel(self, job: JobFolder) -> None:
        self._bring(job)
        name = str(job.told["name"])
        _kubectl(job.request, "delete", "job", name, "--cascade=foreground", "--ignore-not-found")
        job.ended(_CANCELLED, "cancelled")

    def _bring(self, job: JobFolder) -> str:
        """What pods have written, and how they have ended, into the job's folder; and what the
        first one that has not begun waits for."""
        request, name = job.request, str(job.told["name"])
        listed = _kubectl(request, "get", "pods", "-o", "json", f"--selector=job-name={name}")
        tasks, waits = request.tasks(), ""
        for pod in json.loads(listed)["items"]:
            index = pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]
            task = tasks[int(index)]
            self._bring_pod(job, task, pod)
            if why := _waits_for(pod):
                waits = waits or f"{task} for {why}"
        return waits

    def _bring_pod(self, job: JobFolder, task: Task, pod: dict[str, Any]) -> None:
        states = pod.get("status", {}).get("containerStatuses", [])
        ended = states[0]["state"].get("terminated") if states else None
        if not states or "waiting" in states[0]["state"] or "code" in job.task(task):
            return
        if not job.task(task):
            job.task_runs(task, str(pod["spec"].get("nodeName", "-")))
        lines = _kubectl(job.request, "logs", pod["metadata"]["name"], "--timestamps").split(b"\n")
        append_missing(job.log(task), lines[:-1])
        if ended is not None:
            tail = (line.partition(b" ")[2].decode(errors="replace") for line in lines[-_TAIL:-1])
            because, when = ended.get("message", ""), ended.get("finishedAt", "")
            job.task_ended(TaskEnd(task, ended["exitCode"], because, when, tuple(tail)))


ENGINE = Kubernetes()


def _waits_for(pod: dict[str, Any]) -> str:
    """Why a pod has not begun: no node has room, its image cannot be had; nothing if it has."""
    status = pod.get("status", {})
    for each in status.get("containerStatuses", ()):
        waiting = each["state"].get("waiting")
        return str(waiting.get("reason", "its container")) if waiting else ""
    refused = (c for c in status.get("conditions", ()) if c.get("status") == "False")
    return next((str(c.get("message") or c.get("reason")) for c in refused), "a node")


def _name(request: JobRequest, job: JobFolder) -> str:
    """Unlike all others: several jobs may have the same name."""
    return f"{request.name[:40].rstrip('-')}-{job.path.name.rpartition('-')[2]}"


def _kubectl(request: JobRequest, *words: str, told: Any = None) -> bytes:
    """What kubectl answers; what it is told goes through stdin, so that no secret is in `ps`."""
    more = [f"--{key}={value}" for key in _PLACE if (value := request.settings.get(key))]
    try:
        done = subprocess.run(
            ["kubectl", *more, *words],
            input=None if told is None else json.dumps(told).encode(),
            capture_output=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"kubectl {words[0]} has not answered in 120 s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = (lines or ["without a word"])[-1]
        raise UsageError(f"kubectl {words[0]} failed: {said}")
    return done.stdout


_PLACE = ("namespace", "context")


def _manifests(request: JobRequest, name: str, secret: str = "") -> list[dict[str, Any]]:
    """The Job, then what belongs to it."""
    tasks = request.tasks()
    addresses = [f"{name}-{i}.{name}:{_PORT}" for i in range(len(tasks))]
    variables: list[dict[str, Any]] = [
        {"name": "STRATAGEM_CLUSTER", "value": json.dumps(request.by_role(addresses))},
        # whom the task ends because of becomes the message of its end
        {"name": BLAME_VARIABLE, "value": "/dev/termination-log"},
        *(
            {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
            for key in (SECRET_VARIABLE, *request.environ)
        ),
    ]
    container: dict[str, Any] = {
        "name": "task",
        "image": request.settings["image"],
        "command": [request.python, "-m", "stratagem.launch.far_task", "kubernetes"],
        "args": list(request.words),
        "env": variables,
        "ports": [{"containerPort": _PORT}],
    }
    if request.folder:
        container["workingDir"] = request.folder
    if request.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": request.gpus}}
    spec: dict[str, Any] = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": len(tasks),
        "parallelism": len(tasks),
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": _KEPT,
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/managed-by": "stratagem"}},
            "spec": {
                "subdomain": name,
                "restartPolicy": "Never",
                "shareProcessNamespace": True,  # as process 1 a script would not hear SIGTERM
                "containers": [container],
            },
        },
    }
    if request.minutes is not None:
        spec["activeDeadlineSeconds"] = 60 * request.minutes
    labels = {"name": name, "labels": {"app.kubernetes.io/managed-by": "stratagem"}}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
    }
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**labels}, "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": {**labels}, "spec": service},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**labels},
            "stringData": {**request.environ, SECRET_VARIABLE: secret or secrets.token_hex(32)},
        },
    ]
