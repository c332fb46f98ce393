"""Mirrored strategies: a copy of the model on each device, one update for all."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stratagem.cluster.environment import detect
from stratagem.cluster.spec import Place
from stratagem.codecs.reducer import wire_type
from stratagem.errors import UsageError
from stratagem.strategies import cross_device, devices
from stratagem.strategies.agreement import Patience
from stratagem.strategies.cross_device import CrossDeviceOps
from stratagem.strategies.settings import Settings
from stratagem.strategies.strategy import Strategy
from stratagem.strategies.team import Team


class MirroredStrategy(Strategy):
    """Data parallelism with the result of one device.

    Args:
        devices: `["/gpu:0", "/gpu:1"]`, `["cuda:0"]`, `["cpu:0", "cpu:1"]`; by default every GPU,
            else the CPU.
        cross_device_ops: how gradients are added up; see `stratagem.strategies.cross_device`.
            None takes the usual one, "auto" measures and takes the fastest.
        wire: "bfloat16" halves the bytes that travel; sums stay in fp32.
        sync_batchnorm: normalise over the global batch instead of each replica's share.
        cluster: a `Place` to use instead of the one in the environment.
        patience: how long to wait for tasks.

    With a cluster in the environment (TF_CONFIG, torchrun, Slurm, Kubernetes, Vertex AI) the
    replicas of all its workers train together.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | str | None = None,
        cross_device_ops: CrossDeviceOps | str | None = None,
        *,
        wire: str | None = None,
        sync_batchnorm: bool = False,
        cluster: Place | None = None,
        patience: Patience | None = None,
    ) -> None:
        wire_type(wire)  # raises at once if there is no such type
        settings = Settings(cross_device.named(cross_device_ops), wire, sync_batchnorm)
        place = cluster if cluster is not None else detect(os.environ)
        _check_role(place)
        team = Team(_devices(devices, place), settings, place, patience or Patience())
        super().__init__(team, settings)


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """`MirroredStrategy` over the workers of a cluster; `communication` chooses the collective.

    Args:
        communication: "ring", "nccl" or "auto" (measure); None takes the usual one.
        cluster: a `Place`; by default read from the environment.
    """

    def __init__(
        self,
        communication: str | None = None,
        *,
        devices: Sequence[str | torch.device] | str | None = None,
        wire: str | None = None,
        sync_batchnorm: bool = False,
        cluster: Place | None = None,
        patience: Patience | None = None,
    ) -> None:
        if communication not in (None, "ring", "nccl", "auto"):
            raise UsageError(
                f'communication={communication!r} is not known; choose "ring", "nccl" or "auto".'
            )
        super().__init__(
            devices, communication, wire=wire, sync_batchnorm=sync_batchnorm, cluster=cluster,
            patience=patience,
        )  # fmt: skip


def _devices(
    names: Sequence[str | torch.device] | str | None, place: Place | None
) -> tuple[str, ...]:
    found = devices.resolve(names)
    if names is None and place is not None and place.local_rank is not None:
        # A launcher that started a process per device: take one, not all.
        return (found[place.local_rank % len(found)],)
    return found


def _check_role(place: Place | None) -> None:
    if place is None or place.task.type in ("chief", "worker"):
        return
    raise UsageError(
        f"this task is {place.task}, and only the chief and the workers of a mirrored strategy "
        f"train. {_INSTEAD[place.task.type]}"
    )


#: what a task that does not train should do
_INSTEAD = {
    "ps": "There are no parameters to serve: every replica holds them. End the script there before "
    "the strategy is made, or leave ps out of the cluster; the others do not wait for it.",
    "evaluator": "Make the model without a strategy there, then model.load each checkpoint that "
    "the chief writes and model.evaluate it; the others do not wait for it.",
}


def single_device() -> Strategy:
    """One replica on the first device here: what a model without a scope uses."""
    settings = Settings()
    return Strategy(Team(devices.present()[:1], settings, None, Patience()), settings)
