"""Predict every strategy at every number of replicas, and choose the one to recommend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stratagem.errors import UsageError
from stratagem.plan.configuration import (
    CENTRAL,
    MESH,
    MIRRORED,
    MULTI_WORKER,
    PARTS,
    PIPELINE,
    SERVERS,
    SHARDED,
    Configuration,
)
from stratagem.plan.cost import Prediction, predict
from stratagem.plan.formulas import Calibration
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import Profile

#: the least that one more device must add, as a fraction of one device's speed
WORTH = 0.05
#: how many times as fast asynchronous updates must be to be recommended: they are not equal to
#: synchronous ones, and their predictions are up to 40% wrong
BETTER = 1.40
#: the reason why a part of a step takes longer with several replicas, if it has another name
_CAUSES = {"compute": "shared cores"}
#: the most servers to try
_SERVERS = 8
#: how complex each strategy is that divides the model (`_price`)
_COMPLEXITY = {SHARDED: 1, PIPELINE: 2, MESH: 3}
#: above this fraction of the highest speed, the smaller and simpler configuration is preferred
CLOSE = 0.95
#: updates between two meetings, and fragments, to try for `sync=`: those of studies/bytes
EVERY = 20
FRAGMENTS = 4


@dataclass(frozen=True)
class Saturation:
    """The number of replicas beyond which more are not worth having, and the reason."""

    family: str
    replicas: int
    #: whether more replicas of this family were tried
    reached: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """The predictions of a model on some hardware, and the recommendation."""

    profile: Profile
    hardware: Hardware
    calibration: Calibration
    predictions: tuple[Prediction, ...]
    #: whether compressions were asked for
    lossy: bool = False

    @cached_property
    def families(self) -> dict[str, list[Prediction]]:
        """For each family, its best placement at each number of replicas, in ascending order."""
        found: dict[str, dict[int, list[Prediction]]] = {}
        for each in self.predictions:
            row = found.setdefault(each.configuration.family, {})
            row.setdefault(each.configuration.replicas, []).append(each)
        return {name: [_cheapest(row[n]) for n in sorted(row)] for name, row in found.items()}

    @property
    def tried(self) -> list[Configuration]:
        return [each.configuration for each in self.predictions]

    @cached_property
    def one(self) -> Prediction:
        """The prediction for one device."""
        return predict(self.profile, self.hardware, Configuration(), self.calibration)

    @cached_property
    def saturations(self) -> dict[str, Saturation]:
        return {name: _saturation(name, row, self.one) for name, row in self.families.items()}

    @cached_property
    def most(self) -> int:
        """The largest number of replicas that was tried."""
        return max(each.configuration.replicas for each in self.predictions)

    @cached_property
    def worth(self) -> list[Prediction]:
        """The predictions that fit and are worth their devices, one device first.

        Empty if one device has too little memory.
        """
        if not self.one.fits:
            return []
        return [self.one] + [
            each
            for name, row in self.families.items()
            for each in row
            if each.configuration.replicas <= self.saturations[name].replicas
            and each.fits
            and each.speedup >= 1 / CLOSE
            and _gain(self.one, each) >= WORTH
        ]

    @cached_property
    def recommendation(self) -> Prediction:
        """The smallest configuration that is about as fast as the fastest; synchronous if possible.

        If one device has too little memory: the fitting configuration on the fewest devices. Fewer
        meetings (`sync=`) are shown, not recommended: they need learning rates of their own.
        """
        if not self.one.fits:
            return _least_that_fits([e for e in self.predictions if e.configuration.every == 1])
        worth = [each for each in self.worth if each.configuration.every == 1]
        in_step = [each for each in worth if not each.configuration.asynchronous]
        if self.profile.restless:
            # other work on this machine caused the stragglers: the target machines may have none
            return _cheapest([each for each in in_step if not each.configuration.spares])
        best = max(each.rate for each in in_step)
        free = max(each.rate for each in worth) > best * BETTER
        return _cheapest(worth if free else in_step)

    def placements(self, like: Configuration) -> list[Prediction]:
        """Return all placements of as many replicas of the same family, the fastest first."""
        alike = [
            each
            for each in self.predictions
            if each.configuration.family == like.family
            and each.configuration.replicas == like.replicas
        ]
        return sorted(alike, key=lambda each: -each.rate)


def choose(
    profile: Profile,
    hardware: Hardware,
    *,
    most: int | None = None,
    calibration: Calibration | None = None,
    lossy: bool = False,
) -> Plan:
    """Predict every strategy from one replica to `most`: by default, all that the hardware has.

    lossy: also predict the compressions whose encoding was measured, and fewer meetings.
    """
    check_most(most)
    most = most or hardware.size
    if most > hardware.size:
        hardware = replace(hardware, hosts=-(-most // hardware.per_host))
    constants = calibration or Calibration()
    predictions = tuple(
        predict(profile, hardware, each, constants)
        for each in candidates(profile, hardware, most, lossy=lossy)
    )
    return Plan(profile, hardware, constants, predictions, lossy)


def check_most(most: int | None) -> None:
    if most is not None and (type(most) is not int or most < 1):
        raise UsageError(
            f"plan for at most {most!r} replicas? It must be 1 or more, a whole number."
        )


def candidates(
    profile: Profile, hardware: Hardware, most: int, *, lossy: bool = False
) -> Iterator[Configuration]:
    """All configurations that make sense to try."""
    for n in sizes(most):
        for hosts, per_host in _placements(n, hardware):
            if not profile.sparse or n == 1:
                yield from _mirrored(hosts, per_host)
            if lossy and hosts > 1 and not profile.sparse:
                for each in profile.codecs:
                    yield Configuration(MULTI_WORKER, hosts, per_host, wire=each.wire)
                for parts in (1, FRAGMENTS):
                    yield Configuration(MULTI_WORKER, hosts, per_host, every=EVERY, fragments=parts)
            if n > 1:
                yield from _divided(profile, hosts, per_host)
            if hosts == 1 and n > 1:
                if not profile.sparse or profile.device != "cpu":
                    yield Configuration(CENTRAL, per_host=per_host)
                if not profile.unserved:
                    yield from _on_one_host(per_host)
    if not profile.unserved:
        yield from _on_server_hosts(hardware, most)


def sizes(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


def _placements(n: int, hardware: Hardware) -> list[tuple[int, int]]:
    """Return all placements of n replicas as (hosts, replicas per host), the fewest hosts first."""
    return [
        (n // each, each)
        for each in range(min(n, hardware.per_host), 0, -1)
        if n % each == 0 and n // each <= hardware.hosts
    ]


def _mirrored(hosts: int, per_host: int) -> Iterator[Configuration]:
    if hosts == 1:
        yield Configuration(MIRRORED, per_host=per_host)
        return
    for wire in (None, "bfloat16"):
        yield Configuration(MULTI_WORKER, hosts, per_host, wire=wire)
    if per_host > 1:
        yield Configuration(MULTI_WORKER, hosts, per_host, hierarchical=True)


def _divided(profile: Profile, hosts: int, per_host: int) -> Iterator[Configuration]:
    """The strategies that divide the model, if its memory was measured."""
    if profile.footprint is None or profile.sparse:
        return
    if not profile.unsharded and (hosts == 1 or not profile.sharded_here):
        yield Configuration(SHARDED, hosts, per_host)
    if hosts > 1:  # stages are devices of one host
        return
    for schedule, parts in PARTS.items():
        for table in profile.layers:
            if len(table.costs) >= per_host * parts:
                many = table.pieces * per_host
                yield Configuration(
                    PIPELINE, per_host=per_host, microbatches=many, schedule=schedule
                )
    if per_host < 4 or per_host % 2:
        return
    for table in profile.layers:
        if len(table.costs) >= per_host // 2:
            many = table.pieces * per_host // 2
            yield Configuration(MESH, per_host=per_host, microbatches=many, schedule="1f1b", rows=2)


def _on_one_host(per_host: int) -> Iterator[Configuration]:
    """Central storage and parameter servers on the only host."""
    yield Configuration(CENTRAL, per_host=per_host, asynchronous=True)
    for servers in sizes(min(per_host, _SERVERS)):
        yield from _rules(Configuration(SERVERS, 1, per_host, servers))


def _on_server_hosts(hardware: Hardware, most: int) -> Iterator[Configuration]:
    """Parameter servers on hosts of their own; the workers get the hosts that are left."""
    for servers in sizes(_SERVERS):
        left = replace(hardware, hosts=max(1, hardware.hosts - servers))
        full = min(most, left.size)
        for n in sorted({*sizes(most), full}):
            for hosts, per_host in _placements(n, left):
                if hosts > 1 and hosts + servers <= hardware.hosts:
                    plain = Configuration(SERVERS, hosts, per_host, servers)
                    yield from _rules(plain)
                    yield from _rules(replace(plain, wire="bfloat16"))


def _rules(plain: Configuration) -> Iterator[Configuration]:
    """The same configuration synchronous, asynchronous, and synchronous with spares."""
    yield plain
    yield replace(plain, asynchronous=True)
    if plain.replicas >= 4:
        yield replace(plain, spares=max(1, round(plain.replicas / 10)))


def _saturation(family: str, row: Sequence[Prediction], one: Prediction) -> Saturation:
    """Find the last number of replicas at which each one adds `WORTH` of a device."""
    here, more = one, list(row)
    for place, each in enumerate(row):
        if _size(each) == 1 or _gain(here, each) >= WORTH:
            here, more = each, list(row[place + 1 :])
    after = more[0] if more else here
    return Saturation(family, here.configuration.replicas, bool(more), bottleneck(after, one))


def _gain(less: Prediction, more: Prediction) -> float:
    """The speed that each added device brings, as a fraction of one device's."""
    return (more.speedup - less.speedup) / max(1, _size(more) - _size(less))


def _size(of: Prediction) -> int:
    """The number of devices, and of servers on hosts of their own."""
    cfg = of.configuration
    return cfg.replicas + (cfg.servers if cfg.hosts > 1 else 0)


def bottleneck(of: Prediction, one: Prediction) -> str:
    """Return the cause of most of the time by which a step is longer than one device's."""
    alone = {**one.parts, "the servers' update": one.parts["optimizer"]}
    lost = {_CAUSES.get(name, name): each - alone.get(name, 0.0) for name, each in of.parts.items()}
    name = max(lost, key=lambda each: lost[each])
    return name if lost[name] > 0.1 * of.step else "compute"


def _least_that_fits(of: Sequence[Prediction]) -> Prediction:
    """The fitting prediction on the fewest devices; if none fits, the one nearest to fitting."""
    held = [each for each in of if each.fits and not each.configuration.asynchronous]
    if not held:
        return min(of, key=lambda each: (each.memory or 0.0) / (each.room or 1.0))
    fewest = min(map(_size, held))
    return _cheapest([each for each in held if _size(each) == fewest])


def _cheapest(of: Sequence[Prediction]) -> Prediction:
    """The cheapest of the predictions that are about as fast as the fastest."""
    best = max(each.rate for each in of)
    return min((each for each in of if each.rate >= best * CLOSE), key=_price)


def _price(of: Prediction) -> tuple[int, int, int, float]:
    """The sort key: fewer hosts first, then fewer devices, then simpler, then faster."""
    cfg = of.configuration
    parts = cfg.asynchronous * 4 + cfg.served * 2 + bool(cfg.wire) + cfg.hierarchical
    parts += 4 * cfg.inexact + _COMPLEXITY.get(cfg.strategy, 0) + cfg.parts - 1
    machines = cfg.hosts + (cfg.servers if cfg.hosts > 1 else 0)
    return machines, cfg.replicas, parts + cfg.spares, -of.rate
