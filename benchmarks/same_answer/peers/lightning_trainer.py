"""Lightning's Trainer with its DDP strategy: sync_batchnorm, sync_dist, torchmetrics; a resume with
torchdata's StatefulDataLoader."""

from __future__ import annotations

import logging
import os

import lightning
import torch
from cases import Job, Result, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

import peers

ITS_SAMPLER = "use_distributed_sampler"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.case, self.net = job.case, job.case.model()
        self.metrics = nn.ModuleDict({"accuracy": BinaryAccuracy(), "auc": BinaryAUROC()})

    def training_step(self, batch: list[Tensor]) -> Tensor:
        # DDP takes the mean of the gradients: torch's notes on summed losses
        scale = self.trainer.world_size if self.case.loss == "sum" else 1
        loss = scale * self.case.criterion(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: list[Tensor]) -> None:
        output = self.net(batch[0]).flatten()
        for name, metric in self.metrics.items():
            metric.update(output.sigmoid(), batch[1].flatten().long())
            self.log(name, metric, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.net.parameters())


def run(job: Job) -> Result:
    lightning.seed_everything(0, verbose=False)
    case = job.case
    loader = batches(job)
    if case.task == "evaluate":
        found = trainer(job).test(Module(job), loader, verbose=False)[0]
        return {name: [float(found[name])] for name in ("accuracy", "auc")}
    saved = None
    if job.stop:
        keep = ModelCheckpoint(job.folder, every_n_train_steps=job.stop, save_last=True)
        first = trainer(job, max_steps=job.stop, callbacks=[keep], enable_checkpointing=True)
        first.fit(Module(job), loader)
        lightning.seed_everything(0, verbose=False)
        loader = batches(job)
        saved = str(job.folder / "last.ckpt")
    module = Module(job)
    trainer(job).fit(module, loader, ckpt_path=saved)
    return weights(module.net)


def its_sampler(job: Job) -> bool:
    """Whether Lightning puts its own sampler in place, which always shuffles in training."""
    return job.way == peers.ITS_SAMPLER or job.case.task == "evaluate"


def batches(job: Job) -> DataLoader:
    case, batch = job.case, job.share
    if its_sampler(job):
        return DataLoader(job.data, batch, shuffle=case.shuffle, drop_last=case.drop_last)
    sampler = DistributedSampler(
        job.data,
        num_replicas=job.replicas,
        rank=int(os.environ["RANK"]),
        shuffle=case.shuffle,
        drop_last=case.drop_last,
    )
    kind = StatefulDataLoader if job.way == peers.STATEFUL else DataLoader
    return kind(job.data, batch, sampler=sampler, drop_last=case.drop_last)


def trainer(job: Job, **extra) -> lightning.Trainer:
    defaults = {
        "enable_checkpointing": False,
        "max_epochs": job.case.epochs,
        "accumulate_grad_batches": job.case.accumulate,
        "gradient_clip_val": job.case.clip,
        "use_distributed_sampler": its_sampler(job),
        "sync_batchnorm": job.synchronised,
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=job.replicas,
        strategy="ddp" if job.replicas > 1 else "auto",
        **(defaults | quiet | extra),
    )
