"""The recommendation: a sentence, and the code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.plan.choose import BETTER, CLOSE, Plan, choose
from stratagem.plan.configuration import (
    CENTRAL,
    MESH,
    MIRRORED,
    PIPELINE,
    SERVERS,
    SHARDED,
    Configuration,
)
from stratagem.plan.cost import Prediction, predict
from stratagem.plan.hardware import rate, say_bytes, say_rate
from stratagem.plan.lossy_advice import lossy_sentence
from stratagem.plan.profile import Profile

#: a comment in the code for a custom loop, if one process has several devices
_LOOP = ["# your loop goes into a function, and strategy.run(function): docs/own-loop.md"]
#: the word for the devices of each strategy that divides the model
_NOUNS = {PIPELINE: "stages", MESH: "stages"}
#: measured memory of a training with Adam, relative to the memory that the planner counts
_PEAK = 1.7
#: common link speeds, of which the sentence names the first that is enough
_COMMON_LINKS = ("1Gbit", "10Gbit", "25Gbit", "100Gbit", "400Gbit")


def sentence(plan: Plan) -> str:
    """The recommendation, its expected speed, its limits, and whether compressions pay."""
    return " ".join(filter(None, [_sentence(plan), lossy_sentence(plan)]))


def _sentence(plan: Plan) -> str:
    best = plan.recommendation
    cfg = best.configuration
    if cfg.replicas == 1:
        text = (
            f"Stay on one device: {say_number(best.rate)} examples/s, and nothing in step that was "
            "tried is faster by a twentieth, and by a twentieth of a device for each one added"
            f"{_reasons(plan)}."
        )
        said = [
            *_memory_warning(best),
            *_refused(plan),
            *_link(plan, best),
            *_measurement_warning(plan),
        ]
        return " ".join([text, *said])
    if not best.fits:
        return " ".join(_memory_sentences(plan, best))
    text = (
        f"Take {_strategy_text(cfg)} on {cfg.replicas} {_nouns(cfg)}{_spares(cfg)} "
        f"({cfg.placement}{_servers(cfg)}): "
        f"{say_number(best.rate)} examples/s, {best.speedup:.1f}x one device, "
        f"{best.efficiency:.0%} of each{_memory_text(best)}{_saturation_text(plan, best)}."
    )
    more = (
        _memory_warning(best),
        _link(plan, best),
        _placement(plan, best),
        _asynchronous(plan, best),
        _measurement_warning(plan),
    )
    return " ".join(
        [*_memory_sentences(plan, best), text, *(each for part in more for each in part)]
    )


def like(plan: Plan, row: Sequence[Prediction]) -> Prediction:
    """Return a strategy's prediction with about as many devices as the recommendation."""
    wanted = max(2, plan.recommendation.configuration.replicas)
    if plan.recommendation in row:
        return plan.recommendation
    return min(row, key=lambda each: abs(each.configuration.replicas - wanted))


def why_not(plan: Plan, each: Prediction) -> str:
    """Return the reason against a configuration; empty for the recommended one."""
    best, cfg = plan.recommendation, each.configuration
    if not each.fits and each.memory is not None and each.room is not None:
        return f"does not fit into {say_bytes(each.room)}"
    if each is best:
        return ""
    here = cfg.replicas == best.configuration.replicas
    many = "" if here else f", on {cfg.replicas} for {best.configuration.replicas}"
    if each.rate < best.rate * CLOSE:
        return f"{best.rate / each.rate:.2g}x slower{many}"
    if cfg.asynchronous:
        return "gradients of older weights"
    if cfg.inexact:
        return "not exact"
    if each.rate <= best.rate / CLOSE:
        return f"no faster, and not as simple{many}"
    return "more devices, which add little" if not here else "not worth what it adds"


def _memory_sentences(plan: Plan, best: Prediction) -> list[str]:
    """Say if one device has too little memory, and what comes nearest if no configuration fits."""
    one = plan.one
    if one.fits or one.memory is None or one.room is None:
        return []
    text = (
        f"One device does not hold it: {say_bytes(one.memory)}, and there are "
        f"{say_bytes(one.room)}."
    )
    if best.fits:
        return [text]
    least = f"{say_bytes(best.memory or 0.0)} on {best.configuration.replicas} devices"
    return [
        f"{text} Nothing that was tried fits either: {best.configuration.family} comes nearest, "
        f"with {least}; take more devices (--hosts, --gpus-per-host), ones with more memory, or a "
        "smaller --batch."
    ]


def _memory_warning(best: Prediction) -> list[str]:
    """Warn if so little memory is left that allocators and temporaries may not fit."""
    if best.memory is None or best.room is None or best.memory * _PEAK <= best.room:
        return []
    return [
        f"That leaves {say_bytes(best.room - best.memory)} of {say_bytes(best.room)} on each "
        f"device for allocators and temporaries, which took up to {_PEAK - 1:.0%} more where it "
        "was measured: try it first."
    ]


def _measurement_warning(plan: Plan) -> list[str]:
    """Reasons not to trust the figures."""
    if not plan.profile.restless:
        return []
    return [
        "Measured where stragglers cannot be told from other work on this machine: they are in the "
        "figures, but spares and asynchronous updates are not recommended for their sake."
    ]


def code(plan: Plan) -> str:
    """Return Python code to paste into the script."""
    best = plan.recommendation
    cfg, batch = best.configuration, plan.profile.batch
    parts, own = plan.profile.accumulated, plan.profile.own_loop
    size = (batch if cfg.asynchronous else batch * cfg.counted) // parts
    each = f"{batch} for each worker" if cfg.asynchronous else f"{cfg.counted} x {batch}"
    each += f", in {parts} micro-batches" if parts > 1 else ""
    threads = _threads(plan.profile, cfg)
    lines = [
        *(["import torch", ""] if threads else []),
        "import stratagem as sg",
        "",
        *threads,
        *_cluster(cfg),
        f"strategy = {constructor(cfg, plan.profile.device, plan.hardware.per_host)}",
        f"batch_size = {size}  # {each}: for {'your DataLoader' if own else 'fit'}",
        *(_LOOP if own and cfg.per_host > 1 and cfg.strategy != SERVERS else []),
    ]
    return "\n".join(lines)


def _threads(profile: Profile, cfg: Configuration) -> list[str]:
    """Set the number of threads if fewer are faster; replicas that share a host set it anyway."""
    if profile.usual_threads is None or cfg.per_host > 1:
        return []
    faster = f"faster here than {profile.usual_threads}"
    return [f"torch.set_num_threads({profile.threads})  # {faster}"]


def _nouns(cfg: Configuration) -> str:
    return _NOUNS.get(cfg.strategy, "replicas")


def _memory_text(best: Prediction) -> str:
    """The memory of each device, if the model is divided."""
    if best.memory is None or best.configuration.strategy not in (*_NOUNS, SHARDED):
        return ""
    return f", {say_bytes(best.memory)} on each"


def _link(plan: Plan, best: Prediction) -> list[str]:
    """Say whether the link is fast enough, and if not, which link would be."""
    if plan.hardware.hosts == 1:
        return []
    here = say_rate(plan.hardware.link)
    if best.configuration.hosts == 1:
        return _link_for_more_hosts(plan, best, here)
    free = _with_link(plan, best.configuration, 1e15)
    if best.rate >= free.rate * CLOSE:
        gain = max(0.01, free.rate / best.rate - 1)
        many = f"For {best.configuration.replicas} replicas"
        return [f"{many} {here} is enough: a faster link would add {gain:.0%} at most."]
    for name in _COMMON_LINKS:
        faster = _with_link(plan, best.configuration, rate(name))
        if rate(name) > plan.hardware.link and faster.rate >= free.rate * CLOSE:
            return [f"{here} holds it back: with {name} it would be {faster.speedup:.1f}x."]
    return [f"{here} holds it back: with no limit it would be {free.speedup:.1f}x."]


def _link_for_more_hosts(plan: Plan, best: Prediction, here: str) -> list[str]:
    """If one host is best: name the slowest link with which several hosts would be faster."""
    for name in _COMMON_LINKS:
        if rate(name) > plan.hardware.link:
            faster = choose(
                plan.profile,
                replace(plan.hardware, link=rate(name)),
                most=plan.most,
                calibration=plan.calibration,
            ).recommendation
            if faster.configuration.hosts > 1 and faster.rate > best.rate / CLOSE:
                return [
                    f"{here} is too slow for more hosts: with {name}, "
                    f"{faster.configuration.hosts} of them would make it "
                    f"{faster.speedup:.1f}x."
                ]
    return []


def _with_link(plan: Plan, configuration: Configuration, link: float) -> Prediction:
    faster = replace(plan.hardware, link=link)
    return predict(plan.profile, faster, configuration, plan.calibration)


def constructor(cfg: Configuration, device: str, per_host: int) -> str:
    """Return the call that makes the strategy.

    Devices are named unless the configuration uses all `per_host` GPUs of each host.
    """
    wire = [f"wire=sg.{cfg.wire}" if cfg.lossy else f'wire="{cfg.wire}"'] if cfg.wire else []
    here, rule = _devices(cfg.per_host, device), f"updates={_updates(cfg)}"
    if cfg.strategy == MIRRORED:
        return f"sg.MirroredStrategy({here})"
    if cfg.strategy == CENTRAL:
        words = [here, *([rule] if cfg.asynchronous or cfg.spares else [])]
        return f"sg.CentralStorageStrategy({', '.join(words)})"
    named = device == "cpu" or cfg.per_host != per_host
    if cfg.strategy == SERVERS:
        local = [f"sg.LocalCluster(workers={cfg.replicas}, ps={cfg.servers})"]
        alone = cfg.hosts == 1 or cfg.per_host == 1
        some = [f"devices={here}"] if named and alone else []
        some = ['devices="cpu"'] if device == "cpu" else some  # one name for all workers
        words = [*(local if cfg.hosts == 1 else []), rule, *wire, *some]
        return f"sg.ParameterServerStrategy({', '.join(words)})"
    pieces = f'microbatches={cfg.microbatches}, schedule="{cfg.schedule}"'
    if cfg.strategy == MESH:
        place = f"devices={here}, " if cfg.hosts == 1 else ""
        return f"sg.Mesh(data={cfg.rows}, stage={cfg.depth}, {place}{pieces})"
    if cfg.strategy == PIPELINE:
        return f"sg.PipelineStrategy({here}, {pieces})"
    if cfg.strategy == SHARDED:
        return f"sg.ShardedStrategy({here if cfg.hosts == 1 or named else ''})"
    many = [f"devices={here}"] if named else []
    how = ['"hierarchical"'] if cfg.hierarchical else []
    sync = [f"sync={cfg.meeting}"] if cfg.every > 1 else []
    return f"sg.MultiWorkerMirroredStrategy({', '.join([*how, *many, *wire, *sync])})"


def _devices(count: int, device: str) -> str:
    return "[" + ", ".join(f'"{device}:{i}"' for i in range(count)) + "]"


def _updates(cfg: Configuration) -> str:
    if cfg.asynchronous:
        return "sg.Asynchronous(staleness=[sg.LowerRate()])"
    return f"sg.Synchronous(spares={cfg.spares})" if cfg.spares else "sg.Synchronous()"


def _cluster(cfg: Configuration) -> list[str]:
    """Comments that say how to start the cluster, if there are several hosts."""
    if cfg.hosts == 1:
        return []
    workers = cfg.hosts if cfg.strategy != SERVERS else cfg.replicas
    ps = f" and {cfg.servers} ps" if cfg.strategy == SERVERS else ""
    here = f"--workers 2{' --ps 1' if ps else ''}"
    return [
        f"# on a cluster of {workers} workers{ps}: docs/clusters.md; to try it on this machine:",
        f"# stratagem run {here} train.py",
    ]


def _strategy_text(cfg: Configuration) -> str:
    rule = ", asynchronous" if cfg.asynchronous else ""
    wire = f" with {cfg.wire if cfg.lossy else 'bf16'} on the wire" if cfg.wire else ""
    how = ", adding up inside each host first" if cfg.hierarchical else ""
    how += f", meeting every {cfg.every} steps" if cfg.every > 1 else ""
    pieces = f" ({cfg.schedule}, {cfg.microbatches} microbatches)" if cfg.microbatches else ""
    return f"{cfg.strategy}{pieces}{rule}{wire}{how}"


def _spares(cfg: Configuration) -> str:
    return f", {cfg.spares} of them spare" if cfg.spares else ""


def _servers(cfg: Configuration) -> str:
    if cfg.strategy != SERVERS:
        return ""
    return f", and {cfg.servers} server{'s' * (cfg.servers > 1)}"


def _reasons(plan: Plan) -> str:
    reasons = {s.reason for s in plan.saturations.values() if s.reached}
    return f" (what binds: {', '.join(sorted(reasons))})" if reasons else ""


def _saturation_text(plan: Plan, best: Prediction) -> str:
    at = plan.saturations[best.configuration.family]
    if not at.reached:
        return f"; up to {at.replicas}, {_why_no_more(plan, best)}, each more still pays"
    return f"; beyond {at.replicas} replicas one more adds little, because of {at.reason}"


def _why_no_more(plan: Plan, best: Prediction) -> str:
    """Why no more replicas were tried."""
    cfg = best.configuration
    most = plan.families[cfg.family][-1].configuration
    if most.replicas == plan.most:
        return "the most that was planned for"
    return "all of one host" if most.hosts == 1 else "the most that its servers leave room for"


def _refused(plan: Plan) -> list[str]:
    """Say why asynchronous updates that would be faster are not recommended."""
    free = [each for each in plan.worth if each.configuration.asynchronous]
    if not free:
        return []
    top = max(free, key=lambda each: each.rate)
    cfg = top.configuration
    why = (
        "this machine was too restless to trust that"
        if plan.profile.restless
        else f"they are recommended from {BETTER:.1f}x on"
    )
    return [
        f"Asynchronous updates on {cfg.replicas} replicas ({cfg.placement}{_servers(cfg)}) would "
        f"take in {top.speedup:.1f}x the examples, but are not the equals of synchronous ones: "
        f"{why}."
    ]


def _placement(plan: Plan, best: Prediction) -> list[str]:
    """Compare the placement with the next best one, if the difference matters."""
    others = [
        each
        for each in plan.placements(best.configuration)
        if each.configuration.hosts != best.configuration.hosts
    ]
    if not others or best.rate < others[0].rate * 1.02:
        return []
    other = others[0]
    here = best.configuration.placement
    return [
        f"{here[0].upper()}{here[1:]} beat {other.configuration.placement} by "
        f"{best.rate / other.rate:.1f}x."
    ]


def _asynchronous(plan: Plan, best: Prediction) -> list[str]:
    """Say what asynchronous updates gain, and that they are not equal to synchronous ones."""
    if best.configuration.asynchronous:
        old = best.configuration.replicas - 1
        return [
            "Its updates are not the equals of synchronous ones: gradients are about "
            f"{old} update{'s' * (old != 1)} old, so the rate is lowered (LowerRate below); "
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


def say_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
