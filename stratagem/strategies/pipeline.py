"""The pipeline strategy: a model split by layers into stages that microbatches pass through."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stratagem.arguments import by_name
from stratagem.cluster.environment import detect
from stratagem.cluster.spec import Place
from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.schedules import SCHEDULES
from stratagem.strategies.mirrored import devices_here, refuse_role
from stratagem.strategies.strategy import Strategy
from stratagem.training import cross_device
from stratagem.training.agreement import Patience
from stratagem.training.cross_device import (
    CrossDeviceOps,
    NcclAllReduce,
    RingAllReduce,
    SharedMemoryAllReduce,
)
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Pipeline, Settings

#: parts of the model on each device with an interleaved schedule
_PARTS = 2
ELSEWHERE = {
    "elastic": "every stage has layers that no other has, so none can leave or join; "
    "use fit(checkpoint=, resume=True)",
    "chunks": "it is microbatches=, or columns= for chunks of time",
    "num_microbatches": "it is microbatches=",
    "n_microbatches": "it is microbatches=",
}


class PipelineStrategy(Strategy):
    """A model split by layers over devices, with the result of one device.

    Args:
        devices: one for each stage, as in `["cpu:0", "cpu:1"]`: processes of this machine. With a
            cluster in the environment (TF_CONFIG, torchrun, Slurm, ...) the devices of every task
            are stages, in the order of the tasks; None takes each task's own devices.
        microbatches: pieces of a batch that go through the stages one after another; "auto"
            measures and takes the fastest number.
        schedule: "1f1b", "eager" (the same with more microbatches under way, so that no stage
            waits for messages), "gpipe" or "interleaved" (two parts of the model on each device).
        split: the names of the layers with which stages begin, from the second on; "auto" measures
            every layer and balances the stages.
        batch_norm: "microbatch" has BatchNorm normalise over microbatches, unlike one device;
            without it a model that has one is refused, unless microbatches=1.
        columns: cut stacks of LSTM, GRU or RNN layers, and their sequences into so many chunks of
            time, instead of batches into microbatches; "auto" tries several numbers on the first
            batches, and pieces by rows as well unless microbatches=1, and takes the fastest.
        memory: bytes that a stage may take for its parameters, gradients, two optimizer states and
            activations; None: no limit.
        data: parallel pipelines, as in `sg.Mesh`; `devices` names the devices of all of them.
        cross_device_ops: None takes shared memory on the CPUs of one machine, messages ("ring":
            Gloo's) between machines. "ring" sends messages on one machine, too.
        cluster: a `Place` to use instead of the one in the environment.
        patience: how long to wait for a stage.
        insecure: train over a network without STRATAGEM_SECRET; see docs/security.md.
    """

    @partial(by_name, elsewhere=ELSEWHERE)
    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        microbatches: int | str = "auto",
        schedule: str = "1f1b",
        split: Sequence[str] | str = "auto",
        *,
        batch_norm: str | None = None,
        columns: int | str | None = None,
        memory: float | None = None,
        data: int = 1,
        cross_device_ops: CrossDeviceOps | str | None = None,
        cluster: Place | None = None,
        patience: Patience | None = None,
        insecure: bool = False,
    ) -> None:
        place = cluster if cluster is not None else detect(os.environ)
        found, total = stage_devices(devices, place)
        op = _named_op(cross_device_ops)
        if schedule not in SCHEDULES:
            raise UsageError(
                f"schedule={schedule!r} is not known; choose one of "
                f"{', '.join(map(repr, SCHEDULES))}."
            )
        if batch_norm not in (None, "microbatch"):
            raise UsageError(
                f'batch_norm={batch_norm!r} is not known; it is "microbatch", or left out.'
            )
        if data != 1:
            _check_data(data, total, columns)
        if columns is not None:
            _check_columns(columns, microbatches, schedule, split, memory, found)
        pipeline = Pipeline(
            _count(1 if columns is not None else microbatches),
            schedule,
            _names(split),
            batch_norm,
            memory,
            _PARTS if schedule == "interleaved" else 1,
            0 if isinstance(columns, str) else columns,
            data,
            by_rows=columns == microbatches == "auto",
        )
        settings = Settings(op, pipeline=pipeline)
        alone = len(found) == total
        patience = patience or (Patience(answer=5.0) if alone else Patience())
        group = ReplicaGroup(found, settings, place, patience, insecure=insecure)
        super().__init__(group, settings)


def stage_devices(
    devices: Sequence[str | torch.device] | None, place: Place | None
) -> tuple[tuple[str, ...], int]:
    """Return the stages of this process, and the number of all if every task has as many."""
    refuse_role(place, "pipeline")
    tasks = 1 if place is None else len(place.spec.training_tasks())
    if devices is None and tasks == 1:
        raise UsageError(
            'a pipeline on one machine has a stage on every device; name them, as in ["cpu:0", '
            '"cpu:1"], or start several workers: `stratagem run --workers 2 train.py`.'
        )
    found = devices_here(devices, place)
    if any(not name.startswith(("cpu", "cuda")) for name in found):
        raise NotDistributable(
            f"a pipeline runs on CPUs and NVIDIA's GPUs, and the devices are {', '.join(found)}; "
            'name ["cpu:0", "cpu:1"], or use a MirroredStrategy.'
        )
    return found, tasks * len(found)


def _named_op(choice: CrossDeviceOps | str | None) -> CrossDeviceOps | str | None:
    op = cross_device.named(choice)
    if op not in (None, RingAllReduce(), SharedMemoryAllReduce(), NcclAllReduce()):
        raise UsageError(
            f"a pipeline has no cross_device_ops={choice!r}; choose one of 'shared_memory', "
            "'ring', 'nccl', or leave it out."
        )
    return op


def refuse_elsewhere(found: Sequence[str], what: str) -> None:
    """Refuse other devices than CPUs, and other machines than this one."""
    if any(not name.startswith("cpu") for name in found):
        raise NotDistributable(
            f"{what} CPUs of one machine so far, and the devices are "
            f'{", ".join(found)}; name ["cpu:0", "cpu:1"], or use a MirroredStrategy on GPUs.'
        )
    refuse_cluster(f"{what} CPUs of one machine so far")


def refuse_cluster(what: str, instead: str = "use a MultiWorkerMirroredStrategy") -> None:
    """Refuse an environment in which every task would train a model of its own."""
    place = detect(os.environ)
    if place is not None and len(place.spec.training_tasks()) > 1:
        raise NotDistributable(
            f"{what}, and the environment describes a cluster; start the script without it "
            f"(`python train.py`), or {instead}."
        )


def _check_data(data: Any, devices: int, columns: Any) -> None:
    if not isinstance(data, int) or data < 1 or devices % data or devices == data:
        raise UsageError(
            f"data={data!r}, and there are {devices} devices; give a number of pipelines that "
            "divides the devices, with two or more for each."
        )
    if columns is not None:
        raise UsageError("data= shares batches out, and columns= cuts sequences; use one of them.")


def _check_columns(
    columns: Any,
    microbatches: Any,
    schedule: str,
    split: Any,
    memory: float | None,
    devices: Sequence[str],
) -> None:
    if any(not name.startswith("cpu") for name in devices):
        raise NotDistributable(
            f"columns run on CPUs so far, and the devices are {', '.join(devices)}; leave columns "
            "out, or name CPUs."
        )
    whole = isinstance(columns, int) and not isinstance(columns, bool) and columns >= 1
    if not whole and columns != "auto":
        raise UsageError(
            f'columns={columns!r}; give the number of chunks of time, 1 or more, or "auto".'
        )
    if microbatches not in ("auto", 1) or (schedule, split, memory) != ("1f1b", "auto", None):
        raise UsageError(
            "columns cut the sequence and not the batch, in a schedule of their own, by the "
            "weights of recurrent layers; leave microbatches, schedule, split and memory out."
        )


def _count(microbatches: int | str) -> int | None:
    if microbatches == "auto":
        return None
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
    if not whole or int(microbatches) < 1:
        raise UsageError(f'microbatches={microbatches!r}; give a number of at least 1, or "auto".')
    return int(microbatches)


def _names(split: Sequence[str] | str) -> tuple[str, ...] | None:
    if isinstance(split, str):
        return None if split == "auto" else (split,)
    if not all(isinstance(name, str) for name in split):
        raise UsageError(
            f'split={split!r}; give names of layers, as in ["layer3", "head"], or "auto".'
        )
    return tuple(split)
