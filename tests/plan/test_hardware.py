"""Hardware from texts, and this machine as measured."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.formulas import Calibration
from stratagem.plan.hardware import Hardware, rate, say_bytes, say_rate, say_seconds, seconds
from stratagem.plan.machine import measure_hardware
from tests.clock import in_time, unless_late


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gbit", 1.25e9),
        ("100Mbit", 12.5e6),
        ("1.5GB/s", 1.5e9),
        ("25Gbps", 3.125e9),
        ("1 Tbit/s", 1.25e11),
        ("300GB/s", 3e11),
        ("64kb", 8e3),
        ("8bit", 1.0),
        ("10gbit", 1.25e9),
        ("10G", 1.25e9),
        ("10GbE", 1.25e9),
        ("10Gbits", 1.25e9),
        ("10 Gbits/s", 1.25e9),
    ],
)
def test_rates(text: str, value: float) -> None:
    assert rate(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("50us", 5e-5),
        ("2ms", 2e-3),
        ("0.1s", 0.1),
        ("7ns", 7e-9),
        ("0s", 0.0),
        ("0", 0.0),
        ("50\u00b5s", 5e-5),
        ("50\u03bcs", 5e-5),
    ],
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "0Gbit",
        "-1Gbit",
        "10",
        "Gbit",
        "",
        "10 Gbyte",
        "nanGbit",
        "infGbit",
        "1e999Gbit",
        "10Gbit/h",
        "１０Gbitx",
        "0.0B/s",
    ],
)
def test_no_rate_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as problem:
        rate(text)
    assert repr(text) in str(problem.value) and str(problem.value).count(". ") == 0


@pytest.mark.parametrize("text", ["-1us", "50", "us", "", "1e999s", "5 minutes"])
def test_no_time_is_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="write 50us"):
        seconds(text)


@given(st.floats(1.0, 1e13))
def test_rates_come_back(value: float) -> None:
    assert rate(say_rate(value)) == pytest.approx(value, rel=1e-3)


@given(st.floats(1e-9, 100.0))
def test_times_come_back(value: float) -> None:
    assert seconds(say_seconds(value)) == pytest.approx(value, rel=1e-3)


@settings(max_examples=50)
@given(st.text("0123456789.eE+- kMGTbBits/punms", max_size=8))
def test_garbage_is_refused_or_read(text: str) -> None:
    for read in (rate, seconds):
        try:
            assert read(text) >= 0
        except UsageError as problem:
            assert "\n" not in repr(str(problem))


def test_bytes_for_people() -> None:
    assert [say_bytes(n) for n in (12, 7_454_760, 3e9)] == ["12 B", "7.45 MB", "3 GB"]


def test_hardware_as_written() -> None:
    machine = Hardware.of(hosts=4, per_host=8, link="10Gbit", latency="50us", local="300GB/s")
    assert (machine.link, machine.local, machine.size) == (1.25e9, 3e11, 32)
    assert machine.latency == pytest.approx(5e-5)
    assert str(machine) == "4 hosts of 8, 10Gbit links, 50us latency"
    assert Hardware.from_json(machine.to_json()) == machine


def test_a_check_gives_the_link() -> None:
    """A check measures payload, a link's rate includes headers: they count once."""
    seen = Hardware(hosts=4).from_check(latency=2e-4, up=1.2e8, down=1.1e8)
    assert seen.link * Calibration().goodput == pytest.approx(1.1e8)
    assert (seen.latency, seen.hosts) == (1e-4, 4)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"per_host": -1}, "per_host is -1"),
        ({"link": 0.0}, "link"),
        ({"latency": -1.0}, "latency"),
        ({"update": float("inf")}, "update"),
        ({"local_latency": float("nan")}, "local_latency"),
    ],
)
def test_impossible_hardware(given_: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Hardware(**given_)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_this_machine() -> None:
    start = time.perf_counter()
    here = measure_hardware()
    in_time(time.perf_counter() - start, 10)
    assert 1e8 < here.local < 1e12 and 1e7 < here.update < here.local * 4
    assert 1e-7 < here.local_latency < 0.1 and here.hosts == 1
    assert here.sockets is not None and here.sockets > 1e7
    unless_late(here.sockets < here.local, here)
