"""The recommendation: a sentence, and the code to paste."""

from __future__ import annotations

from stratagem.plan.choose import Plan
from stratagem.plan.configuration import CENTRAL, MIRRORED, SERVERS, Configuration
from stratagem.plan.cost import Prediction


def sentence(plan: Plan) -> str:
    """What to do, what comes of it, and why not more."""
    best = plan.recommendation
    cfg = best.configuration
    if cfg.replicas == 1:
        return (
            f"Stay on one device: {_number(best.rate)} examples/s, and nothing that was tried is "
            f"faster by a twentieth of a device for each replica added{_because(plan)}."
        )
    text = (
        f"Take {_called(cfg)} on {cfg.replicas} replicas ({cfg.placement}{_servers(cfg)}): "
        f"{_number(best.rate)} examples/s, {best.speedup:.1f}x one device, "
        f"{best.efficiency:.0%} of each{_beyond(plan, best)}."
    )
    return " ".join([text, *_placement(plan, best), *_asynchronous(plan, best)])


def code(plan: Plan) -> str:
    """Python to paste into the script."""
    best = plan.recommendation
    cfg, batch = best.configuration, plan.profile.batch
    lines = [*_cluster(cfg), f"strategy = {_constructor(cfg, plan.profile.device)}"]
    size = batch if cfg.asynchronous else batch * cfg.counted
    each = f"{batch} for each worker" if cfg.asynchronous else f"{cfg.counted} x {batch}"
    return "\n".join([*lines, f"model.fit(..., batch_size={size})  # {each}"])


def _constructor(cfg: Configuration, device: str) -> str:
    wire = [f'wire="{cfg.wire}"'] if cfg.wire else []
    here, rule = _devices(cfg.per_host, device), f"updates={_updates(cfg)}"
    if cfg.strategy == MIRRORED:
        return f"sg.MirroredStrategy({here})" if cfg.replicas > 1 else "sg.MirroredStrategy()"
    if cfg.strategy == CENTRAL:
        words = [here, *([rule] if cfg.asynchronous or cfg.spares else [])]
        return f"sg.CentralStorageStrategy({', '.join(words)})"
    if cfg.strategy == SERVERS:
        local = [f"sg.LocalCluster(workers={cfg.replicas}, ps={cfg.servers})"]
        words = [*(local if cfg.hosts == 1 else []), rule, *wire]
        return f"sg.ParameterServerStrategy({', '.join(words)})"
    many = [f"devices={here}"] if cfg.per_host > 1 and device == "cpu" else []
    if cfg.hierarchical:
        words = [*many, 'cross_device_ops="hierarchical"', *wire]
        return f"sg.MirroredStrategy({', '.join(words)})"
    return f"sg.MultiWorkerMirroredStrategy({', '.join([*many, *wire])})"


def _devices(count: int, device: str) -> str:
    return "[" + ", ".join(f'"{device}:{i}"' for i in range(count)) + "]"


def _updates(cfg: Configuration) -> str:
    if cfg.asynchronous:
        return "sg.Asynchronous()"
    return f"sg.Synchronous(spares={cfg.spares})" if cfg.spares else "sg.Synchronous()"


def _cluster(cfg: Configuration) -> list[str]:
    """What the environment has to say, where there are several hosts."""
    if cfg.hosts == 1:
        return []
    workers = cfg.hosts if cfg.strategy != SERVERS else cfg.replicas
    ps = f" and {cfg.servers} ps" if cfg.strategy == SERVERS else ""
    return [f"# a cluster of {workers} workers{ps} in the environment: docs/clusters.md"]


def _called(cfg: Configuration) -> str:
    rule = ", asynchronous" if cfg.asynchronous else ""
    spares = f", {cfg.spares} of them spare" if cfg.spares else ""
    wire = " with bf16 on the wire" if cfg.wire else ""
    how = ", adding up inside each host first" if cfg.hierarchical else ""
    return f"{cfg.strategy}{rule}{wire}{how}{spares}"


def _servers(cfg: Configuration) -> str:
    if cfg.strategy != SERVERS:
        return ""
    return f", and {cfg.servers} server{'s' * (cfg.servers > 1)}"


def _because(plan: Plan) -> str:
    reasons = {s.reason for s in plan.saturations.values() if s.reached}
    return f" (what binds: {', '.join(sorted(reasons))})" if reasons else ""


def _beyond(plan: Plan, best: Prediction) -> str:
    at = plan.saturations[best.configuration.family]
    if not at.reached:
        return f"; it has not saturated at {at.replicas}, the most that was asked for"
    return f"; beyond {at.replicas} replicas one more adds little, because of {at.reason}"


def _placement(plan: Plan, best: Prediction) -> list[str]:
    """Where it matters how the replicas are placed."""
    others = [
        each for each in plan.placements(best.configuration)
        if each.configuration.hosts != best.configuration.hosts
    ]  # fmt: skip
    if not others or best.rate < others[0].rate * 1.02:
        return []
    other = others[0]
    here = best.configuration.placement
    return [f"{here[0].upper()}{here[1:]} beat {other.configuration.placement} by "
            f"{best.rate / other.rate:.1f}x."]  # fmt: skip


def _asynchronous(plan: Plan, best: Prediction) -> list[str]:
    """What asynchronous updates are worth, and what they are not."""
    if best.configuration.asynchronous:
        old = best.configuration.replicas - 1
        return [
            "Its updates are not the equals of synchronous ones: gradients are about "
            f"{_count(old, 'update')} old, so lower the rate (staleness=[sg.LowerRate()]) and "
            "compare the accuracy."
        ]
    free = [each for each in plan.predictions if each.configuration.asynchronous]
    top = max(free, key=lambda each: each.rate, default=None)
    if top is None or top.rate < best.rate * 1.02:
        return []
    return [
        f"Asynchronous updates would take in {top.rate / best.rate:.2f}x the examples, but are not "
        "the equals of synchronous ones."
    ]


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
