"""DistributedDataParallel under torchrun, with DistributedSampler, Join and SyncBatchNorm."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from cases import Job, Result, quality, weights
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from peers import torchrun as command

TITLE = "DDP"
PACKAGES = {"torch": (2, 11)}
UNEVEN = ("DistributedSampler", "Join")
WAYS = {"short": UNEVEN, "few": UNEVEN, "odd": UNEVEN}
OMITTED = {"resumed": "no checkpoint of its own; its tutorial saves at the end of epochs"}


def run(job: Job) -> Result:
    case = job.case
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if case.task == "evaluate":
        return evaluate(job)
    module = case.model()
    if job.synchronised:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model = DistributedDataParallel(module)
    optimizer = case.optimizer(model)
    sampler = None
    if job.way == "Join":  # each process has every N-th row, none twice
        rows = range(dist.get_rank(), len(job.data), job.replicas)
        loader = DataLoader(Subset(job.data, rows), job.share)
        uneven = Join([model], divide_by_initial_world_size=False)
    else:
        sampler = DistributedSampler(job.data, shuffle=case.shuffle, drop_last=case.drop_last)
        loader = DataLoader(job.data, job.share, sampler=sampler, drop_last=case.drop_last)
        uneven = nullcontext()
    # "the gradient will be M times smaller [...] if the loss is summed": its notes
    scale = job.replicas if case.loss == "sum" else 1
    for epoch in range(case.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        with uneven:
            for i, (x, y) in enumerate(loader, 1):
                last = i % case.accumulate == 0 or i == len(loader)
                with nullcontext() if last else model.no_sync():
                    (scale * case.criterion(model(x), y) / case.accumulate).backward()
                if last:
                    if case.clip:
                        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                    optimizer.step()
                    optimizer.zero_grad()
    return weights(module)


def evaluate(job: Job) -> Result:
    """As pytorch/examples/imagenet: even shares first, then the rest of the rows everywhere."""
    model, data, world = job.case.model(), job.data, job.replicas
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    rest = Subset(data, range(len(sampler) * world, len(data)))

    @torch.no_grad()
    def outputs(loader: DataLoader) -> tuple[Tensor, Tensor]:
        pairs = [(model(x), y) for x, y in loader]
        return torch.cat([o for o, _ in pairs]), torch.cat([y for _, y in pairs])

    parts = []
    for mine in outputs(DataLoader(data, job.share, sampler=sampler)):
        everywhere = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everywhere, mine)
        parts.append(everywhere)
    if len(rest):
        for part, more in zip(parts, outputs(DataLoader(rest, job.share)), strict=True):
            part.append(more)
    return quality(torch.cat(parts[0]), torch.cat(parts[1]))
