"""stratagem, a Keras model in a strategy's scope, started by `stratagem run`."""

from __future__ import annotations

from cases import Job, Result

import stratagem as sg
from peers.keras_script import Batches, evaluate, train


def run(job: Job) -> Result:
    script = evaluate if job.case.task == "evaluate" else train
    strategy = sg.MirroredStrategy(sync_batchnorm=job.synchronised)
    try:
        with strategy.scope():
            return script(job, lambda: Batches(job, job.case.batch))
    finally:
        strategy.close()
