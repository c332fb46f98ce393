"""DistributedDataParallel under torchrun, with DistributedSampler, Join and SyncBatchNorm; a resume
with torchdata's StatefulDataLoader."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from cases import Job, Result, quality, weights
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import peers


def run(job: Job) -> Result:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if job.case.task == "evaluate":
        return evaluate(job)
    if job.stop:
        train(job, until=job.stop)
        return train(job, torch.load(job.folder / f"{dist.get_rank()}.pt"))
    return train(job)


def train(job: Job, saved: dict[str, Any] | None = None, until: int = 0) -> Result:
    """One device's loop, in shares; `until`: save and leave after so many batches."""
    case, module = job.case, job.case.model()
    if job.synchronised:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model = DistributedDataParallel(module)
    optimizer = case.optimizer(model.parameters())
    loader, uneven = batches(job, model)
    if saved:
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    # "the gradient will be M times smaller [...] if the loss is summed": its notes
    scale, done = job.replicas if case.loss == "sum" else 1, 0
    for epoch in range(saved["epoch"] if saved else 0, case.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
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
                done += 1
                if done == until:
                    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                    state |= {"loader": loader.state_dict(), "epoch": epoch}
                    torch.save(state, job.folder / f"{dist.get_rank()}.pt")
                    return {}
    return weights(module)


def batches(job: Job, model: DistributedDataParallel) -> tuple[DataLoader, Any]:
    """A process' batches, and what lets processes have unequal numbers of them."""
    case, data = job.case, job.data
    if job.way == peers.JOIN:  # each process has every N-th row, none twice
        rows = Subset(data, range(dist.get_rank(), len(data), job.replicas))
        return DataLoader(rows, job.share), Join([model], divide_by_initial_world_size=False)
    sampler = DistributedSampler(data, shuffle=case.shuffle, drop_last=case.drop_last)
    kind = DataLoader
    if case.task == "resume":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    return kind(data, job.share, sampler=sampler, drop_last=case.drop_last), nullcontext()


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
