"""Keras' own DataParallel on torch, under torchrun: a PyDataset that it deals out, or a DataLoader
that is dealt out already (auto_shard_dataset=False)."""

from __future__ import annotations

import os

import keras
from cases import Job, Result
from torch.utils.data import DataLoader, DistributedSampler

import peers
from peers.keras_script import Batches, evaluate, train


def run(job: Job) -> Result:
    if job.replicas == 1:
        return script(job)
    keras.distribution.initialize()
    with keras.distribution.DataParallel(auto_shard_dataset=job.way != peers.LOADER).scope():
        return script(job)


def script(job: Job) -> Result:
    def data() -> DataLoader | Batches:
        if job.way != peers.LOADER:
            return Batches(job, job.share)
        rank, shuffle = int(os.environ.get("RANK", "0")), job.case.shuffle
        sampler = DistributedSampler(job.data, job.replicas, rank, shuffle=shuffle)
        return DataLoader(job.data, job.share, sampler=sampler)

    if job.case.task == "evaluate":
        return evaluate(job, data)
    return train(job, data, job.synchronised)
