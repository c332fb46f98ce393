"""Jobs for Vertex AI: a CustomJob of worker pools, sent by Google's client.

    pool 0   worker 0, the chief: exactly one replica
    pool 1   the other workers
    pool 2   parameter servers
    pool 3   the evaluator

Everybody who may read the job can read its description, so the secret is not in it: the chief
writes one into the job's folder in the bucket, where the other tasks read it (far_task.py).
"""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from stratagem.cluster.spec import Task
from stratagem.errors import StratagemError, UsageError
from stratagem.launch.job_folder import (
    JobFolder,
    JobRequest,
    JobState,
    TaskEnd,
    append_missing,
    last_state,
    now,
)
from stratagem.launch.supervise import TOLD_TO_END, write_end

_BACK = timedelta(seconds=60)
_PAGE = 1000
_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_KNOWN = "logged.json"
_MACHINE = "n1-standard-4"
_INSTALL = "pip install google-cloud-aiplatform"
_SECONDS = 60.0  # for one answer
_SETTLE = 4.0  # from a job's end until its last lines are in Cloud Logging
_LATE = timedelta(minutes=10)  # after the end, in which a query may still find new lines
_TAIL = 10  # lines that explain a failure
_STATES = {
    "JOB_STATE_QUEUED": "waiting",
    "JOB_STATE_PENDING": "waiting",
    "JOB_STATE_PAUSED": "waiting",
    "JOB_STATE_RUNNING": "running",
    "JOB_STATE_UPDATING": "running",
    "JOB_STATE_CANCELLING": "running",
}
#: how Vertex AI names the replica that failed first
_CULPRIT = re.compile(r"replica (workerpool\d)-(\d+) exited with a non-zero status of (\d+)")


class Vertex:
    """Runs custom jobs in the project and region of `--project` and `--region`."""

    def prepare(self, request: JobRequest) -> JobRequest:
        settings = request.settings
        for key, example in (("project", "my-project"), ("region", "us-central1")):
            if not settings.get(key):
                raise UsageError(f"which {key}? As in: --{key} {example}")
        if request.environ:
            raise UsageError(
                "whoever may read a Vertex AI job may read its variables: leave --env out, and put "
                "values into the image, or ask Secret Manager for them in the script"
            )
        if request.gpus and not settings.get("accelerator"):
            raise UsageError("which GPUs? As in: --accelerator NVIDIA_TESLA_T4")
        if len(request.tasks()) > 1 and not str(settings.get("bucket", "")).startswith("gs://"):
            raise UsageError(
                "tasks of a job on Vertex AI find each other's secret in a bucket: "
                "--bucket gs://my-bucket/jobs"
            )
        if request.gpus not in (0, 1, 2, 4, 8, 16):
            raise UsageError(
                f"a machine of Vertex AI has 1, 2, 4, 8 or 16 GPUs, not {request.gpus}"
            )
        if not settings.get("image"):
            raise UsageError(
                "which image? As in: --image us-docker.pkg.dev/my-project/jobs/digits:1, with the "
                "script and stratagem in it"
            )
        return request

    def check(self, request: JobRequest) -> JobRequest:
        _message(_custom_job(request, request.name))
        return request

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """The CustomJob, as its REST API and `gcloud ai custom-jobs create` spell it."""
        return json.dumps(_custom_job(request, f"{request.name}-{job.suffix}"), indent=2) + "\n"

    def send(self, request: JobRequest, job: JobFolder) -> str:
        text = self.describe(request, job)
        (job.path / "script").write_text(text)
        job.sent("vertex", "", request)
        with _one_sentence():
            made = _client(request).create_custom_job(
                parent=_parent(request), custom_job=_message(json.loads(text)), timeout=_SECONDS
            )
        name = str(made.name).rpartition("/")[2]
        job.sent("vertex", name, request)
        return name

    def state(self, job: JobFolder) -> JobState:
        if (end := job.end()) is not None:
            ended = datetime.fromisoformat((job.read("end.json") or {})["when"])
            if datetime.now(UTC) - ended < _LATE:
                _bring_logs(job)
            return end
        request = job.request
        _bring_logs(job)
        with _one_sentence():
            found = _client(request).get_custom_job(name=_resource(job), timeout=_SECONDS)
        state = found.state.name
        if state in _STATES:
            if _STATES[state] == "running":
                for task in request.tasks():
                    if not job.task(task):
                        job.task_runs(task, _replica(task))
                return JobState("running")
            return JobState("waiting", text=state.removeprefix("JOB_STATE_").lower())
        time.sleep(_SETTLE)
        _bring_logs(job)
        if state == "JOB_STATE_CANCELLED":
            job.ended(TOLD_TO_END, "cancelled")
        elif state == "JOB_STATE_SUCCEEDED":
            job.ended(0, "")
        else:
            _write_failure(job, str(found.error.message) or state)
        return job.end() or JobState("ended")

    def cancel(self, job: JobFolder) -> None:
        with _one_sentence():
            _client(job.request).cancel_custom_job(name=_resource(job), timeout=_SECONDS)


ENGINE = Vertex()


def _custom_job(request: JobRequest, name: str) -> dict[str, Any]:
    settings = request.settings
    container: dict[str, Any] = {
        "imageUri": settings.get("image", ""),
        "command": [request.python, "-m", "stratagem.launch.far_task", "vertex"],
        "args": list(request.words),
    }
    more: dict[str, Any] = {}
    if bucket := str(settings.get("bucket", "")).rstrip("/"):
        more["baseOutputDirectory"] = {"outputUriPrefix": f"{bucket}/{name}"}
        folder = f"/gcs/{bucket.removeprefix('gs://')}/{name}"  # as the machines mount it
        container["env"] = [{"name": "STRATAGEM_FOLDER", "value": folder}]
    if request.minutes is not None:
        more["scheduling"] = {"timeout": f"{60 * request.minutes}s"}
    machine = {"machineType": settings.get("machine_type") or _MACHINE}
    with_gpus: dict[str, Any] = dict(machine)
    if request.gpus:
        with_gpus["acceleratorType"] = settings["accelerator"]
        with_gpus["acceleratorCount"] = request.gpus
    counts = [1, request.workers - 1, request.ps, int(request.evaluator)]
    while not counts[-1]:
        counts.pop()
    pools = [
        {
            "machineSpec": dict(with_gpus if number < 2 else machine),
            "replicaCount": str(count),
            "containerSpec": container,
        }
        if count
        else {}
        for number, count in enumerate(counts)
    ]
    return {"displayName": name, "jobSpec": {"workerPoolSpecs": pools, **more}}


def _replica(task: Task) -> str:
    """Vertex AI's name for a task."""
    if task.type == "worker":
        return f"workerpool1-{task.index - 1}" if task.index else "workerpool0-0"
    return f"workerpool{2 if task.type == 'ps' else 3}-{task.index}"


def _write_failure(job: JobFolder, text: str) -> None:
    """Write which task failed first, if Vertex AI's message names one."""
    match = _CULPRIT.search(text)
    named = {_replica(task): task for task in job.request.tasks()}
    task = named.get(f"{match[1]}-{match[2]}") if match else None
    if match is None or task is None:
        job.ended(1, text)
        return
    job.task_ended(
        TaskEnd(task, int(match[3]), "", now(), tuple(_last_lines(job, task) or (text,)))
    )
    write_end(job, int(match[3]))


def _last_lines(job: JobFolder, task: Task) -> list[str]:
    """The last lines of a task that are in its log."""
    if not job.log(task).exists():
        return []
    lines = job.log(task).read_text(errors="replace").splitlines()[-_TAIL:]
    return [line.partition(" ")[2] for line in lines]


def _bring_logs(job: JobFolder) -> None:
    """Copy lines from Cloud Logging; if that is impossible, log a command that shows them."""
    request = job.request
    named = {_replica(task): task for task in request.tasks()}
    endpoint = str(request.settings.get("vertex_endpoint", ""))
    here = endpoint.removeprefix("http://") if endpoint.startswith("http://") else None
    try:
        _bring(job, named, here)
    except NoLogs as problem:
        where = " ".join(f"--{key}={request.settings[key]}" for key in ("project", "region"))
        command = f"gcloud ai custom-jobs stream-logs {job.record['name']} {where}"
        line = f"{now()} {command} shows what tasks print ({problem})"
        append_missing(job.log(Task("worker", 0)), [line.encode()])


# --- Google's client ----------------------------------------------------------------------------


def _parent(request: JobRequest) -> str:
    return f"projects/{request.settings['project']}/locations/{request.settings['region']}"


def _resource(job: JobFolder) -> str:
    return f"{_parent(job.request)}/customJobs/{job.record['name']}"


def _message(spec: dict[str, Any]) -> Any:
    """Parse a CustomJob by Google's client, which knows every field and accelerator."""
    try:
        from google.cloud.aiplatform_v1.types import CustomJob
        from google.protobuf.json_format import ParseDict, ParseError
    except ImportError as problem:
        raise UsageError(f"Vertex AI needs Google's client ({problem}): {_INSTALL}") from None
    try:
        return CustomJob(ParseDict(spec, CustomJob.pb(CustomJob())))
    except ParseError as problem:
        raise UsageError(f"Vertex AI does not know this: {problem}") from None


def _client(request: JobRequest) -> Any:
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.aiplatform_v1.services.job_service import JobServiceClient

    region = request.settings["region"]
    endpoint = str(request.settings.get("vertex_endpoint") or f"{region}-aiplatform.googleapis.com")
    if endpoint.startswith("http://"):
        return JobServiceClient(transport=_on_this_machine(endpoint.removeprefix("http://")))
    try:
        return JobServiceClient(client_options={"api_endpoint": endpoint})
    except DefaultCredentialsError:
        raise UsageError(
            "there is no login to Google Cloud here: gcloud auth application-default login, or "
            "GOOGLE_APPLICATION_CREDENTIALS"
        ) from None


def _on_this_machine(address: str) -> Any:
    """Return a transport to a fake service on this machine, without login or encryption."""
    import grpc
    from google.cloud.aiplatform_v1.services.job_service.transports import JobServiceGrpcTransport

    if address.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
        raise UsageError(
            "--vertex-endpoint http://... works on this machine only; leave http:// out"
        )
    return JobServiceGrpcTransport(channel=grpc.insecure_channel(address))


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn errors of Google's client into one sentence."""
    from google.api_core import exceptions

    try:
        yield
    except (exceptions.DeadlineExceeded, exceptions.ServiceUnavailable) as problem:
        raise StratagemError(
            f"Vertex AI has not answered ({problem.message}): `gcloud ai custom-jobs list` says "
            "whether the job is there"
        ) from None
    except exceptions.GoogleAPICallError as problem:
        raise UsageError(f"Vertex AI refuses: {problem.message}") from None


# --- what tasks print: entries of Cloud Logging --------------------------------------------------


class NoLogs(Exception):
    """The reason why Cloud Logging cannot be read from here."""


def _bring(job: JobFolder, tasks: Mapping[str, Task], address: str | None) -> None:
    """Append new entries to the logs of `tasks`, by the names that Vertex AI has for them.

    Entries appear late and out of order. So each query goes back a minute, and entries that were
    copied are known by time and id (logged.json).

    `address`: a stand-in on this machine. Lines of Vertex AI itself go to the first task.
    """
    client = _log_client(address)
    project, number = job.request.settings["project"], job.record["name"]
    with _alone(job):
        known = job.read(_KNOWN) or {"seen": [], "last": ""}
        wanted = f'resource.type="ml_job" AND resource.labels.job_id="{number}"'
        if known["last"]:
            since = datetime.strptime(known["last"], _FORMAT) - _BACK
            wanted += f' AND timestamp>="{since.strftime(_FORMAT)}"'
        seen, new = set(known["seen"]), dict[str, Any]()
        for entry in _entries(client, f"projects/{project}", wanted):
            key = f"{_when(entry)} {entry.insert_id}"
            if key not in seen:
                new[key] = entry
        first = next(iter(tasks.values()))
        for _, entry in sorted(new.items()):
            name = entry.resource.labels.get("task_name", "")
            _append(job, tasks.get(name, first), entry, "" if name in tasks else "[Vertex AI] ")
        last = max([known["last"], *(key.partition(" ")[0] for key in new)])
        if new:
            since_then = datetime.strptime(last, _FORMAT) - 2 * _BACK
            kept = [key for key in (*seen, *new) if key > since_then.strftime(_FORMAT)]
            job.write(_KNOWN, {"seen": sorted(kept), "last": last})


def _append(job: JobFolder, task: Task, entry: Any, prefix: str) -> None:
    text = entry.text_payload or dict(entry.json_payload or {}).get("message", "")
    with job.log(task).open("ab") as log:
        for line in str(text).rstrip("\n").split("\n"):
            log.write(f"{_when(entry)} {prefix}".encode() + last_state(line.encode()) + b"\n")


def _when(entry: Any) -> str:
    return str(entry.timestamp.astimezone(UTC).strftime(_FORMAT))


@contextmanager
def _alone(job: JobFolder) -> Iterator[None]:
    """Lock the logs: several processes may follow a job, and each line is to be written once."""
    with (job.path / "logged.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _entries(client: Any, project: str, wanted: str) -> Iterator[Any]:
    """Yield every entry, page by page; none if the service does not answer now."""
    from google.api_core import exceptions

    asked = {"resource_names": [project], "filter": wanted, "order_by": "timestamp asc"}
    try:
        yield from client.list_log_entries({**asked, "page_size": _PAGE}, timeout=_SECONDS)
    except (
        exceptions.ServiceUnavailable,
        exceptions.DeadlineExceeded,
        exceptions.ResourceExhausted,
    ):
        return  # the next query gets these entries
    except exceptions.GoogleAPICallError as problem:
        raise NoLogs(f"Cloud Logging refuses: {problem.message}") from None


def _log_client(address: str | None) -> Any:
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.logging_v2.services import logging_service_v2 as service
    except ImportError:
        raise NoLogs("pip install google-cloud-logging brings them here") from None
    if address is not None:
        import grpc
        from google.cloud.logging_v2.services.logging_service_v2 import transports

        channel = grpc.insecure_channel(address)
        return service.LoggingServiceV2Client(
            transport=transports.LoggingServiceV2GrpcTransport(channel=channel)
        )
    try:
        return service.LoggingServiceV2Client()
    except DefaultCredentialsError:
        raise NoLogs("there is no login to Google Cloud here") from None
