"""Jobs for Kubernetes: manifests (kubernetes_kinds.py), sent with kubectl.

kubectl has the user's clusters and logins. The Job, JobSet or TrainJob is created suspended, and
resumed when its Service and Secret exist; these are owned by it and deleted with it. Every query of
the state copies logs and ends of pods into the job's folder, since Kubernetes deletes them with the
pods.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.engines.kubernetes_kinds import attempt_of, kind_of, manifests
from stratagem.launch.job_folder import (
    JobFolder,
    JobRequest,
    JobState,
    TaskEnd,
    append_missing,
    last_line,
)
from stratagem.launch.supervise import TOLD_TO_END, write_end

_TAIL = 10  # lines that explain a failure
_VOLUME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?=/\S+")


class Kubernetes:
    """Runs jobs with kubectl of this machine."""

    def prepare(self, request: JobRequest) -> JobRequest:
        if not request.name[0].isalpha():
            raise UsageError(
                f"{request.name!r} is no name on Kubernetes, where a letter comes first: as in "
                f"--name a{request.name[:51]}"
            )
        if not request.settings.get("image"):
            raise UsageError(
                "which image? As in: --image registry/digits:1, with the script and stratagem in it"
            )
        volume = request.settings.get("volume", "claim=/models")
        if not _VOLUME.fullmatch(volume):
            raise UsageError(
                f"--volume {volume}: write the name of a PersistentVolumeClaim and where pods find "
                "it, as in --volume models=/models"
            )
        kind_of(request).check(request)
        return request

    def check(self, request: JobRequest) -> JobRequest:
        if shutil.which("kubectl") is None:
            raise UsageError(
                "there is no kubectl on this machine: install it "
                "(https://kubernetes.io/docs/tasks/tools), or submit from a machine that has it"
            )
        return request

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """Return the manifests, without the secret, which is made when they are sent."""
        documents = manifests(request.hidden(), _name(request, job), "(a secret)")
        return "".join(f"---\n{_text(each)}" for each in documents)

    def send(self, request: JobRequest, job: JobFolder) -> str:
        name, (training, *rest) = _name(request, job), manifests(request, _name(request, job))
        (job.path / "script").write_text(self.describe(request, job))
        job.sent("kubernetes", name, request)
        made = json.loads(_create(request, training))
        what = kind_of(request).resource
        owner = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": name}
        owner["uid"] = made["metadata"]["uid"]
        try:
            for each in rest:
                each["metadata"]["ownerReferences"] = [owner]
                _create(request, each)
            wake = json.dumps({"spec": {"suspend": False}})
            _kubectl(request, "patch", what, name, "--type=merge", f"--patch={wake}")
        except BaseException:
            _kubectl(request, "delete", what, name, "--ignore-not-found", "--wait=false")
            raise
        return name

    def state(self, job: JobFolder) -> JobState:
        if (end := job.end()) is not None:
            return end
        request, name = job.request, str(job.record["name"])
        what = kind_of(request).resource
        found = _kubectl(request, "get", what, name, "-o", "json", "--ignore-not-found")
        if not found.strip():
            job.ended(TOLD_TO_END, "somebody has deleted it")
            return job.end() or JobState("ended")
        waits, made = self._bring(job), json.loads(found)
        if made["spec"].get("suspend") and not any(map(job.task, request.tasks())):
            why = "suspended, as if whoever submitted it was killed before all was sent"
            return JobState("waiting", text=f"{why}: stratagem cancel {job.handle}")
        status = made.get("status", {})
        conditions = {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}
        if conditions & {"Complete", "Completed", "Failed"}:
            write_end(job, int("Failed" in conditions))
            return job.end() or JobState("ended")
        if waits or not any(map(job.task, request.tasks())):
            return JobState("waiting", text=waits or "for its pods")
        return JobState("running")

    def cancel(self, job: JobFolder) -> None:
        self._bring(job)
        name = str(job.record["name"])
        what = kind_of(job.request).resource
        _kubectl(job.request, "delete", what, name, "--cascade=foreground", "--ignore-not-found")
        job.ended(TOLD_TO_END, "cancelled")

    def _bring(self, job: JobFolder) -> str:
        """Copy logs and ends of pods into the job's folder; return what the first pod that has not
        begun waits for."""
        request, name = job.request, str(job.record["name"])
        kind, waits = kind_of(request), ""
        listed = _kubectl(request, "get", "pods", "-o", "json", f"--selector={kind.label}={name}")
        pods = json.loads(listed)["items"]
        attempt = max((attempt_of(pod) for pod in pods), default=0)
        if attempt > (job.read("again.json") or {"times": 0})["times"]:
            _begin_again(job, attempt)
        for pod in (each for each in pods if attempt_of(each) == attempt):
            task = kind.task(request, pod)
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
        before = (job.read("again.json") or {"lines": {}})["lines"].get(str(task), 0)
        append_missing(job.log(task), lines[:-1], after=before)
        if ended is not None:
            tail = (line.partition(b" ")[2].decode(errors="replace") for line in lines[-_TAIL:-1])
            because, when = ended.get("message", ""), ended.get("finishedAt", "")
            job.task_ended(TaskEnd(task, ended["exitCode"], because, when, tuple(tail)))


ENGINE = Kubernetes()


def _waits_for(pod: dict[str, Any]) -> str:
    """Why a pod has not begun (no node has room, no image); empty if it has."""
    status = pod.get("status", {})
    for each in status.get("containerStatuses", ()):
        waiting = each["state"].get("waiting")
        return str(waiting.get("reason", "its container")) if waiting else ""
    refused = (c for c in status.get("conditions", ()) if c.get("status") == "False")
    return next((str(c.get("message") or c.get("reason")) for c in refused), "a node")


def _begin_again(job: JobFolder, attempt: int) -> None:
    """Begin a new attempt, whose pods are new and whose lines follow those in the logs."""
    lines = {
        str(task): job.log(task).read_bytes().count(b"\n")
        for task in job.request.tasks()
        if job.log(task).exists()
    }
    job.begin_again()
    job.write("again.json", {"times": attempt, "lines": lines})


def _name(request: JobRequest, job: JobFolder) -> str:
    """A short name: with the additions of JobSet a pod's name may have 63 letters."""
    return f"{request.name[:30].rstrip('-')}-{job.suffix}"


def _text(document: dict[str, Any]) -> str:
    return f"{json.dumps(document, indent=2)}\n"


def _create(request: JobRequest, document: dict[str, Any]) -> bytes:
    return _kubectl(request, "create", "-o", "json", "-f", "-", document=document)


def _kubectl(request: JobRequest, *words: str, document: Any = None) -> bytes:
    """Run kubectl; `document` goes through stdin, so that no secret shows in `ps`."""
    more = [f"--{key}={value}" for key in _PLACE if (value := request.settings.get(key))]
    try:
        done = subprocess.run(
            ["kubectl", *more, *words],
            input=None if document is None else _text(document).encode(),
            capture_output=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"kubectl {words[0]} has not answered in 120 s") from None
    if done.returncode:
        said = last_line(done.stderr.decode(errors="replace"))
        if "connection to the server" in said:
            said += " `kubectl get jobs` must work first; --context chooses another cluster"
        raise UsageError(f"kubectl {words[0]} failed: {said}")
    return done.stdout


_PLACE = ("namespace", "context")
