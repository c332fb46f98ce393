"""Manifests for Kubernetes: the fields of each kind, checked with the official models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.engines.kubernetes_kinds import attempt_of, kind_of, manifests
from stratagem.launch.job_folder import JobRequest

ALL: dict[str, dict[str, Any]] = {
    "job": {"workers": 2, "ps": 1, "evaluator": True, "minutes": 5, "more": {"volume": "a=/b"}},
    "jobset": {"workers": 2, "ps": 1, "evaluator": True, "minutes": 5, "gpus": 2},
    "trainjob": {"workers": 2, "minutes": 5, "gpus": 2},
}


def request(kind: str, more: dict[str, Any] | None = None, **given: Any) -> JobRequest:
    settings = {"image": "i:1", "kind": kind, **(more or {})}
    environ = {"TOKEN": "abc"}
    return JobRequest(
        "a", ("train.py", "--lr", "1"), "", "python", settings=settings, environ=environ, **given
    )


def made(kind: str, more: dict[str, Any] | None = None, **given: Any) -> list[dict[str, Any]]:
    asked = request(kind, more, **given)
    kind_of(asked).check(asked)
    return manifests(asked, "a-1", "s")


@pytest.mark.parametrize("kind", ALL)
def test_the_secret_is_in_the_secret_alone(kind: str) -> None:
    *rest, secret = made(kind, **ALL[kind])
    assert secret["stringData"] == {"STRATAGEM_SECRET": "s", "TOKEN": "abc"}
    assert "abc" not in json.dumps(rest) and '"s"' not in json.dumps(rest)
    assert rest[0]["spec"]["suspend"] is True, "it would begin before its Secret is there"


def test_roles_of_a_jobset() -> None:
    job, _ = made("jobset", {"restarts": 3}, **ALL["jobset"])
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 3}
    workers, ps, evaluator = job["spec"]["replicatedJobs"]
    assert [each["name"] for each in (workers, ps, evaluator)] == ["worker", "ps", "evaluator"]
    specs = [each["template"]["spec"] for each in (workers, ps, evaluator)]
    assert [spec["completions"] for spec in specs] == [2, 1, 1]
    (first,), (second,), _ = (spec["template"]["spec"]["containers"] for spec in specs)
    assert first["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert "resources" not in second
    environ = {each["name"]: each.get("value") for each in second["env"]}
    assert environ["STRATAGEM_ROLE"] == "ps"
    assert json.loads(str(environ["STRATAGEM_CLUSTER"])) == {
        "worker": ["a-1-worker-0-0.a-1:2222", "a-1-worker-0-1.a-1:2222"],
        "ps": ["a-1-ps-0-0.a-1:2222"],
        "evaluator": ["a-1-evaluator-0-0.a-1:2222"],
    }


def test_a_trainjob() -> None:
    job, _ = made("trainjob", **ALL["trainjob"])
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2 and trainer["args"] == ["train.py", "--lr", "1"]
    cluster = json.loads(trainer["env"][0]["value"])
    assert cluster == {"worker": ["a-1-node-0-0.a-1:2222", "a-1-node-0-1.a-1:2222"]}


def test_which_task_a_pod_is() -> None:
    note = {"batch.kubernetes.io/job-completion-index": "1"}
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "ps"}
    labels["jobset.sigs.k8s.io/restart-attempt"] = "2"
    pod = {"metadata": {"annotations": note, "labels": labels}}
    found = {kind: kind_of(request(kind)).task(request(kind, workers=3), pod) for kind in ALL}
    assert found == {
        "job": Task("worker", 1),
        "jobset": Task("ps", 1),
        "trainjob": Task("worker", 1),
    }
    assert attempt_of(pod) == 2 and attempt_of({"metadata": {}}) == 0


@pytest.mark.parametrize(
    ("kind", "more", "given", "said"),
    [
        ("job", {}, {"gpus": 1, "ps": 1}, "or say --kind jobset"),
        ("job", {"restarts": 1}, {}, "--restarts needs --kind jobset"),
        ("trainjob", {}, {"ps": 1}, "a TrainJob has workers only"),
        ("trainjob", {"restarts": 1}, {}, "its runtime's affair"),
        ("trainjob", {"volume": "a=/b"}, {}, "its runtime's affair"),
        ("deployment", {}, {}, "there are job, jobset, trainjob"),
    ],
)
def test_refusals(kind: str, more: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(kind, more, **given)


MODELS = """
import json, sys
from kubeflow_trainer_api import models
names = {"Job": "IoK8sApiBatchV1Job", "JobSet": "JobsetV1alpha2JobSet",
         "TrainJob": "TrainerV1alpha1TrainJob", "Service": "IoK8sApiCoreV1Service",
         "Secret": "IoK8sApiCoreV1Secret"}

def same(told, known, where):
    if isinstance(told, dict):
        assert isinstance(known, dict), where
        for key, value in told.items():
            assert key in known, f"the models do not know {where}.{key}"
            same(value, known[key], f"{where}.{key}")
    elif isinstance(told, list):
        for i, (a, b) in enumerate(zip(told, known, strict=True)):
            same(a, b, f"{where}[{i}]")
    else:
        assert told == known, where

for job in json.load(sys.stdin):
    model = getattr(models, names[job["kind"]])
    same(job, json.loads(model.from_dict(job).to_json()), job["kind"])
    print(job["kind"])
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_official_models_know_every_field() -> None:
    """Needs kubeflow-trainer-api: pip install --target DIR kubeflow-trainer-api"""
    packages = os.environ.get("STRATAGEM_TEST_KUBEFLOW", "")
    if not packages:
        pytest.skip("pip install --target DIR kubeflow-trainer-api; STRATAGEM_TEST_KUBEFLOW=DIR")

    def checked(jobs: list[Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", MODELS],
            env={**os.environ, "PYTHONPATH": packages},
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            timeout=170,
        )

    jobs = [each for kind, given in ALL.items() for each in made(kind, **given)]
    done = checked(jobs)
    kinds = ["Job", "Service", "Secret", "JobSet", "Secret", "TrainJob", "Secret"]
    assert done.stdout.split() == kinds, done.stderr
    jobs[3]["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMod"] = "Indexed"
    assert "completionMod" in checked(jobs).stderr
