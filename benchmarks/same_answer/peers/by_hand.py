"""One device, a loop written by hand: what peers on one device are compared with."""

from __future__ import annotations

from cases import Job, Result, counted, quality, weights
from torch import nn
from torch.utils.data import DataLoader


def run(job: Job) -> Result:
    case, model = job.case, job.case.model()
    if case.task == "evaluate":
        return quality(model(job.data.x).detach(), job.data.y)
    optimizer = case.optimizer(model.parameters())
    loader = DataLoader(job.data, case.batch, shuffle=case.shuffle, drop_last=case.drop_last)
    for _ in range(case.epochs):
        batches = iter(loader)
        for _ in range(0, case.steps, case.accumulate):
            window = [next(batches) for _ in range(case.accumulate)]
            if case.accumulate > 1:  # every target of the update counts the same
                total = sum(counted(y) for _, y in window)
                sum(case.summed(model(x), y) / total for x, y in window).backward()
            else:
                case.criterion(model(window[0][0]), window[0][1]).backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)
