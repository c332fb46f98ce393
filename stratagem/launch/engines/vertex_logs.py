"""What tasks on Vertex AI print: entries of Cloud Logging, brought into the job's folder.

Entries show up late and not in their order. So each look goes back a minute, and what is here
already is known by its time and id (logged.json).
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from stratagem.cluster.spec import Task
from stratagem.launch.job_folder import JobFolder, last_state

_BACK = timedelta(seconds=60)
_SECONDS = 60.0  # for one answer
_PAGE = 1000
_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_KNOWN = "logged.json"


class NoLogs(Exception):
    """Cloud Logging cannot be read from here; the reason."""


def bring(job: JobFolder, tasks: Mapping[str, Task], address: str | None) -> None:
    """Append new entries to the logs of `tasks`, by the names that Vertex AI has for them.

    `address`: a stand-in on this machine. What Vertex AI says itself goes to the first task.
    """
    client = _client(address)
    project, number = job.request.settings["project"], job.told["name"]
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
    """Several may follow a job at once, and each line is to be here once."""
    with (job.path / "logged.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _entries(client: Any, project: str, wanted: str) -> Iterator[Any]:
    """Every entry, page by page; none where the service does not answer now."""
    from google.api_core import exceptions

    asked = {"resource_names": [project], "filter": wanted, "order_by": "timestamp asc"}
    try:
        yield from client.list_log_entries({**asked, "page_size": _PAGE}, timeout=_SECONDS)
    except (
        exceptions.ServiceUnavailable,
        exceptions.DeadlineExceeded,
        exceptions.ResourceExhausted,
    ):
        return  # the next look brings what this one has not
    except exceptions.GoogleAPICallError as problem:
        raise NoLogs(f"Cloud Logging refuses: {problem.message}") from None


def _client(address: str | None) -> Any:
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
