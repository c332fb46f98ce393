"""Jobs for Ray: a driver that Ray runs as a job on the cluster, and a place for each task.

`ray job submit` sends the folder and starts the driver (ray_driver.py); state and logs come from
Ray's REST API. Ray places and watches tasks; tensors never pass through it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from stratagem.cluster.spec import Task
from stratagem.errors import StratagemError, UsageError
from stratagem.launch.job_folder import (
    JobFolder,
    JobRequest,
    JobState,
    TaskEnd,
    append_missing,
    last_line,
    stem_of,
)
from stratagem.launch.supervise import TOLD_TO_END, write_end

_ADDRESS = "RAY_API_SERVER_ADDRESS"  # as Ray's own client reads it
#: a line of the driver: time, task (or "place", "end"), text
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z) ([a-z]+-\d+|place|end|again) (.*)")


class Ray:
    """The cluster at `--ray-address`, RAY_API_SERVER_ADDRESS, or this machine's."""

    def prepare(self, request: JobRequest) -> JobRequest:
        return request

    def check(self, request: JobRequest) -> JobRequest:
        if shutil.which("ray") is None:
            raise UsageError("there is no `ray` on this machine: pip install 'ray[default]'")
        request.check_script()
        _ask(request, "/api/version")
        if request.gpus:
            _check_gpus(request)
        return request

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """The command, and the file that it names, without the values of --env."""
        command = shlex.join(_command(request, _name(request, job), job))
        return f"{command}\n# runtime_env.json: {json.dumps(_runtime_env(request.hidden()))}\n"

    def send(self, request: JobRequest, job: JobFolder) -> str:
        name = _name(request, job)
        (job.path / "script").write_text(self.describe(request, job))
        job.sent("ray", name, request)
        job.write("runtime_env.json", _runtime_env(request))
        try:
            done = subprocess.run(
                _command(request, name, job), capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            raise StratagemError(
                "ray job submit has not answered in 300 s: `ray job list` says whether the job runs"
            ) from None
        if done.returncode:
            raise UsageError(f"ray job submit failed: {last_line(done.stderr)}")
        return name

    def state(self, job: JobFolder) -> JobState:
        if (end := job.end()) is not None:
            return end
        name = str(job.record["name"])
        status = str(_ask(job.request, f"/api/jobs/{name}")["status"])
        code = self._bring(job)
        if status == "PENDING":
            return JobState("waiting", text="pending")
        if status == "RUNNING" and not any(map(job.task, job.request.tasks())):
            again = "to begin again, and " if (job.path / "again.json").exists() else ""
            return JobState("waiting", text=f"{again}for room on the cluster")
        if status == "RUNNING":
            return JobState("running")
        if status == "STOPPED":
            job.ended(TOLD_TO_END, "cancelled")
        elif code is None:
            job.ended(1, "the driver has ended without a word: `ray job logs` may say why")
        else:
            write_end(job, code)
        return job.end() or JobState("ended")

    def cancel(self, job: JobFolder) -> None:
        _ask(job.request, f"/api/jobs/{job.record['name']}/stop", post=True)

    def _bring(self, job: JobFolder) -> int | None:
        """Copy the driver's report into the job's folder; return the exit code at its end."""
        text = str(_ask(job.request, f"/api/jobs/{job.record['name']}/logs")["logs"])
        events = [match.groups() for line in text.split("\n") if (match := _LINE.fullmatch(line))]
        code, again = None, [i for i, (_, what, _) in enumerate(events) if what == "again"]
        if len(again) > (job.read("again.json") or {}).get("times", 0):
            job.begin_again()
            job.write("again.json", {"times": len(again)})
        for when, what, rest in events[again[-1] if again else 0 :]:
            if what == "place":
                task, host = json.loads(rest)
                if not job.task(Task(*task)):
                    job.task_runs(Task(*task), host)
            elif what == "end":
                code = self._end(job, when, json.loads(rest), code)
        for task in job.request.tasks():
            lines = [
                f"{when} {rest}".encode() for when, what, rest in events if what == stem_of(task)
            ]
            append_missing(job.log(task), lines)
        return code

    def _end(self, job: JobFolder, when: str, found: Any, code: int | None) -> int | None:
        """Write the end of a task, or of the job."""
        if isinstance(found, int):
            return found
        end = TaskEnd(Task(*found["task"]), found["code"], found["because_of"], when, found["tail"])
        job.task_ended(end)
        return code


ENGINE = Ray()


def _name(request: JobRequest, job: JobFolder) -> str:
    return f"{request.name}-{job.suffix}"


def _address(request: JobRequest) -> str:
    chosen = request.settings.get("ray_address") or os.environ.get(_ADDRESS)
    return str(chosen or "http://127.0.0.1:8265").rstrip("/")


def _check_gpus(request: JobRequest) -> None:
    """Refuse a job that would wait forever: no node has so many GPUs, and no autoscaler runs."""
    report = _ask(request, "/api/cluster_status")["data"]["clusterStatus"]["autoscalerReport"]
    kinds = report["nodeTypeMapping"] or {}
    if any(kind != f"node_{name}" for name, kind in kinds.items()):  # not started by hand
        return
    nodes = _ask(request, "/nodes?view=summary")["data"]["summary"]
    most = max(int(node["raylet"]["resourcesTotal"].get("GPU", 0)) for node in nodes)
    if most < request.gpus:
        raise UsageError(
            f"no node of Ray at {_address(request)} has {request.gpus} GPUs (the most is {most}): "
            "fewer --gpus-per-worker, or more --workers"
        )


def _driver_request(request: JobRequest) -> dict[str, Any]:
    """The request as the driver reads it; values of `--env` are in the driver's environment."""
    restarts = request.settings.get("restarts", 0)
    settings = {"env": list(request.environ), "restarts": restarts}
    return {**request.to_json(), "environ": {}, "settings": settings}


def _runtime_env(request: JobRequest) -> dict[str, Any]:
    variables = {**request.environ, "STRATAGEM_JOB": json.dumps(_driver_request(request))}
    return {"env_vars": variables, "excludes": list(request.settings.get("excludes", ()))}


def _command(request: JobRequest, name: str, job: JobFolder) -> list[str]:
    python = request.settings.get("far_python") or "python"
    return [
        *("ray", "job", "submit", "--no-wait", f"--address={_address(request)}"),
        *(f"--submission-id={name}", f"--working-dir={request.folder}"),
        f"--runtime-env={job.path / 'runtime_env.json'}",
        *("--", python, "-m", "stratagem.launch.engines.ray_driver"),
    ]


def _ask(request: JobRequest, path: str, *, post: bool = False) -> Any:
    address = _address(request)
    question = HttpRequest(f"{address}{path}", method="POST" if post else "GET")
    try:
        with urlopen(question, timeout=60) as answer:
            return json.loads(answer.read() or b"{}")
    except HTTPError as problem:
        raise UsageError(f"Ray at {address} refuses {path}: {problem.code}") from None
    except (URLError, OSError, ValueError) as problem:
        why = getattr(problem, "reason", problem)
        raise UsageError(
            f"there is no Ray at {address} ({why}): `ray start --head` starts one, --ray-address "
            "or RAY_API_SERVER_ADDRESS says where it is"
        ) from None
