"""The cause that a plan names is the one whose removal would help."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.plan import advice
from stratagem.plan.choose import bottleneck, choose
from stratagem.plan.configuration import MIRRORED, MULTI_WORKER, SERVERS, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.profile import GradientPart, Profile
from tests.plan.support import profile

SMALL: dict[str, Any] = {
    "forward": 2e-3,
    "backward": 1e-3,
    "optimizer": 9.5e-4,
    "buckets": (GradientPart(150_000, 1e-3),),
    "shapes": ((375, 100),),
}
RING, SERVED = Configuration(MULTI_WORKER, 16), Configuration(SERVERS, 8, servers=1)
FREE = Configuration(SERVERS, 8, servers=1, asynchronous=True)


def cause(model: Profile, machine: Hardware, cfg: Configuration) -> str:
    one = predict(model, machine, Configuration())
    return bottleneck(predict(model, machine, cfg), one)


@pytest.mark.parametrize(
    ("model", "machine", "cfg", "said"),
    [
        (profile(), Hardware(link=1.25e8), RING, "links between hosts (1Gbit)"),
        (profile(), Hardware(link=1.25e8), SERVED, "a server's link (1Gbit)"),
        (profile(**SMALL), Hardware(link=5e10, latency=0.02), RING, "latency between hosts (20ms)"),
        (
            profile(**SMALL),
            Hardware(link=5e10, latency=0.02),
            SERVED,
            "latency between hosts (20ms)",
        ),
        (profile(**SMALL), Hardware(link=5e10, latency=1e-6), RING, "messages"),
        (profile(), Hardware(link=1.25e11, latency=0.0), RING, "what a host's sockets carry"),
        (profile(), Hardware(link=1.25e11, latency=0.0), SERVED, "a server's encryption"),
        (profile(server=0.05), Hardware(link=1.25e11, latency=0.0), SERVED, "the servers' update"),
        (profile(server=0.05), Hardware(link=1.25e11, latency=0.0), FREE, "the servers' update"),
        (profile(samples=(1.0,) * 19 + (9.0,)), Hardware(link=1e11), RING, "stragglers"),
        (
            profile(**SMALL, crowd=((2, 6.2e-3),)),
            Hardware(per_host=2, cores=2),
            Configuration(MIRRORED, per_host=2),
            "shared cores",
        ),
        (
            profile(optimizer=0.1, device="cuda"),
            Hardware(per_host=2, local=1e12),
            Configuration(MIRRORED, per_host=2),
            "compute",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_cause_is_named(
    model: Profile, machine: Hardware, cfg: Configuration, said: str
) -> None:
    assert cause(model, machine, cfg) == said


def test_a_link_that_is_enough_is_not_the_reason() -> None:
    """Latency is the limit beyond it: a faster link would not help."""
    for latency in (5e-5, 5e-4, 5e-3):
        plan = choose(profile(**SMALL), Hardware(hosts=16, link=1.25e9, latency=latency))
        said = advice.sentence(plan)
        assert not ("is enough" in said and "because of links between hosts" in said)
