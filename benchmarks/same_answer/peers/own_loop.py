"""stratagem, a loop of torch's own through `prepare`, started by `stratagem run`."""

from __future__ import annotations

import torch
from cases import Job, Result, counted, quality, weights
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


def run(job: Job) -> Result:
    strategy = sg.MirroredStrategy(sync_batchnorm=job.synchronised)
    try:
        return evaluate(job, strategy) if job.case.task == "evaluate" else train(job, strategy)
    finally:
        strategy.close()


def train(job: Job, strategy: sg.Strategy) -> Result:
    plan = sg.Checkpoints(job.folder, every=job.stop) if job.stop else None
    if job.stop:
        loop(job, strategy, plan, until=job.stop)
    return weights(loop(job, strategy, plan))


def loop(
    job: Job, strategy: sg.Strategy, plan: sg.Checkpoints | None, until: int | None = None
) -> nn.Module:
    """One device's loop; `until` breaks it off before this batch."""
    case, model = job.case, job.case.model()
    optimizer = case.optimizer(model.parameters())
    loader = DataLoader(job.data, case.batch, shuffle=case.shuffle, drop_last=case.drop_last)
    reduction = "sum" if case.accumulate > 1 else None
    model, optimizer, loader = strategy.prepare(
        model, optimizer, loader, resume=plan, loss_reduction=reduction
    )
    done = 0
    for _ in loader.epochs(case.epochs) if plan else range(case.epochs):
        if case.accumulate > 1:
            windows(job, strategy, model, optimizer, loader)
            continue
        for x, y in loader:
            if done == until:
                return model
            case.criterion(model(x), y).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    return model


def windows(
    job: Job,
    strategy: sg.Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
) -> None:
    """As docs/migration.md: each token of the batches of an update counts the same."""
    batches = iter(loader)
    for _ in range(0, job.case.steps, job.case.accumulate):
        window = [next(batches) for _ in range(job.case.accumulate)]
        total = sum(int(counted(strategy.gather(y))) for _, y in window)
        for x, y in window:
            (job.case.summed(model(x), y) / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(job: Job, strategy: sg.Strategy) -> Result:
    model, loader = job.case.model(), strategy.prepare(DataLoader(job.data, job.case.batch))
    with torch.no_grad():
        pairs = [(strategy.gather(model(x)), strategy.gather(y)) for x, y in loader]
    return quality(torch.cat([o for o, _ in pairs]), torch.cat([y for _, y in pairs]))
