"""The cluster that the environment describes; the only reader of scheduler variables."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster import blame, kubernetes, slurm, tf_config, torchrun, vertex
from stratagem.cluster.spec import Place

# What a person wrote comes before what a scheduler set. torchrun comes before the schedulers
# that may have started it: it splits a machine's place among its processes.
SOURCES = (
    tf_config.detect,
    vertex.detect,
    torchrun.detect,
    kubernetes.detect,
    slurm.detect,
)


def detect(environ: Mapping[str, str]) -> Place | None:
    """This process's place in a cluster, or None if it is on its own."""
    blame.at_exit(environ)
    return next((place for source in SOURCES if (place := source(environ)) is not None), None)
