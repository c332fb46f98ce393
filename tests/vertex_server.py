"""A stand-in for Vertex AI's job service, over gRPC: it runs the replicas of a job as processes.

With google-cloud-logging it is Cloud Logging, too: a few entries a page, and some of them late.

python -m tests.vertex_server PORT FOLDER    with Google's client on the path

A container's command is run in FOLDER/project, /gcs/ is FOLDER/gcs/, and what replicas print are
entries, which also go to FOLDER/replicas/. What was received lies in FOLDER/received.json.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from google.cloud.aiplatform_v1.types import CustomJob, JobState, job_service
from google.protobuf import empty_pb2
from google.protobuf.json_format import MessageToDict

from tests.ports import free_ports

try:
    from google.cloud.logging_v2.types import (
        ListLogEntriesRequest,
        ListLogEntriesResponse,
        LogEntry,
    )
except ImportError:  # then nobody asks for entries
    LogEntry = None

_PAGE = 3  # entries
_LATE = 1.5  # seconds until every fourth entry is shown
_FAILED = (
    "The replica {name} exited with a non-zero status of {code}. To find out more about why your "
    "job exited please check the logs."
)


class Replicas:
    """The processes of one job."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self.state, self.error = JobState.JOB_STATE_RUNNING, ""
        #: when it is shown, when it was written, by whom, and what
        self.entries = [(time.time(), time.time(), "service", "the job is provisioned")]
        pools = spec["jobSpec"]["workerPoolSpecs"]
        counts = [int(pool.get("replicaCount", 0)) for pool in pools]
        ports = iter(free_ports(sum(counts)))
        cluster = {
            f"workerpool{pool}": [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for pool, count in enumerate(counts)
            if count
        }
        self._processes = {
            f"{pool}-{i}": self._start(pools[int(pool[-1])], cluster, pool, i, folder)
            for pool, listed in cluster.items()
            for i in range(len(listed))
        }
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self, pool: Any, cluster: Any, name: str, i: int, folder: Path) -> Any:
        container = pool["containerSpec"]
        told = {"cluster": cluster, "task": {"type": name, "index": i}, "environment": "cloud"}
        given = {each["name"]: each["value"] for each in container.get("env", ())}
        given = {key: text.replace("/gcs/", f"{folder}/gcs/", 1) for key, text in given.items()}
        (folder / "replicas").mkdir(exist_ok=True)
        args = [arg.replace("/gcs/", f"{folder}/gcs/", 1) for arg in container.get("args", ())]
        child = subprocess.Popen(
            [sys.executable, *container["command"][1:], *args],
            cwd=folder / "project",
            env={**os.environ, **given, "CLUSTER_SPEC": json.dumps(told)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log = folder / "replicas" / f"{name}-{i}.log"
        log.write_text("")
        threading.Thread(target=self._read, args=(child, f"{name}-{i}", log), daemon=True).start()
        return child

    def _read(self, child: Any, name: str, log: Path) -> None:
        for line in child.stdout:
            with log.open("a") as file:
                file.write(line)
            late = 0 if len(self.entries) % 4 else _LATE
            self.entries.append((time.time() + late, time.time(), name, line))

    def _watch(self) -> None:
        while self.state == JobState.JOB_STATE_RUNNING:
            time.sleep(0.1)
            codes = {name: child.poll() for name, child in self._processes.items()}
            failed = next((name for name, code in codes.items() if code), None)
            if failed is not None and self.state == JobState.JOB_STATE_RUNNING:
                self.error = _FAILED.format(name=failed, code=codes[failed])
                self.end(JobState.JOB_STATE_FAILED)
            elif all(code == 0 for code in codes.values()):
                self.state = JobState.JOB_STATE_SUCCEEDED

    def end(self, state: Any) -> None:
        for child in self._processes.values():
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
                child.wait(30)
        self.state = state


class Service:
    """What the client calls."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs = folder, dict[str, Replicas]()

    def create(self, request: Any, context: Any) -> Any:
        if "forbidden" in request.parent:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "you may not create jobs here")
        spec = MessageToDict(CustomJob.pb(request.custom_job))
        (self._folder / "received.json").write_text(json.dumps(spec))
        name = f"{request.parent}/customJobs/{len(self._jobs) + 1001}"
        self._jobs[name] = Replicas(spec, self._folder)
        return self._told(name)

    def get(self, request: Any, context: Any) -> Any:
        if request.name not in self._jobs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {request.name}")
        return self._told(request.name)

    def cancel(self, request: Any, context: Any) -> Any:
        self._jobs[request.name].end(JobState.JOB_STATE_CANCELLED)
        return empty_pb2.Empty()

    def logs(self, request: Any, context: Any) -> Any:
        """A page of the entries that are shown by now."""
        job, since = re.fullmatch(
            r'resource.type="ml_job" AND resource.labels.job_id="(\d+)"'
            r'(?: AND timestamp>="(.*)")?',
            request.filter,
        ).groups()
        (name,) = (each for each in self._jobs if each.endswith(f"/{job}"))
        assert request.resource_names == [name.partition("/locations")[0]]
        least = datetime.fromisoformat(since).timestamp() if since else 0.0
        shown = [
            (when, number, task, text)
            for number, (at, when, task, text) in enumerate(self._jobs[name].entries)
            if at <= time.time() and when >= least
        ]
        first = int(request.page_token or 0)
        page = [_entry(job, *each) for each in sorted(shown)[first : first + _PAGE]]
        more = str(first + _PAGE) if first + _PAGE < len(shown) else ""
        return ListLogEntriesResponse(entries=page, next_page_token=more)

    def _told(self, name: str) -> Any:
        job = self._jobs[name]
        return CustomJob(name=name, state=job.state, error={"message": job.error})


def _entry(job: str, when: float, number: int, task: str, text: str) -> Any:
    labels = {"job_id": job, "task_name": task}
    said = {"json_payload": {"message": text}} if number % 2 else {"text_payload": text}
    time_of = datetime.fromtimestamp(when, UTC)
    resource = {"type": "ml_job", "labels": labels}
    return LogEntry(insert_id=f"e{number}", timestamp=time_of, resource=resource, **said)


def main() -> None:
    service = Service(Path(sys.argv[2]))
    plain: Any = empty_pb2.Empty.SerializeToString
    calls: dict[str, tuple[Any, Any, Any]] = {
        "CreateCustomJob": (
            service.create,
            job_service.CreateCustomJobRequest,
            CustomJob.serialize,
        ),
        "GetCustomJob": (service.get, job_service.GetCustomJobRequest, CustomJob.serialize),
        "CancelCustomJob": (service.cancel, job_service.CancelCustomJobRequest, plain),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(call, given.deserialize, answer)
        for name, (call, given, answer) in calls.items()
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    where = "google.cloud.aiplatform.v1.JobService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(where, handlers),))
    if LogEntry is not None:
        one = grpc.unary_unary_rpc_method_handler(
            service.logs, ListLogEntriesRequest.deserialize, ListLogEntriesResponse.serialize
        )
        where = "google.logging.v2.LoggingServiceV2"
        logs = grpc.method_handlers_generic_handler(where, {"ListLogEntries": one})
        server.add_generic_rpc_handlers((logs,))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    print("serving", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
