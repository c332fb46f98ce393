"""How far a training with servers has come in an epoch: what a checkpoint has of it.

Between two segments of an epoch every worker has reported, so the chief knows all there is; what
other workers draw (dropout) begins anew with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stratagem.data.streams import generator_states
from stratagem.frontends import replica_progress
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.loss_sum import LossSum
from stratagem.training.replica import Replica, alone
from stratagem.training.replica_state import take_buffers


def gathered(job: Fit, counted: Sequence[Any], loss: Sequence[Any]) -> dict[str, Any]:
    """What replicas have, as if each report were a replica's."""
    held = [] if job.validation is None else job.validation.dice()
    tally = LossSum()
    tally.load_state({"sum": loss[0], "examples": loss[1], "losses": None, "totals": []})
    random = generator_states()
    return {
        "seed": job.source.seed,
        "data": torch.get_rng_state(),
        "pass": job.source.journal.begun,
        "dice": [each.get_state() for each in (*job.source.dice(), *held)],
        "replicas": [{"random": random, "metrics": each, "buffers": []} for each in counted],
        "tally": tally.state(),
        "scaler": None,
    }


def go_on(job: Fit, replica: Replica, saved: dict[str, Any]) -> list[Any]:
    """As the chief: go on from that, or from what replicas have saved; returns the loss so far."""
    chief, replicas = alone(replica), saved["replicas"]
    job.recipe.metrics.go_on([each["metrics"] for each in replicas], chief)
    take_buffers(list(job.module.buffers()), [each["buffers"] for each in replicas], chief)
    tally = LossSum()
    tally.load_state(saved["tally"])
    # there is one stream here, for the data and for what the chief draws
    random = {**replicas[0]["random"], "torch": saved["data"]}
    replica_progress.go_on_with_data(job, chief, saved, random)
    return tally.total()
