"""Models, optimizers and loaders that another library has distributed already are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stratagem as sg
from tests.support import data, in_step, mlp

pytestmark = pytest.mark.timeout(60)

dist: Any = torch.distributed  # which does not say that it has all of its own names

#: a model, its optimizer and a loader
Given = tuple[Any, Any, Any]


@contextmanager
def a_group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def given(model: nn.Module | None = None) -> Given:
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(TensorDataset(*data(21)), batch_size=8)


def ddp() -> Given:
    return given(DistributedDataParallel(mlp()))


def a_part_in_ddp() -> Given:
    return given(nn.Sequential(DistributedDataParallel(nn.Linear(6, 6)), nn.Linear(6, 4)))


def sharded() -> Given:
    model = mlp()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return given(model)


def divided() -> Given:
    mesh = dist.init_device_mesh("cpu", (1,))
    return given(parallelize_module(mlp(), mesh, {"0": ColwiseParallel()}))


def a_part_of_the_rows() -> Given:
    model, optimizer, loader = given()
    part: Any = DistributedSampler(loader.dataset, num_replicas=2, rank=0)
    return model, optimizer, DataLoader(loader.dataset, batch_size=4, sampler=part)


def of_accelerate(name: str, base: type) -> type:
    """A class as `accelerator.prepare` returns an object of."""
    return type(name, (base,), {"__module__": "accelerate.data_loader"})


def their_optimizer() -> Given:
    model, optimizer, loader = given()
    optimizer.__class__ = of_accelerate("AcceleratedOptimizer", type(optimizer))
    return model, optimizer, loader


def their_loader() -> Given:
    model, optimizer, loader = given()
    loader.__class__ = of_accelerate("DataLoaderShard", DataLoader)
    return model, optimizer, loader


CASES: dict[Callable[[], Given], str] = {
    ddp: r"DistributedDataParallel.*leave the wrapper out",
    a_part_in_ddp: r"DistributedDataParallel.*leave the wrapper out",
    sharded: r"'0.weight' is a DTensor.*ShardedStrategy in place of fully_shard",
    divided: r"'0.weight' is a DTensor.*TensorParallelStrategy in place of parallelize_module",
    a_part_of_the_rows: r"DistributedSampler.*leave the sampler out",
    their_optimizer: r"AcceleratedOptimizer comes from accelerate.*give your own",
    their_loader: r"DataLoaderShard comes from accelerate.*give your own",
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["one", "shared_memory", "servers", "pipeline"])
def test_prepare_takes_nothing_that_is_distributed_already(
    make: Callable[[], Given], kind: str
) -> None:
    def prepare() -> None:
        with a_group_of_one():
            on.prepare(*make())

    made = sg.PipelineStrategy(["cpu:0", "cpu:1"]) if kind == "pipeline" else in_step(kind, 2)
    with made as on, pytest.raises((sg.UsageError, sg.ReplicaFailed), match=CASES[make]):
        on.run(prepare)


def test_fit_takes_no_model_that_is_distributed_already(two: sg.MirroredStrategy) -> None:
    with a_group_of_one(), two.scope():
        wrapped, optimizer, _ = ddp()
        model = sg.Model(wrapped)
    model.compile(optimizer, loss="cross_entropy")
    with pytest.raises(sg.UsageError, match=r"DistributedDataParallel.*leave the wrapper out"):
        model.fit(*data(21), batch_size=8, verbose=0)


def test_the_loader_of_an_evaluation_is_looked_at_too(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"DataLoaderShard comes from accelerate"):
        two.run(lambda: two.prepare(their_loader()[2]))
