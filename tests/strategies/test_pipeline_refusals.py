"""A pipeline refuses what it cannot do with one sentence, before it starts processes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.support import cpus, data, mlp

pytestmark = pytest.mark.timeout(60)


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.first(x)
        return self.second(x)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


class OwnSGD(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


def refused(words: str, module: nn.Module, *, compiled: Any = None, **options: Any) -> None:
    options = {"devices": cpus(2), **options}
    strategy = sg.PipelineStrategy(**options)
    model = sg.Model(module, strategy)
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **(compiled or {})})
    with pytest.raises(sg.StratagemError, match=words) as caught:
        model.fit(*data(20), batch_size=8, verbose=0)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    group: Any = strategy.replica_group
    assert group.replica is None and group._pool is None
    strategy.close()


def test_models_and_splits() -> None:
    refused("3 layers that can be cut apart .0, 1, 2., and 4 stages", mlp(), devices=cpus(4))
    refused("'nowhere', and the model has no layer", mlp(), split=["nowhere"])
    refused("2 names, and 2 stages", mlp(), split=["1", "2"])
    refused("does not run behind", mlp(), split=["0"])
    refused(r"line \d+ of test_pipeline_refusals.py, `if x.sum\(\) > 0:`,", Undecided())
    refused("'1' is a BatchNorm", normed())
    refused("'1' is a BatchNorm", normed(), microbatches=2)
    hooked = mlp()
    hooked.register_forward_hook(lambda *given: None)
    refused("has forward or backward hooks itself", hooked)


class Noisy(nn.Module):
    """Adds a random number that tracing would freeze, or counts its calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)
        self.counted: Tensor
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "noise":
            x = x + torch.randn(6)
        if self.kind == "branch" and random.random() < 0.5:
            x = -x
        if self.kind == "count":
            self.calls += 1
        if self.kind == "buffer":
            self.counted.add_(1)
        if self.kind == "global":
            x = x * next(_COUNTER)
        return self.second(x)


_COUNTER = itertools.count(1)


@pytest.mark.parametrize("kind", ["noise", "branch", "count", "buffer"])
def test_what_tracing_would_do_once_and_never_again(kind: str) -> None:
    module = Noisy(kind)
    refused("forward of Noisy does more than compute", module)
    assert module.calls == module.counted == 0


def test_layers_that_are_not_the_model() -> None:
    """A difference that tracing does not show is found in the dry run."""
    strategy = sg.PipelineStrategy(cpus(2), 2)
    model = sg.Model(Noisy("global"), strategy)
    model.compile(optimizer="sgd", loss=F.cross_entropy, check=False)
    with pytest.raises(sg.NotDistributable, match="do not give what its forward gives"):
        model.fit(*data(20), batch_size=8, verbose=0)
    strategy.close()


def test_ways_to_train() -> None:
    refused("no gradient scaler", mlp(), compiled={"precision": "float16"})
    refused("leave jit_compile=True out", mlp(), compiled={"jit_compile": True})
    refused("LBFGS", mlp(), compiled={"optimizer": torch.optim.LBFGS})
    refused("OwnSGD may look at all", mlp(), compiled={"optimizer": OwnSGD})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": ["cpu:0", "cpu:0"]}, "cpu:0 is named twice"),
        ({"devices": []}, "empty"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatches": "many"}, "microbatches='many'"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is not known"),
        ({"batch_norm": "sync"}, "batch_norm='sync' is not known"),
        ({"split": [3]}, "give names of layers"),
        ({"elastic": True}, "none can leave or join"),
    ],
)
def test_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(sg.StratagemError, match=words):
        sg.PipelineStrategy(**{"devices": cpus(2), **options})


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with GPUs."""
    monkeypatch.setattr("stratagem.training.devices._is_present", lambda device: True)
    gpus = ["cuda:0", "cuda:1"]
    with pytest.raises(sg.NotDistributable, match=r"columns run on CPUs so far.*cuda:0, cuda:1; l"):
        sg.PipelineStrategy(gpus, columns=4)
    with pytest.raises(sg.NotDistributable, match=r"divided over CPUs of one machine so far.*cuda"):
        sg.TensorParallelStrategy(gpus)
    with pytest.raises(sg.NotDistributable, match=r"on CPUs and NVIDIA's GPUs, and the .* mps:0"):
        sg.PipelineStrategy(["mps:0", "cpu:0"])


def test_a_cluster_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    with pytest.raises(sg.UsageError, match="name them, as in"):
        sg.PipelineStrategy()
    monkeypatch.setenv("TF_CONFIG", tasks)
    with pytest.raises(sg.NotDistributable, match="the environment describes a cluster"):
        sg.TensorParallelStrategy(cpus(2))
    with pytest.raises(sg.NotDistributable, match=r"servers of its own.*leave LocalCluster out"):
        sg.ParameterServerStrategy(sg.LocalCluster(workers=1, ps=1))
    with pytest.raises(sg.UsageError, match="needs 6 devices, and there are 2 tasks with 2 each"):
        sg.Mesh(data=3, stage=2, devices=cpus(2))
    with pytest.raises(sg.UsageError, match="no cross_device_ops='hierarchical'"):
        sg.PipelineStrategy(cross_device_ops="hierarchical")


def test_custom_loops() -> None:
    def loop(strategy: sg.Strategy) -> None:
        module = mlp()
        strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

    with sg.PipelineStrategy(cpus(2), columns=2) as strategy:
        with pytest.raises(sg.UsageError, match=r"call strategy\.run\(train\)"):
            loop(strategy)
        with pytest.raises(sg.NotDistributable, match="columns= cuts sequences"):
            strategy.run(loop, strategy)


def test_a_part_that_cannot_be_traced_stays_whole() -> None:
    strategy = sg.PipelineStrategy(cpus(2), 2)
    torch.manual_seed(0)
    model = sg.Model(nn.Sequential(nn.Linear(6, 6), Undecided()), strategy)
    model.compile(optimizer="sgd", loss=F.cross_entropy, check=False)
    model.fit(*data(20), batch_size=8, verbose=0)
    strategy.close()


class Reaching(nn.Module):
    """Uses the weights of a layer that it does not own, and cannot be traced."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.others[0].weight) if bool(x.shape[0] > 0) else x


def test_a_gradient_that_would_be_lost() -> None:
    first = nn.Linear(6, 6)
    strategy = sg.PipelineStrategy(cpus(2), 2, split=["2"])
    model = sg.Model(nn.Sequential(first, nn.Tanh(), Reaching(first), nn.Linear(6, 4)), strategy)
    model.compile(optimizer="sgd", loss=F.cross_entropy, check=False)
    with pytest.raises(sg.StratagemError, match=r"'0\.weight' has a gradient on replica 1"):
        model.fit(*data(20), batch_size=8, verbose=0)
    strategy.close()


def test_layers_that_do_not_fit_into_the_memory() -> None:
    """Of 0.0029 MB in all, 0.0018 before or behind any cut; by name 0.0018, and 0 for a Tanh."""
    words = "layers take 0.00288 MB with .*largest of [24] stages 0.00179 MB.*memory= allows"
    refused(f"{words} 0.0017 MB", mlp(), memory=1.7e3)
    refused(f"{words} 0.0017 MB", mlp(), memory=1.7e3, split=["2"])
    refused(f"{words} 0.000896 MB", mlp().append(nn.Tanh()), memory=1792, schedule="interleaved")


@pytest.mark.parametrize("split", ["auto", "2"])
def test_no_split_fits_with_activations(split: str) -> None:
    which = {"auto": "no split", "2": "not the split= given"}[split]
    with sg.PipelineStrategy(cpus(2), 4, memory=1.8e3, split=split) as strategy:
        model = sg.Model(mlp(), strategy)
        model.compile(optimizer="sgd", loss=F.cross_entropy)
        with pytest.raises(sg.NotDistributable, match=f"^{which} of the model's 3 layers over 2 d"):
            model.fit(*data(20), batch_size=8, verbose=0)
    with sg.PipelineStrategy(cpus(2), 4, memory=4e3, split=split) as strategy:
        model = sg.Model(mlp(), strategy)
        model.compile(optimizer="sgd", loss=F.cross_entropy)
        model.fit(*data(20), batch_size=8, verbose=0)
