"""Keras' own DataParallel on torch, under torchrun: a PyDataset that it deals out, or a DataLoader
that is dealt out already (auto_shard_dataset=False)."""

from __future__ import annotations

import os

import keras
from cases import Job, Result
from torch.utils.data import DataLoader, DistributedSampler

from peers.keras_script import Batches, evaluate, train


def run(job: Job) -> Result:
    case, dealt = job.case, job.way == "DataLoader"

    def data() -> DataLoader | Batches:
        if not dealt:
            return Batches(job.data, job.share, case.drop_last)
        sampler = DistributedSampler(
            job.data, job.replicas, int(os.environ.get("RANK", "0")), shuffle=case.shuffle
        )
        return DataLoader(job.data, job.share, sampler=sampler)

    script = evaluate if case.task == "evaluate" else train
    if job.replicas == 1:
        return script(job, data)
    keras.distribution.initialize()
    with keras.distribution.DataParallel(auto_shard_dataset=not dealt).scope():
        return script(job, data)
