"""Mirrored strategies: a copy of the model on each device, one update for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

import torch

from stratagem.arguments import by_name
from stratagem.capabilities import sentence
from stratagem.cluster.environment import detect
from stratagem.cluster.spec import Place
from stratagem.codecs.topk import TopK
from stratagem.codecs.wire_choice import Wire, check_wire
from stratagem.errors import UsageError
from stratagem.rules.cadence import DiLoCo, EveryStep, Gossip, LocalSteps, Sync
from stratagem.strategies.strategy import Strategy
from stratagem.training import cross_device, devices
from stratagem.training.agreement import Patience
from stratagem.training.cross_device import CrossDeviceOps
from stratagem.training.local_steps import LocalUpdates
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Settings


class MirroredStrategy(Strategy):
    """Data parallelism with the result of one device.

    Args:
        devices: `["/gpu:0", "/gpu:1"]`, `["cuda:0"]`, `["cpu:0", "cpu:1"]`; by default every GPU,
            else the CPU.
        cross_device_ops: how gradients are added up; see `stratagem.training.cross_device`.
            None takes the usual one, "auto" measures and takes the fastest.
        wire: "bfloat16" halves the bytes that travel; sums stay in fp32. Or a compression, such as
            `sg.Int8()`, `sg.TopK(0.01)`: see docs/fewer-bytes.md.
        sync: when replicas meet: `sg.EveryStep()`, or `sg.LocalSteps(20)`, `sg.DiLoCo(20)`,
            `sg.Gossip("ring")`: see docs/fewer-meetings.md.
        sync_batchnorm: normalise over the global batch instead of each replica's share.
        cluster: a `Place` to use instead of the one in the environment.
        patience: how long to wait for tasks.
        insecure: train over a network without STRATAGEM_SECRET; see docs/security.md.
        elastic: replicas may die and join while `fit`, or a custom loop, goes on with the same
            result; see docs/elastic.md.
        min_replicas: with elastic, how many processes of a cluster must be left to go on.

    With a cluster in the environment (TF_CONFIG, torchrun, Slurm, Kubernetes, Vertex AI) the
    replicas of all its workers train together.
    """

    @by_name
    def __init__(
        self,
        devices: Sequence[str | torch.device] | str | None = None,
        cross_device_ops: CrossDeviceOps | str | None = None,
        *,
        wire: Wire = None,
        sync: Sync | None = None,
        sync_batchnorm: bool = False,
        cluster: Place | None = None,
        patience: Patience | None = None,
        insecure: bool = False,
        elastic: bool = False,
        min_replicas: int = 1,
    ) -> None:
        check_wire(wire)  # raises at once if there is no such type
        if elastic and isinstance(wire, TopK) and wire.momentum:
            raise UsageError(
                f"elastic=True may leave one replica, which sends nothing, and wire={wire!r} keeps "
                "a momentum of what is sent; leave the momentum to the optimizer."
            )
        op = cross_device.named(cross_device_ops)
        settings = Settings(op, wire, sync_batchnorm, elastic=elastic)
        settings = meeting(settings, sync)
        place = cluster if cluster is not None else detect(os.environ)
        refuse_role(place, "mirrored")
        found, patience = devices_here(devices, place), patience or Patience()
        replica_group = ReplicaGroup(
            found,
            settings,
            place,
            patience,
            insecure=insecure,
            min_replicas=min_replicas if elastic else None,
        )
        super().__init__(replica_group, settings)


class CollectiveCommunication(StrEnum):
    """The values of `communication` of a MultiWorkerMirroredStrategy."""

    AUTO = "auto"
    RING = "ring"
    NCCL = "nccl"
    HIERARCHICAL = "hierarchical"


#: tf.distribute's names of options, and what they are called here
_ELSEWHERE = {
    "cross_device_ops": 'it is communication="ring", "nccl", "hierarchical" or "auto"; '
    "sg.MirroredStrategy takes any of cross_device_ops, over the workers of a cluster, too",
    "communication_options": 'it is communication="ring", "nccl", "hierarchical" or "auto"',
    "cluster_resolver": "the cluster is read from the environment (TF_CONFIG, torchrun, Slurm, "
    "...), or given as cluster=sg.Place(...)",
}


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """`MirroredStrategy` over the workers of a cluster; `communication` chooses the collective.

    Args:
        communication: "ring", "nccl", "hierarchical" (inside each host first) or "auto" (measure);
            None takes the usual one.
        cluster: a `Place`; by default read from the environment.
        insecure: train over a network without STRATAGEM_SECRET; see docs/security.md.
        wire, sync, elastic, min_replicas: as in `MirroredStrategy`.
    """

    @partial(by_name, elsewhere=_ELSEWHERE)
    def __init__(
        self,
        communication: str | None = None,
        *,
        devices: Sequence[str | torch.device] | str | None = None,
        wire: Wire = None,
        sync: Sync | None = None,
        sync_batchnorm: bool = False,
        cluster: Place | None = None,
        patience: Patience | None = None,
        insecure: bool = False,
        elastic: bool = False,
        min_replicas: int = 1,
    ) -> None:
        if communication is not None and communication not in list(CollectiveCommunication):
            raise UsageError(
                f"communication={communication!r} is not known; choose one of "
                f"{', '.join(repr(each.value) for each in CollectiveCommunication)}."
            )
        super().__init__(
            devices,
            communication,
            wire=wire,
            sync=sync,
            sync_batchnorm=sync_batchnorm,
            cluster=cluster,
            patience=patience,
            insecure=insecure,
            elastic=elastic,
            min_replicas=min_replicas,
        )


def meeting(settings: Settings, sync: Sync | None) -> Settings:
    """Return the settings of replicas that meet as `sync` says."""
    if sync is None or isinstance(sync, EveryStep):
        return settings
    if not isinstance(sync, Sync):
        raise UsageError(
            f"sync={sync!r}; it is sg.EveryStep(), sg.LocalSteps(20), sg.DiLoCo(20) or "
            'sg.Gossip("ring").'
        )
    if settings.sync_batchnorm:
        raise UsageError(sentence("averaged", "sync_batchnorm", sync=repr(sync)))
    sync = _with_wire(sync, settings.wire)
    made = partial(LocalUpdates, every=sync, undoes=settings.elastic)
    return replace(settings, wire=None, sync=sync, committer=made)


def _with_wire(sync: Sync, wire: Wire) -> Sync:
    """Return `sync` with the wire of the strategy, unless it has one of its own."""
    if isinstance(sync, Gossip) and wire not in (None, "float32"):
        raise UsageError(
            f"wire={wire!r} leaves out a part of the weights that {sync!r} mixes, and their mean "
            "would drift; leave wire out, or use sg.DiLoCo."
        )
    if not isinstance(sync, LocalSteps | DiLoCo):
        return sync
    if wire is not None and sync.wire is not None:
        raise UsageError(
            f"wire={wire!r} of the strategy and sync={sync!r} both say what travels at meetings; "
            "leave one out."
        )
    sync = replace(sync, wire=wire if sync.wire is None else sync.wire)
    check_wire(sync.wire)
    if isinstance(sync.wire, TopK) and sync.wire.momentum:
        raise UsageError(
            f"wire={sync.wire!r} keeps a momentum of gradients, and with sync= none travel; "
            "leave momentum out, and give one to the optimizer, or to sg.DiLoCo's outer one."
        )
    return sync


def devices_here(
    names: Sequence[str | torch.device] | str | None, place: Place | None
) -> tuple[str, ...]:
    """Resolve the devices of this process."""
    found = devices.resolve(names)
    if names is None and place is not None and place.local_rank is not None:
        # the launcher has started a process for each device: take one, not all
        return (found[place.local_rank % len(found)],)
    return found


def refuse_role(place: Place | None, kind: str) -> None:
    """Refuse a task of the cluster that does not train."""
    if place is None or place.task.type in ("chief", "worker"):
        return
    raise UsageError(
        f"this task is {place.task}, and only the chief and the workers of a {kind} strategy "
        f"train. {_INSTEAD[place.task.type]}"
    )


#: by type of task, the remedy for a task that does not train
_INSTEAD = {
    "ps": "There are no parameters to serve: every replica holds them. End the script there before "
    "the strategy is made, or leave ps out of the cluster; the others do not wait for it.",
    "evaluator": "Make the model without a strategy there, then model.load each checkpoint that "
    "the chief writes and model.evaluate it; the others do not wait for it.",
}


def single_device() -> Strategy:
    """Make the strategy of a model without a scope: one replica on the first device here."""
    settings = Settings()
    return Strategy(ReplicaGroup(devices.present()[:1], settings, None, Patience()), settings)
