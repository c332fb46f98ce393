"""stratagem, `sg.Model` and `fit`, started by `stratagem run`."""

from __future__ import annotations

import shutil

import torch
from cases import CLASS_WEIGHTS, IGNORED, Job, Result, weights
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

import stratagem as sg


def run(job: Job) -> Result:
    case, strategy = job.case, sg.MirroredStrategy(sync_batchnorm=job.synchronised)
    try:
        if case.task == "evaluate":
            return evaluate(job, strategy)
        if job.stop:
            fit(job, strategy, checkpoint=sg.Checkpoints(job.folder, every=job.stop, keep=9))
            if strategy.is_chief:  # as if the training had ended there
                for path in job.folder.iterdir():
                    if path.is_dir() and not path.name.endswith(f"-{job.stop}"):
                        shutil.rmtree(path)
            return fit(job, strategy, checkpoint=str(job.folder), resume=True)
        return fit(job, strategy)
    finally:
        strategy.close()


def fit(job: Job, strategy: sg.Strategy, **extra) -> Result:
    case, module = job.case, job.case.model()
    if case.tokens:  # torch's losses have classes in dimension 1
        module = nn.Sequential(*module, ClassesFirst())
    loss = nn.CrossEntropyLoss(
        weight=torch.tensor(CLASS_WEIGHTS) if case.loss == "weights" else None,
        ignore_index=IGNORED,
        reduction="sum" if case.loss == "sum" else "mean",
    )
    with strategy.scope():
        model = sg.Model(module)
        model.compile(case.optimizer, loss, clip_norm=case.clip, accumulate=case.accumulate)
    torch.manual_seed(0)
    loader = DataLoader(job.data, case.batch, shuffle=case.shuffle, drop_last=case.drop_last)
    model.fit(loader, epochs=case.epochs, verbose=0, **extra)
    return weights(model.module)


class ClassesFirst(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def evaluate(job: Job, strategy: sg.Strategy) -> Result:
    with strategy.scope():
        model = sg.Model(job.case.model())
        model.compile(
            "sgd",
            nn.BCEWithLogitsLoss(),
            metrics={"accuracy": BinaryAccuracy(threshold=0.5), "auc": BinaryAUROC()},
        )
    found = model.evaluate(DataLoader(job.data, job.case.batch), verbose=0)
    return {name: [float(found[name])] for name in ("accuracy", "auc")}
