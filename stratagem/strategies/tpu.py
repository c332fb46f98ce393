"""The TPU strategy: mirrored replicas on the TPUs of this host and of its slice."""

from __future__ import annotations

import os

from stratagem.arguments import by_name
from stratagem.cluster.environment import detect
from stratagem.cluster.tpu_resolver import TPUClusterResolver
from stratagem.codecs.wire_choice import Wire
from stratagem.errors import DeviceError, UsageError
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.training.agreement import Patience
from stratagem.wire.device_kinds import kind_of


class TPUStrategy(MirroredStrategy):
    """`MirroredStrategy` with a replica on every TPU, by torch_tpu and its collective tpu_dist.

    Args:
        resolver: by default `sg.TPUClusterResolver()`.
        wire, sync_batchnorm, patience, insecure: as in `MirroredStrategy`.

    It has never run on a TPU; see docs/tpu.md.
    """

    @by_name
    def __init__(
        self,
        resolver: TPUClusterResolver | None = None,
        *,
        wire: Wire = None,
        sync_batchnorm: bool = False,
        patience: Patience | None = None,
        insecure: bool = False,
    ) -> None:
        resolver = TPUClusterResolver() if resolver is None else resolver
        if not isinstance(resolver, TPUClusterResolver):
            raise UsageError(
                f"resolver={resolver!r} is no resolver; write TPUStrategy(sg.TPUClusterResolver())."
            )
        count = kind_of("tpu").count()
        if not count:
            raise DeviceError(
                "there is no TPU on this machine; run this on a TPU VM, or use "
                "sg.MirroredStrategy() here."
            )
        super().__init__(
            [f"tpu:{i}" for i in range(count)],
            wire=wire,
            sync_batchnorm=sync_batchnorm,
            cluster=detect(os.environ) or resolver.place(),
            patience=patience,
            insecure=insecure,
        )
