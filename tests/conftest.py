"""Every test leaves the machine as it found it: no process and no shared memory behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported

import stratagem as sg
from tests.clock import LATENESS, TRIES
from tests.support import strategy

torch.set_num_threads(1)  # replicas on few cores fight each other otherwise
# whatever started the tests in the background may have chosen to ignore them, and children inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# the same examples every time, and a busy machine is no failure; `pytest
# --hypothesis-profile=search` looks for others
settings.register_profile(
    "same", max_examples=40, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "search", settings.get_profile("same"), max_examples=500, derandomize=False
)
settings.load_profile("same")

_tries = pytest.StashKey[int]()
_limit = pytest.StashKey[Any]()

#: files whose tests take long: they begin first, so that no process is left alone with them
_LONG = (
    "test_served", "parameters", "test_faults", "membership", "multi_worker", "keras",
    "test_same_answer", "test_collectives", "test_examples",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in str(item.path) for name in _LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.late = call.excinfo is not None and call.excinfo.errisinstance(LATENESS)
    report.tries = item.stash.get(_tries, 1)
    return report


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """A test that came late runs again from its start; the last try counts."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for item.stash[_tries] in range(1, TRIES + 1):
        if item.stash[_tries] > 1:
            _begin_anew(item)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        bad = [report for report in reports if report.failed]
        if not bad or not all(report.late for report in bad):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_limit] = settings


def _begin_anew(item: Any) -> None:
    """What a test may take is for each try, and a fixture that came late is tried again, too."""
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        for each in fixtures:
            if each.cached_result is not None and each.cached_result[2] is not None:
                each.finish(SimpleNamespace(node=item))
    if _limit in item.stash:
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=item.stash[_limit])


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Who needed another try is counted and listed: often the same one is a fault."""
    again = report.when == "call" and report.passed and getattr(report, "tries", 1) > 1
    return ("late", "L", "PASSED LATE") if again else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("late"):
        terminalreporter.line(f"passed at try {report.tries}: {report.nodeid}")


def _shared_files() -> set[str]:
    """Named shared memory, but for what torch's own data loaders hold for a moment."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith(("torch_", "sem."))}


@pytest.fixture(scope="session", autouse=True)
def nothing_in_shared_memory() -> Iterator[None]:
    before = _shared_files()
    yield
    until = time.monotonic() + 20  # what the tests of another process hold for a while goes, too
    while (left := _shared_files() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, f"left in shared memory: {left}"


@pytest.fixture(scope="module")
def two() -> Iterator[sg.MirroredStrategy]:
    """Replicas for all tests of a file that need nothing else."""
    with closing(strategy(2)) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[sg.MirroredStrategy]:
    with closing(strategy(3)) as made:
        yield made


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.MirroredStrategy]:
    """One device, and then two replicas."""
    with closing(strategy(request.param)) as made:
        yield made
