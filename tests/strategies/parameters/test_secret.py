"""Where no secret was chosen and tasks talk over a network, the chief says so."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.strategies.parameters.crew import Crew


@pytest.mark.parametrize(
    ("host", "index", "secret", "warned"),
    [("10.0.0.3", 0, "", True), ("10.0.0.3", 1, "", False), ("10.0.0.3", 0, "x", False),
     ("127.0.0.1", 0, "", False)],
)  # fmt: skip
def test_no_secret_off_loopback(
    host: str, index: int, secret: str, warned: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("STRATAGEM_SECRET", secret)
    jobs = {"worker": [f"{host}:1", f"{host}:2"], "ps": [f"{host}:3"]}
    crew = Crew.__new__(Crew)  # without the servers that it would look for
    crew.place = sg.Place(sg.ClusterSpec(jobs), sg.Task("worker", index), "the test")
    crew._warn_of_no_secret(jobs["ps"])
    assert ("STRATAGEM_SECRET is not set" in caplog.text) is warned
