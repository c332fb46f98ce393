"""Accelerate: `prepare`, with even_batches or split_batches, and the sums of its guide on
accumulation over samples of variable size."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from cases import Job, Result, counted, quality, weights
from torch import nn
from torch.utils.data import DataLoader

import peers


def run(job: Job) -> Result:
    case, split = job.case, job.way == peers.SPLIT
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(
            split_batches=split, use_seedable_sampler=case.shuffle
        ),
    )
    model, batch = case.model(), case.batch if split else job.share
    if job.synchronised:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = case.optimizer(model.parameters())
    loader = DataLoader(job.data, batch, shuffle=case.shuffle, drop_last=case.drop_last)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if case.task == "evaluate":
        return evaluate(accelerator, model, loader)
    done = 0
    if job.stop:
        train(job, accelerator, model, optimizer, loader, until=job.stop)
        accelerator.save_state(job.folder)
        model, optimizer, loader = case.model(), None, None
        accelerator.free_memory()
        optimizer = case.optimizer(model.parameters())
        loader = DataLoader(job.data, batch, shuffle=case.shuffle)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.load_state(job.folder)
        done = job.stop
    train(job, accelerator, model, optimizer, loader, done)
    return weights(accelerator.unwrap_model(model))


def train(job, accelerator, model, optimizer, loader, done: int = 0, until: int = -1) -> None:
    """From update `done` on, up to `until`."""
    case = job.case
    for epoch in range(done // case.steps, case.epochs):
        loader.set_epoch(epoch)
        seen = done - epoch * case.steps
        batches = skip_first_batches(loader, seen) if seen > 0 else loader
        if case.accumulate > 1 or job.way == peers.ITEMS:
            windows(job, accelerator, model, optimizer, batches)
            continue
        for x, y in batches:
            if done == until:
                return
            # DDP takes the mean of the gradients: its notes on summed losses
            scale = accelerator.num_processes if case.loss == "sum" else 1
            accelerator.backward(scale * case.criterion(model(x), y))
            if case.clip:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def windows(job, accelerator, model, optimizer, loader) -> None:
    """As its guide: summed losses, divided by the gathered number of targets of the update."""
    steps, batches = job.case.accumulate, iter(loader)
    for _ in range(len(loader) // steps):
        window = [next(batches) for _ in range(steps)]
        total = accelerator.gather(sum(counted(y) for _, y in window)).sum()
        for i, (x, y) in enumerate(window, 1):
            alone = accelerator.num_processes == 1
            with nullcontext() if i == steps or alone else model.no_sync():
                loss = job.case.summed(model(x), y)
                accelerator.backward(loss * steps * accelerator.num_processes / total)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> Result:
    pairs = [accelerator.gather_for_metrics((model(x), y)) for x, y in loader]
    return quality(torch.cat([o for o, _ in pairs]), torch.cat([y for _, y in pairs]))
