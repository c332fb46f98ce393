"""Jobs for Vertex AI: refusals, and real jobs by Google's client on a loopback server."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.errors import UsageError
from stratagem.launch.engines.vertex import ENGINE, _custom_job
from stratagem.launch.far_task import shared_secret
from stratagem.launch.job_folder import JobRequest
from tests.launch.sites import VertexSite, finished, running, site

SETTINGS = {"project": "p", "region": "r", "image": "i:1", "bucket": "gs://b/jobs"}


def request(**given: Any) -> JobRequest:
    settings = {**SETTINGS, **given.pop("settings", {})}
    return JobRequest("a", ("train.py", "--lr", "1"), "", "python", settings=settings, **given)


def pools(**given: Any) -> list[dict[str, Any]]:
    spec = _custom_job(request(**given), "a-1")
    return list(spec["jobSpec"]["workerPoolSpecs"])


def test_pools() -> None:
    assert [pool["replicaCount"] for pool in pools()] == ["1"]
    assert [pool["replicaCount"] for pool in pools(workers=4)] == ["1", "3"]
    chief, others, ps, evaluator = pools(ps=2, evaluator=True)
    assert chief["replicaCount"] == "1" and others == {} and ps["replicaCount"] == "2"
    assert evaluator["replicaCount"] == "1"
    with_gpus = pools(workers=2, ps=1, gpus=2, settings={"accelerator": "NVIDIA_TESLA_T4"})
    assert [p["machineSpec"].get("acceleratorCount") for p in with_gpus] == [2, 2, None]
    (container,) = {json.dumps(pool["containerSpec"]) for pool in with_gpus}
    assert '"value": "/gcs/b/jobs/a-1"' in container


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"settings": {"image": ""}}, "which image?"),
        ({"gpus": 3, "settings": {"accelerator": "T4"}}, "1, 2, 4, 8 or 16 GPUs"),
    ],
)
def test_what_the_api_would_refuse(asked: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        ENGINE.prepare(request(workers=4, **asked))


def test_the_secret_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "job" / "secret"
    with pytest.raises(UsageError, match="the chief has written no secret"):
        shared_secret(file, make=False, within=0)
    made = shared_secret(file, make=True)
    assert len(made) == 64 and shared_secret(file, make=True) == made
    assert shared_secret(file, make=False) == made


# --- with Google's client ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def there(tmp_path_factory: Any) -> Iterator[VertexSite]:
    made = site("vertex", tmp_path_factory.mktemp("vertex"))
    yield made
    made.close()


def say(there: VertexSite, *words: str) -> tuple[int, str]:
    return finished(there.start(*words), 120)


def submit(there: VertexSite, *words: str, **more: str) -> tuple[int, str]:
    return say(there, "submit", *there.options(**more), *words)


def script(there: VertexSite, text: str) -> None:
    (there.folder / "project" / "train.py").write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_shown_is_sent_and_cancelled(there: VertexSite) -> None:
    script(there, "import time\ntime.sleep(200)\n")
    options = ["--workers=2", "--time=2h", "--name=digits", "train.py", "--lr", "0.1"]
    code, shown = submit(there, "--dry-run", *options)
    assert code == 0, shown
    (there.folder / "received.json").unlink(missing_ok=True)
    code, said = submit(there, *options)
    assert code == 0, said
    sent = re.sub(r"digits-[0-9a-f]{6}", "", (there.folder / "received.json").read_text())
    assert json.loads(sent) == json.loads(re.sub(r"digits-[0-9a-f]{6}", "", shown))
    logs, status, cancel = (
        line.strip().removeprefix("stratagem ").split()
        for line in said.partition("Next:")[2].strip().splitlines()
    )
    code, said = say(there, *status)
    assert code == 0 and said.count("running") == 3 and "workerpool1-0" in said, said
    code, said = say(there, *cancel)
    assert code == 0 and "is cancelled" in said, said
    assert say(there, *logs)[0] == 143
    assert cancel[1] in say(there, "jobs")[1] and not running("train.py --lr 0.1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_refusals(there: VertexSite) -> None:
    (there.folder / "received.json").unlink(missing_ok=True)
    for given, said in (
        ({"image": ""}, "which image.? As in"),
        ({"project": ""}, "which project.? As in: --project"),
        ({"gpus_per_worker": "1", "accelerator": "NVIDIA_H9000"}, "does not know this: .*H9000"),
        ({"gpus_per_worker": "1"}, "which GPUs.? As in"),
        ({"workers": "2", "bucket": ""}, "in a bucket: --bucket gs://"),
        ({"env": "HOME"}, "may read its variables: leave --env out"),
        ({"project": "forbidden"}, "Vertex AI refuses: you may not create jobs here"),
    ):
        code, answer = submit(there, "train.py", **given)
        assert code == 2 and re.search(said, answer), answer
        assert len(answer.strip().splitlines()) <= 3, answer
    assert not (there.folder / "received.json").exists()


LINES = """
import json, os, time
pool = json.loads(os.environ["CLUSTER_SPEC"])["task"]["type"]
for i in range(40):
    print("line", i, "of", pool, flush=True)
    time.sleep(0.3)
print("10%\\r100%\\nlast", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_line_once_by_task(there: VertexSite) -> None:
    """Two processes follow, and one reads afterwards; entries come in pages, some late."""
    script(there, LINES)
    code, said = submit(there, "--workers=2", "train.py")
    assert code == 0, said
    follow = said.partition("Next:")[2].strip().splitlines()[0].split()[1:]
    both = [there.start(*follow) for _ in range(2)]
    told = [finished(child, 120) for child in both]
    told.append(say(there, *follow[:2]))
    for code, said in told:
        if "install google-cloud-logging" in said:
            pytest.skip("google-cloud-logging is not in STRATAGEM_TEST_VERTEX")
        assert code == 0, said
        lines = said.splitlines()
        for worker, pool in (("worker 0", "workerpool0"), ("worker 1", "workerpool1")):
            for i in range(40):
                assert lines.count(f"[{worker}] line {i} of {pool}") == 1, said
            assert lines.count(f"[{worker}] 100%") == lines.count(f"[{worker}] last") == 1
        assert lines.count("[worker 0] [Vertex AI] the job is provisioned") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_client_for_logs_the_command_is_named(there: VertexSite) -> None:
    script(there, "print('done')")
    hidden = there.folder / "hidden" / "google" / "cloud" / "logging_v2"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('no logging here')\n")
    path = f"{there.folder / 'hidden'}:{there.environ['PYTHONPATH']}"
    words = ["-m", "stratagem", "submit", *there.options(), "--follow", "train.py"]
    code, said = finished(there.run_there([sys.executable, *words], PYTHONPATH=path), 120)
    assert code == 0, said
    assert "gcloud ai custom-jobs stream-logs" in said and "--project=p --region=r shows" in said
    assert "(pip install google-cloud-logging brings them here)" in said
