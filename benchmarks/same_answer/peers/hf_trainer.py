"""Hugging Face's Trainer: num_items_in_batch, average_tokens_across_devices (its default)."""

from __future__ import annotations

from typing import Any

import torch
from cases import Job, Result, quality, weights
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

import peers


class Rows(Dataset):
    """Rows by name, as the Trainer wants them."""

    def __init__(self, job: Job) -> None:
        self.rows = job.data

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self.rows[index]
        return {"x": x, "labels": y}


class Net(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


class OwnLoss(Trainer):
    """A loss that is no sum over labels is put into compute_loss."""

    case: Any

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(inputs["x"])
        if self.case.task == "evaluate":
            loss = nn.functional.binary_cross_entropy_with_logits(
                output["logits"], inputs["labels"]
            )
        else:
            loss = self.case.criterion(output["logits"], inputs["labels"])
        return (loss, output) if return_outputs else loss


class Stop(TrainerCallback):
    """Saves and ends after so many updates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == self.after:
            control.should_save = control.should_training_stop = True
        return control


def run(job: Job) -> Result:
    case = job.case
    if case.task == "evaluate":
        found = trainer(job).evaluate()
        return {name: [found[f"eval_{name}"]] for name in ("accuracy", "auc")}
    saved = None
    if job.stop:
        trainer(job, Stop(job.stop)).train()
        saved = str(job.folder / f"checkpoint-{job.stop}")
    last = trainer(job)
    last.train(resume_from_checkpoint=saved)
    return weights(last.accelerator.unwrap_model(last.model).net)


def trainer(job: Job, *callbacks: TrainerCallback) -> Trainer:
    case, split = job.case, job.way == peers.SPLIT
    model, data = Net(case.model()), Rows(job)
    if job.synchronised:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = case.optimizer(model.parameters())
    settings = TrainingArguments(
        output_dir=str(job.folder),
        use_cpu=True,
        seed=0,
        num_train_epochs=case.epochs,
        per_device_train_batch_size=case.batch if split else job.share,
        per_device_eval_batch_size=job.share,
        gradient_accumulation_steps=case.accumulate,
        max_grad_norm=case.clip or 0.0,
        dataloader_drop_last=case.drop_last,
        accelerator_config={"split_batches": split},
        train_sampling_strategy="random" if case.shuffle else "sequential",
        remove_unused_columns=False,
        label_names=["labels"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    def mean_of_items(output: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor):
        return case.summed(output["logits"], labels) / num_items_in_batch

    def sum_of_items(output: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor):
        return case.summed(output["logits"], labels)

    def metrics(found: EvalPrediction) -> dict[str, float]:
        return {
            name: value[0]
            for name, value in quality(
                torch.tensor(found.predictions), torch.tensor(found.label_ids)
            ).items()
        }

    own = case.loss == "weights" or case.task == "evaluate"
    made = (OwnLoss if own else Trainer)(
        model,
        settings,
        train_dataset=data,
        eval_dataset=data,
        compute_loss_func=None if own else sum_of_items if case.loss == "sum" else mean_of_items,
        compute_metrics=metrics,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        callbacks=list(callbacks),
    )
    made.case = case
    return made
