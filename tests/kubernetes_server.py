"""A server that speaks as much of Kubernetes' API as kubectl needs for Jobs, and runs the pods.

It keeps Jobs, JobSets, Services and Secrets of one namespace, names pods in the hosts' files as
its DNS would, runs each pod's command on a host of its own, ends the pods of a Job that fails or is
deleted, and takes along what belongs to it. There is no image: commands run with this Python.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.hosts import ROOT, Hosts

_KINDS = {
    "jobs": "Job",
    "jobsets": "JobSet",
    "services": "Service",
    "secrets": "Secret",
    "pods": "Pod",
}
_PATH = re.compile(
    r"/(?:api/v1|apis/batch/v1|apis/jobset.x-k8s.io/v1alpha2)/namespaces/default/"
    r"(?P<kind>\w+)(?:/(?P<name>[\w-]+))?(?P<log>/log)?"
)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Refusal(Exception):
    """An answer that is no 200."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class Part:
    """Where a pod is in its Job, or in its JobSet."""

    spec: dict[str, Any]
    index: int
    host: int
    hostname: str
    labels: dict[str, str]


def parts(job: dict[str, Any], attempt: int) -> list[Part]:
    """The pods that a Job or a JobSet is to have."""
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "Job":
        labels = {"job-name": name}
        return [Part(spec, i, i + 1, f"{name}-{i}", labels) for i in range(spec["completions"])]
    found: list[Part] = []
    for each in spec["replicatedJobs"]:
        labels = {"replicatedjob-name": each["name"], "restart-attempt": str(attempt)}
        labels = {f"jobset.sigs.k8s.io/{k}": v for k, v in {**labels, "jobset-name": name}.items()}
        inner = each["template"]["spec"]
        for i in range(inner["completions"]):
            hostname = f"{name}-{each['name']}-0-{i}"
            found.append(Part(inner, i, len(found) + 1, hostname, labels))
    return found


class Pod:
    """One pod: a process on a host, and what it writes."""

    def __init__(
        self,
        name: str,
        part: Part,
        secret: dict[str, str],
        hosts: Hosts,
        names: Path,
        cwd: Path,
    ) -> None:
        self.job, self.index, self.lines = name, part.index, list[str]()
        self._labels = part.labels
        self.name = f"{part.hostname}-{uuid.uuid4().hex[:5]}"
        self.host, self.code, self.ended = part.host, None, ""
        (container,) = part.spec["template"]["spec"]["containers"]
        environ = {
            each["name"]: each.get("value") or secret[each["name"]] for each in container["env"]
        }
        self._message = names.with_name(f"message-{self.name}")
        environ["STRATAGEM_BLAME"] = str(self._message)
        python, *command = container["command"]
        assert python == "python"
        claims = {
            each["name"]: str(cwd / each["persistentVolumeClaim"]["claimName"])
            for each in part.spec["template"]["spec"].get("volumes", ())
        }
        args = container["args"]
        for each in container.get("volumeMounts", ()):  # a claim is a folder of the project
            args = [a.replace(f"{each['mountPath']}/", f"{claims[each['name']]}/") for a in args]
        words = ["env", f"--chdir={cwd}", sys.executable, *command, *args]
        self.process = hosts.start(
            self.host, *words, JOB_COMPLETION_INDEX=str(part.index), PYTHONPATH=str(ROOT), **environ
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(f"{_now()} {line}")
        code = self.process.wait()
        self.ended = f"{_now()[:19]}Z"  # Kubernetes has whole seconds
        self.code = code if code >= 0 else 128 - code

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """By its number on this machine; on its own host it has another."""
        below = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in below.split():
            os.kill(int(pid), number)

    def to_json(self) -> dict[str, Any]:
        state: dict[str, Any] = {"running": {}}
        if self.code is not None:
            state = {"terminated": {"exitCode": self.code, "finishedAt": self.ended}}
            if self._message.exists():
                state["terminated"]["message"] = self._message.read_text()
        notes = {"batch.kubernetes.io/job-completion-index": str(self.index)}
        metadata = {"name": self.name, "namespace": "default", "annotations": notes}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**metadata, "labels": self._labels},
            "spec": {"nodeName": f"host{self.host}", "containers": [{"name": "task"}]},
            "status": {"containerStatuses": [{"name": "task", "state": state}]},
        }


class KubernetesServer:
    """The API at http://127.0.0.1:port; pods run on hosts 1, 2, ... in `cwd`."""

    def __init__(self, hosts: Hosts, names: Path, cwd: Path) -> None:
        self._hosts, self._names, self._cwd = hosts, names, cwd
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[Pod] = []
        #: how often JobSets have begun again
        self.attempts: dict[str, int] = {}
        #: kinds that may not be created, or whose names are taken; how many answers are cut off
        self.forbidden: set[str] = set()
        self.taken: set[str] = set()
        #: kinds of which the next is never answered, since whoever asked is killed
        self.held: set[str] = set()
        self.drop = 0
        self._lock = threading.RLock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if server.drop:
                    server.drop -= 1
                    self.connection.close()
                    return
                try:
                    found: Any = server.handle(self.command, self.path, body)
                    code = 201 if self.command == "POST" else 200
                except Refusal as refusal:
                    code = refusal.code
                    found = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
                    found |= {"code": code, "reason": refusal.reason, "message": str(refusal)}
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(code)
                kind = "text/plain" if isinstance(found, str) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = answer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def handle(self, method: str, path: str, body: bytes) -> Any:
        parts = urlsplit(path)
        if (found := _discovery(parts.path)) is not None:
            return found
        match = _PATH.fullmatch(parts.path)
        if match is None:
            raise Refusal(404, "NotFound", f"the server could not find {parts.path}")
        kind, name = match["kind"], match["name"]
        if method == "POST" and kind in self.held:
            self.held.remove(kind)
            time.sleep(8)
            raise Refusal(504, "Timeout", "too late: whoever asked is no more")
        with self._lock:
            self._control()
            if kind == "pods":
                return self._pods(name, parse_qs(parts.query), log=bool(match["log"]))
            if method == "POST":
                return self._create(kind, json.loads(body))
            if (kind, name) not in self.objects:
                raise Refusal(404, "NotFound", f'{kind} "{name}" not found')
            if method == "PATCH":
                self.objects[kind, name]["spec"].update(json.loads(body)["spec"])
                self._begin(self.objects[kind, name])
            if method == "DELETE":
                self._delete(kind, name)
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            return self.objects[kind, name]

    def _create(self, kind: str, made: dict[str, Any]) -> dict[str, Any]:
        name = made["metadata"]["name"]
        if kind in self.forbidden:
            raise Refusal(403, "Forbidden", f'{kind} "{name}" is forbidden: you may not')
        if (kind, name) in self.objects or kind in self.taken:
            raise Refusal(409, "AlreadyExists", f'{kind} "{name}" already exists')
        if not _LABEL.fullmatch(name):
            raise Refusal(422, "Invalid", f"{name} is no DNS label")
        made["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": "default"}
        if kind == "secrets":
            plain = made.pop("stringData", {})
            made["data"] = {k: base64.b64encode(v.encode()).decode() for k, v in plain.items()}
        self.objects[kind, name] = made
        return made

    def _begin(self, job: dict[str, Any]) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        if spec["suspend"] or any(pod.job == name for pod in self.pods):
            return
        if job["kind"] == "Job":
            subdomain = spec["template"]["spec"]["subdomain"]
            service = self.objects["services", subdomain]
            assert service["spec"]["selector"] == {"job-name": name}
        else:
            subdomain = spec["network"]["subdomain"]
        wanted = parts(job, self.attempts.get(name, 0))
        lines = [
            f"{self._hosts.address(part.host)} {part.hostname}.{subdomain}\n" for part in wanted
        ]
        with self._names.open("a") as file:
            file.write("".join(lines))
        data = self.objects["secrets", name]["data"]
        secret = {key: base64.b64decode(value).decode() for key, value in data.items()}
        for part in wanted:
            self.pods.append(Pod(name, part, secret, self._hosts, self._names, self._cwd))

    def _control(self) -> None:
        """What the controller of Jobs does."""
        for (kind, name), job in list(self.objects.items()):
            pods = [pod for pod in self.pods if pod.job == name]
            if kind not in ("jobs", "jobsets") or not pods:
                continue
            alive = [pod for pod in pods if pod.code is None]
            job["status"] = status = {"active": len(alive)}
            if any(pod.code for pod in pods):
                for pod in alive:
                    pod.end()
                if not alive and self._again(job):
                    continue
                status["conditions"] = [] if alive else [{"type": "Failed", "status": "True"}]
            elif not alive:
                how = "Complete" if kind == "jobs" else "Completed"
                status["conditions"] = [{"type": how, "status": "True"}]

    def _again(self, job: dict[str, Any]) -> bool:
        """Begin a JobSet again, if it may."""
        name, attempt = job["metadata"]["name"], self.attempts.get(job["metadata"]["name"], 0)
        if attempt >= job["spec"].get("failurePolicy", {}).get("maxRestarts", 0):
            return False
        self.attempts[name] = attempt + 1
        self.pods = [pod for pod in self.pods if pod.job != name]
        self._begin(job)
        return True

    def _delete(self, kind: str, name: str) -> None:
        for pod in [pod for pod in self.pods if pod.job == name]:
            if pod.code is None:
                pod.end()
            until = time.monotonic() + 30
            while pod.code is None and time.monotonic() < until:
                time.sleep(0.05)
            self.pods.remove(pod)
        uid = self.objects.pop((kind, name))["metadata"]["uid"]
        for key, found in list(self.objects.items()):
            owners = found["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == uid for owner in owners):
                del self.objects[key]

    def _pods(self, name: str | None, query: dict[str, list[str]], *, log: bool) -> Any:
        if name is None:
            wanted = query["labelSelector"][0].partition("=")[2]
            items = [pod.to_json() for pod in self.pods if pod.job == wanted]
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        pod = next((pod for pod in self.pods if pod.name == name), None)
        if pod is None:
            raise Refusal(404, "NotFound", f'pods "{name}" not found')
        return "".join(pod.lines) if log else pod.to_json()


def _discovery(path: str) -> Any:
    """What kubectl asks first."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for group, number in (("batch", "v1"), ("jobset.x-k8s.io", "v1alpha2")):
            version = {"groupVersion": f"{group}/{number}", "version": number}
            groups.append({"name": group, "versions": [version], "preferredVersion": version})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    names = {
        "/api/v1": ("services", "secrets", "pods"),
        "/apis/batch/v1": ("jobs",),
        "/apis/jobset.x-k8s.io/v1alpha2": ("jobsets",),
    }.get(path)
    if names is None:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    resources = [
        {"name": name, "kind": _KINDS[name], "namespaced": True, "verbs": verbs} for name in names
    ]
    version = path.removeprefix("/apis/").removeprefix("/api/")
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def bind_names(hosts: Hosts, count: int, names: Path, first: int = 1) -> None:
    """Have so many hosts read that file for names."""
    names.write_text("127.0.0.1 localhost\n")
    for i in range(first, first + count):
        words = [*hosts.inside(i), "mount", "--bind", str(names), "/etc/hosts"]
        subprocess.run(words, check=True, capture_output=True, timeout=20)
