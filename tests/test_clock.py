"""What comes late is tried again, what is wrong is not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests import clock

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(60)

TESTS = """
from pathlib import Path

import pytest

import time

import tests.clock
from tests.clock import in_time, unless_late, wait_for

tests.clock.PATIENCE = 0.3

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

def test_hang(place):
    wait_for(lambda: False, 0.1)

def test_hang_of_a_socket(place):
    raise TimeoutError("timed out")

def test_comes_late(place):
    end = time.monotonic() + 0.1
    wait_for(lambda: time.monotonic() > end, 0.05 if tries("test_comes_late") == 1 else 5.0)
"""


class Limits:
    """Notes for whom a limit begins."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item) -> None:
        self.names.append(item.name)


def test_late_ones_are_tried_again_from_their_start(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STRATAGEM_SECOND_TRIES", "STRATAGEM_ALONE"):  # as `.ci/run` has them
        monkeypatch.delenv(name, raising=False)
    log = pytester.path / "log"
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(TESTS.format(log=str(log)))
    limits = Limits()
    done = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=50", plugins=[limits]
    )
    assert done.parseoutcomes() == {"passed": 1, "late": 4, "failed": 4}
    names = log.read_text().split()
    expected = [name.replace("slowly", "test_late_fixture") for name in names]
    assert limits.names == expected, "every try has a limit of its own"
    assert {name: names.count(name) for name in names} == {
        "test_once_late": 2,
        "test_always_late": 3,
        "test_wrong": 1,
        "test_too_early": 2,
        "slowly": 2,
        "test_right": 1,
        "test_hang": 1,
        "test_hang_of_a_socket": 1,
        "test_comes_late": 2,
    }
    done.stdout.fnmatch_lines(["*never in time*", "passed at try 2: *test_once_late"])


LATE_AGAIN = """
from pathlib import Path
from tests.clock import unless_late

def test_always_late(): unless_late(Path({folder!r} + "/mended").exists(), "late")

def late_once(name):
    first = not Path(name).exists()
    Path(name).touch()
    unless_late(not first, "late")

def test_late(): late_once({folder!r} + "/one")
def test_late_with_spaces(): late_once({folder!r} + "/other")
def test_right(): pass
"""

WRONG = """
from pathlib import Path

def wrong(name): assert Path(name).exists(), "wrong weights"

def test_wrong_once(): wrong({folder!r} + "/once")
def test_wrong(): wrong({folder!r} + "/never")
def test_hang(): raise TimeoutError("nothing came")
"""


def as_on_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """These tests with our conftest.py, in a run that lists whom to try again in `tries`."""
    monkeypatch.setenv("STRATAGEM_SECOND_TRIES", str(pytester.path / "tries"))
    monkeypatch.delenv("STRATAGEM_ALONE", raising=False)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    return pytester.makepyfile(text.format(folder=str(pytester.path)))


def test_wrong_answers_are_told_and_tried_once_more_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = pytester.path / "tries"
    made = as_on_ci(pytester, monkeypatch, WRONG)
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(pytester.path))
    first = pytester.runpytest_inprocess(*options, str(made))
    assert first.ret == 1 and first.parseoutcomes() == {"late": 2, "failed": 1}, "a hang fails"
    first.stdout.fnmatch_lines(["FAILED, to be tried once more alone: *test_wrong_once"])
    first.stdout.fnmatch_lines(["*wrong weights*", "FAILED *::test_hang*"])
    names = [each.partition("::")[2] for each in listed.read_text().splitlines()]
    assert names == ["test_wrong", "test_wrong_once"]
    monkeypatch.setenv("STRATAGEM_ALONE", "1")
    (pytester.path / "once").touch()
    second = pytester.runpytest_inprocess(*options, f"@{listed}")
    assert second.ret == 1 and second.parseoutcomes() == {"passed": 1, "failed": 1}


def test_who_needed_another_try_is_listed_and_fails_the_second_time(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tests in another process, as `make test` has them; then only the late ones."""
    listed = pytester.path / "tries"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    made = as_on_ci(pytester, monkeypatch, LATE_AGAIN)
    options = ("-p", "no:cacheprovider", "--rootdir", str(pytester.path))
    first = pytester.runpytest_inprocess(*options, "-n", "1", str(made))
    assert first.ret == 0 and first.parseoutcomes() == {"passed": 1, "late": 3}
    first.stdout.fnmatch_lines(["late at every try: *test_always_late"])
    first.stdout.fnmatch_lines_random(["passed at try 2: *test_late", "*test_late_with_spaces"])
    assert [each.partition("::")[2] for each in listed.read_text().splitlines()] == [
        "test_always_late",
        "test_late",
        "test_late_with_spaces",
    ]
    monkeypatch.setenv("STRATAGEM_ALONE", "1")
    (pytester.path / "one").unlink()  # late again; the other one is not
    kept = listed.read_text()
    alone = (*options, "-p", "no:xdist", f"@{listed}")
    with pytest.MonkeyPatch.context() as busy:  # half of the time is somebody else's
        times = itertools.count(0, 100)
        busy.setattr(clock, "processor_time", lambda: (next(times), next(times)))
        hampered = pytester.runpytest_inprocess(*alone)
    assert hampered.ret == 0 and hampered.parseoutcomes() == {"passed": 1, "late": 2}
    listed.write_text(kept)
    (pytester.path / "one").unlink()
    second = pytester.runpytest_inprocess(*alone)
    assert second.parseoutcomes() == {"passed": 1, "late": 1, "failed": 1}
    assert second.ret == 1
    second.stdout.fnmatch_lines(["FAILED for being late in the run before, too: *::test_late"])
    (pytester.path / "mended").touch()
    third = pytester.runpytest_inprocess(*alone)
    assert third.ret == 0 and listed.read_text() == ""
