"""TPUStrategy on a fake torch_tpu, whose devices are the CPU: nothing here runs on a TPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.cluster.spec import Task
from tests.clock import SLOWER
from tests.hosts import ROOT

SAME = "tests/strategies/test_same_answer.py"
STAND_INS = ROOT / "tests" / "stand_ins"

TRAIN = """
import os, sys
import torch, stratagem as sg
from stratagem.wire.device_kinds import KINDS
from tests.support import by_hand, data, distance, mlp, moved

class Nothing:
    def __getattr__(self, name):
        raise AssertionError(f"a GPU was asked for {name}")

for count, make, sentence in (
    ("3", sg.TPUStrategy, "cannot prepare 3 TPUs here: No TPU topology found for count: 3"),
    ("0", sg.experimental.TPUStrategy, "there is no TPU on this machine; run this on a TPU VM"),
    ("4", lambda: sg.MirroredStrategy(["tpu:7"]), "there is no tpu:7 on this machine"),
):
    os.environ["STAND_IN_TPUS"] = count
    try:
        make()
    except sg.DeviceError as refused:
        assert sentence in str(refused), refused
    else:
        raise AssertionError(f"was not refused: {sentence}")
os.environ["STAND_IN_TPUS"] = "2"
KINDS["cuda"] = KINDS["mps"] = Nothing()
strategy = sg.TPUStrategy(sg.TPUClusterResolver())
assert not os.path.exists(os.environ["STAND_IN_CLAIMS"]), "claimed before anybody has begun"
assert strategy.num_replicas_in_sync == 2
x, y = data()
make = lambda params: torch.optim.Adam(params, lr=0.01)
loss = torch.nn.functional.cross_entropy
with strategy.scope():
    model = sg.Model(mlp())
    model.compile(make, "cross_entropy")
model.fit(x, y, batch_size=50, epochs=2, shuffle=False, verbose=0)
alone = by_hand(mlp(), make, loss, x, y, batch=50)
assert moved(model.module, mlp()) and distance(model.module, alone) < 1e-6
assert "RANK" not in os.environ
print("rows", [int(n) for n in strategy.run(lambda: sg.current_replica().index)])
print("device", strategy.replica_group.devices[-1])
"""


def run(code: str, claims: Path, tpus: str) -> subprocess.CompletedProcess[str]:
    path = f"{STAND_INS}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    told = {"PYTHONPATH": path, "STAND_IN_CLAIMS": str(claims), "STAND_IN_TPUS": tpus}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **told},
        capture_output=True,
        text=True,
        timeout=100 * SLOWER,
    )


@pytest.mark.timeout(120)
def test_the_weights_of_one_device_and_what_replicas_find(tmp_path: Path) -> None:
    done = run(TRAIN, tmp_path / "claims", "2")
    assert done.returncode == 0, done.stderr
    assert "rows [0, 1]" in done.stdout and "device tpu:1" in done.stdout
    claims = [json.loads(line) for line in (tmp_path / "claims").read_text().splitlines()]
    assert sorted(int(each["RANK"]) for each in claims) == [0, 1]
    assert all(each["RANK"] == each["LOCAL_RANK"] for each in claims)
    assert len({each["pid"] for each in claims}) == 2
    for name in ("SLICEBUILDER_ADDRESSES", "TOPOLOGY", "XPROF_SESSION_ID"):
        assert len({each[f"TORCH_TPU_{name}"] for each in claims}) == 1
    assert len(claims[0]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")) == 2
    assert {each["WORLD_SIZE"] for each in claims} == {"2"}


@pytest.mark.timeout(120)
def test_nccl_is_refused(tmp_path: Path) -> None:
    code = "import stratagem as sg; sg.MirroredStrategy(['tpu:0', 'tpu:1'], 'nccl').run(print)"
    done = run(code, tmp_path / "claims", "4")
    assert done.returncode == 1
    assert "NcclAllReduce works between NVIDIA GPUs only" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "claims").exists()


@pytest.mark.parametrize("name", ["tpu:0", "/tpu:0", "TPU:0"])
def test_without_torch_tpu(name: str) -> None:
    for make in (sg.TPUStrategy, lambda: sg.MirroredStrategy([name])):
        with pytest.raises(sg.DeviceError, match=r"need torch_tpu.*pip install torch_tpu on a TPU"):
            make()


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("index", ["JOB_COMPLETION_INDEX", "TPU_WORKER_ID", "NODE_RANK", None])
def test_the_hosts_of_a_slice(count: int, index: str | None) -> None:
    environ = {"TPU_WORKER_HOSTNAMES": ",".join(f"h{i}" for i in range(count))} if count else {}
    if index is not None:
        environ[index] = str(max(count - 1, 0))
    resolver = sg.TPUClusterResolver(environ=environ)
    assert resolver.hosts == tuple(f"h{i}" for i in range(count))
    if count < 2:
        assert resolver.place() is None and resolver.index == 0
    elif index is None:
        with pytest.raises(sg.ClusterError, match="JOB_COMPLETION_INDEX"):
            resolver.place()
    else:
        place = resolver.place()
        assert place is not None and place.task == Task("worker", count - 1)
        assert place.spec.jobs["worker"] == tuple(f"h{i}:2222" for i in range(count))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"tpu": "my-tpu"}, "run the script on each host"), ({"resolver": 3}, "is no resolver")],
)
def test_what_is_no_resolver(given: dict[str, Any], sentence: str) -> None:
    make: Any = sg.TPUClusterResolver if "tpu" in given else sg.TPUStrategy
    with pytest.raises(sg.UsageError, match=sentence):
        make(**given)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_mirrored_tests_with_the_device_mapped(tmp_path: Path) -> None:
    """The tests of mirrored replicas, with devices named "tpu:i"."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.stand_ins.tpu_names"),
            *("-p", "no:cacheprovider", SAME),
            *("-k", "not shared_memory and not hierarchical and not one_device and not sharded"),
            *("--deselect", f"{SAME}::test_memory_of_models_that_were_prepared_and_forgotten"),
        ],
        cwd=ROOT,
        env={**os.environ, "STAND_IN_CLAIMS": str(tmp_path / "claims")},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "claims").read_text().count("\n") > 20, "nobody has claimed a TPU"
