"""What each device holds: closed forms over what one device was seen to hold.

P parameters and buffers, G gradients, S states of the optimizer, A what forward keeps of a batch:

one device, mirrored GPUs and hosts      P + G + S + A
CPU replicas that share memory           (P + S + P) / n + G + A
sharded, CPUs of one machine             (P + G + S) / n + A, and gradients that wait for their turn
sharded, fully_shard                     (P + G + S) / n + A, and the largest layer, whole
workers of servers                       P + G + A
pipeline, mesh                           of its own layers P + G + S, and A of each microbatch that
                                         is kept (plan/staged_step.py)

divided layers                           of what is divided 1/n of P + G + S, of others all
                                         (plan/divided_step.py)

Of what memory is shared by the replicas of a machine each counts its part. What allocators, the
interpreter and temporaries of kernels take comes on top of it.
"""

from __future__ import annotations

from stratagem.plan.configuration import (
    CENTRAL,
    MIRRORED,
    SERVERS,
    SHARDED,
    TENSOR,
    Configuration,
)
from stratagem.plan.profile import Profile

#: gradients that wait until it is their turn to be added up (docs/sharded.md)
_WAITING = 8_000_000


def device_memory(profile: Profile, cfg: Configuration) -> float | None:
    """Bytes of one device; None where nothing was measured, or for a divided model, which knows
    more."""
    held, n = profile.footprint, cfg.replicas
    if held is None or cfg.staged or cfg.strategy == TENSOR:
        return None
    in_memory = profile.device == "cpu" and cfg.hosts == 1
    if n == 1 or (cfg.strategy not in (SHARDED, SERVERS) and not in_memory):
        return held.fixed + held.activations
    if cfg.strategy == SERVERS:
        return held.parameters + held.gradients + held.activations
    if cfg.strategy in (MIRRORED, CENTRAL):
        shared = 2 * held.parameters + held.states
        return shared / n + held.gradients + held.activations
    alone = min(_WAITING, held.gradients) if in_memory else 2 * largest_layer(profile)
    return held.fixed / n + held.activations + alone


def largest_layer(profile: Profile) -> float:
    """Bytes of the largest layer's parameters: what fully_shard gathers at a time."""
    held = profile.footprint
    if held is None:
        return 0.0
    costs = profile.layers[0].costs if profile.layers else ()
    whole = sum(cost.fixed for cost in costs)
    if not whole:  # it is not known where layers end
        return float(held.parameters)
    return held.parameters * max(cost.fixed for cost in costs) / whole
