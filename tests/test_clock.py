"""What comes late is tried again, what is wrong is not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(60)

TESTS = """
from pathlib import Path

import pytest

from tests.clock import in_time, unless_late

LOG = Path({log!r})

@pytest.fixture
def place(request, tmp_path):
    with LOG.open("a") as log:
        log.write(request.node.name + "\\n")
    assert not list(tmp_path.iterdir()), "a try sees what another has left"
    (tmp_path / "left").touch()

def tries(name):
    return LOG.read_text().split().count(name)

def test_once_late(place):
    in_time(9.0 if tries("test_once_late") == 1 else 1.0, 2.0)

def test_always_late(place):
    unless_late(False, "never in time")

def test_wrong(place):
    assert False, "wrong"

def test_too_early(place):
    in_time(1.0, 9.0, least=0.5 if tries("test_too_early") == 2 else 2.0)

@pytest.fixture(scope="module")
def slowly():
    with LOG.open("a") as log:
        log.write("slowly ")
    unless_late(tries("slowly") > 1, "not yet")
    yield "made"

def test_late_fixture(slowly):
    assert slowly == "made"

def test_right(slowly, place):
    pass
"""


class Limits:
    """Notes for whom a limit begins."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> None:
        self.names.append(item.name)


def test_late_ones_are_tried_again_from_their_start(pytester: pytest.Pytester) -> None:
    log = pytester.path / "log"
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(TESTS.format(log=str(log)))
    limits = Limits()
    done = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=50", plugins=[limits]
    )
    assert done.parseoutcomes() == {"passed": 1, "late": 3, "failed": 2}
    names = log.read_text().split()
    expected = [name.replace("slowly", "test_late_fixture") for name in names]
    assert limits.names == expected, "every try has a limit of its own"
    assert {name: names.count(name) for name in names} == {
        "test_once_late": 2, "test_always_late": 3, "test_wrong": 1, "test_too_early": 2,
        "slowly": 2, "test_right": 1,
    }  # fmt: skip
    done.stdout.fnmatch_lines(["*never in time*", "passed at try 2: *test_once_late"])
