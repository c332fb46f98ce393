"""Vertex AI: CLUSTER_SPEC, which is TF_CONFIG with the pools of the job for roles.

CLUSTER_SPEC='{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]},
               "task": {"type": "workerpool1", "index": "0"}, "environment": "cloud"}'
"""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster import tf_config
from stratagem.cluster.spec import Place

POOLS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}
EXAMPLE = (
    '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}, '
    '"task": {"type": "workerpool1", "index": 0}} '
    "(workerpool0 is the chief, 1 the workers, 2 ps, 3 the evaluator; "
    "give pools 0 and 3 a replicaCount of 1)"
)


def detect(environ: Mapping[str, str]) -> Place | None:
    """The place that CLUSTER_SPEC gives, if it holds a cluster."""
    # Google's own client tests a lone machine with TensorFlow's role names instead of pools.
    names = {**POOLS, **tf_config.NAMES}
    return tf_config.read(environ.get("CLUSTER_SPEC", ""), names, "CLUSTER_SPEC", EXAMPLE)
