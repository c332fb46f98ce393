"""Manifests of a job on Kubernetes: an Indexed Job, a JobSet or a TrainJob, with its resources.

kind       needs on the cluster    roles                       begins again
job        nothing                 all with the same resources no
jobset     JobSet                  each its own                all tasks together, --restarts N
trainjob   Kubeflow Trainer 2      workers only                by its runtime
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from stratagem.cluster.exit_cause import VARIABLE as BLAME_VARIABLE
from stratagem.cluster.handshake import SECRET_VARIABLE
from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.job_folder import JobRequest

_PORT = 2222
_KEPT = 7 * 24 * 3600  # seconds that an ended job stays on the cluster
_SET = "jobset.sigs.k8s.io"
_INDEX = "batch.kubernetes.io/job-completion-index"
_LABELS = {"app.kubernetes.io/managed-by": "stratagem"}


class PlainJob:
    """An Indexed Job, which every cluster has, and a Service that names its pods."""

    resource, label = "job", "job-name"

    def check(self, request: JobRequest) -> None:
        """Refuse what this kind cannot do."""
        if request.gpus and (request.ps or request.evaluator):
            raise UsageError(
                "in a Job of Kubernetes all tasks have the same resources: leave out "
                "--gpus-per-worker, or --ps and --evaluator, or say --kind jobset"
            )
        if request.settings.get("restarts"):
            raise UsageError(
                "a Job of Kubernetes cannot begin again with all its tasks: --restarts needs "
                "--kind jobset"
            )

    def address(self, name: str, task: Task, number: int) -> str:
        return f"{name}-{number}.{name}:{_PORT}"

    def task(self, request: JobRequest, pod: dict[str, Any]) -> Task:
        """The task that runs in a pod."""
        return request.tasks()[_index(pod)]

    def document(self, request: JobRequest, name: str, variables: list[Any]) -> dict[str, Any]:
        spec = _job_spec(request, len(request.tasks()), variables, request.gpus)
        spec["template"]["spec"]["subdomain"] = name
        spec |= {"suspend": True, "ttlSecondsAfterFinished": _KEPT}
        return _document("batch/v1", "Job", name, spec)

    def beside(self, name: str) -> list[dict[str, Any]]:
        """The resources that it needs besides the Secret."""
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        }
        return [_document("v1", "Service", name, service)]


class JobSetKind(PlainJob):
    """A JobSet: a Job for each role, restarted together; the JobSet makes the Service."""

    resource, label = "jobsets.jobset.x-k8s.io", f"{_SET}/jobset-name"

    def check(self, request: JobRequest) -> None:
        """A JobSet can do everything."""

    def address(self, name: str, task: Task, number: int) -> str:
        return f"{name}-{task.type}-0-{task.index}.{name}:{_PORT}"

    def task(self, request: JobRequest, pod: dict[str, Any]) -> Task:
        return Task(pod["metadata"]["labels"][f"{_SET}/replicatedjob-name"], _index(pod))

    def document(self, request: JobRequest, name: str, variables: list[Any]) -> dict[str, Any]:
        jobs = []
        for role, count in request.roles().items():
            if count:
                gpus = request.gpus if role == "worker" else 0
                own = [*variables, {"name": "STRATAGEM_ROLE", "value": role}]
                template = {"spec": _job_spec(request, count, own, gpus)}
                jobs.append({"name": role, "replicas": 1, "template": template})
        spec = {
            "suspend": True,
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": name,
            },
            "failurePolicy": {"maxRestarts": request.settings.get("restarts", 0)},
            "ttlSecondsAfterFinished": _KEPT,
            "replicatedJobs": jobs,
        }
        return _document("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec)

    def beside(self, name: str) -> list[dict[str, Any]]:
        return []


class TrainJobKind(JobSetKind):
    """A TrainJob of Kubeflow Trainer, whose runtime makes a JobSet of one Job, `node`."""

    resource = "trainjobs.trainer.kubeflow.org"

    def check(self, request: JobRequest) -> None:
        if request.ps or request.evaluator:
            raise UsageError("a TrainJob has workers only: say --kind jobset for --ps, --evaluator")
        if request.folder or any(request.settings.get(key) for key in ("restarts", "volume")):
            raise UsageError(
                "folder, volume and restarts of a TrainJob are its runtime's affair: leave "
                "--folder, --volume and --restarts out, or say --kind jobset"
            )

    def address(self, name: str, task: Task, number: int) -> str:
        return f"{name}-node-0-{task.index}.{name}:{_PORT}"

    def task(self, request: JobRequest, pod: dict[str, Any]) -> Task:
        return Task("worker", _index(pod))

    def document(self, request: JobRequest, name: str, variables: list[Any]) -> dict[str, Any]:
        container = _container(request, variables)
        trainer = {key: container[key] for key in ("image", "command", "args", "env")}
        trainer["numNodes"] = request.workers
        if request.gpus:
            trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(request.gpus)}}
        spec: dict[str, Any] = {
            "suspend": True,
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
        }
        if request.minutes is not None:
            spec["activeDeadlineSeconds"] = 60 * request.minutes
        return _document("trainer.kubeflow.org/v1alpha1", "TrainJob", name, spec)


_KINDS = {"job": PlainJob(), "jobset": JobSetKind(), "trainjob": TrainJobKind()}


def kind_of(request: JobRequest) -> PlainJob:
    """The kind of a request."""
    name = request.settings.get("kind", "job")
    if name not in _KINDS:
        raise UsageError(f"there is no --kind {name!r}; there are {', '.join(_KINDS)}")
    return _KINDS[name]


def manifests(request: JobRequest, name: str, secret: str = "") -> list[dict[str, Any]]:
    """The manifests: the job, then the resources that belong to it."""
    kind = kind_of(request)
    addresses = [kind.address(name, task, i) for i, task in enumerate(request.tasks())]
    variables: list[dict[str, Any]] = [
        {"name": "STRATAGEM_CLUSTER", "value": json.dumps(request.by_role(addresses))},
        # the task that a task blames becomes its termination message
        {"name": BLAME_VARIABLE, "value": "/dev/termination-log"},
        *(
            {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
            for key in (SECRET_VARIABLE, *request.environ)
        ),
    ]
    hidden = {**request.environ, SECRET_VARIABLE: secret or secrets.token_hex(32)}
    kept: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret"}
    kept |= {"metadata": {"name": name, "labels": dict(_LABELS)}, "stringData": hidden}
    return [kind.document(request, name, variables), *kind.beside(name), kept]


def attempt_of(pod: dict[str, Any]) -> int:
    """The number of restarts of the JobSet when this pod was made."""
    return int(pod["metadata"].get("labels", {}).get(f"{_SET}/restart-attempt", 0))


def _index(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["annotations"][_INDEX])


def _document(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "labels": dict(_LABELS)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _container(request: JobRequest, variables: list[Any]) -> dict[str, Any]:
    return {
        "name": "task",
        "image": request.settings["image"],
        "command": [request.python, "-m", "stratagem.launch.far_task", "kubernetes"],
        "args": list(request.words),
        "env": variables,
        "ports": [{"containerPort": _PORT}],
    }


def _job_spec(request: JobRequest, count: int, variables: list[Any], gpus: int) -> dict[str, Any]:
    container = _container(request, variables)
    if request.folder:
        container["workingDir"] = request.folder
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": dict(_LABELS)},
            "spec": {
                "restartPolicy": "Never",
                "shareProcessNamespace": True,  # as process 1 a script would not hear SIGTERM
                "containers": [container],
            },
        },
    }
    if volume := request.settings.get("volume"):
        claim, _, path = str(volume).partition("=")
        container["volumeMounts"] = [{"name": "shared", "mountPath": path}]
        source = {"name": "shared", "persistentVolumeClaim": {"claimName": claim}}
        spec["template"]["spec"]["volumes"] = [source]
    if request.minutes is not None:
        spec["activeDeadlineSeconds"] = 60 * request.minutes
    return spec
