"""No server listens beyond loopback without a secret, unless the user asks for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

import stratagem as sg
from stratagem import ps
from stratagem.cluster.handshake import secret_for
from stratagem.launch import check

pytestmark = pytest.mark.timeout(60)
ABROAD = sg.ClusterSpec({"worker": ["10.0.0.3:1", "10.0.0.4:1"], "ps": ["10.0.0.3:3"]})
HERE = sg.ClusterSpec({"worker": ["127.0.0.1:1", "localhost:2"], "ps": ["[::1]:3"]})


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)


def ports(spec: sg.ClusterSpec) -> list[str]:
    return [spec.address(task) for task in spec.tasks()]


def test_only_where_others_reach_a_port_a_secret_is_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert secret_for(HERE, ports(HERE), insecure=False)
    with pytest.raises(sg.ClusterError, match=r"STRATAGEM_SECRET .*openssl rand.*insecure=True"):
        secret_for(ABROAD, ports(ABROAD), insecure=False)
    assert not caplog.text
    secret_for(ABROAD, ports(ABROAD), insecure=True)
    assert "STRATAGEM_SECRET is not set: whoever reaches 10.0.0.3:1" in caplog.text
    monkeypatch.setenv("STRATAGEM_SECRET", "x")
    assert secret_for(ABROAD, ports(ABROAD), insecure=False)


def _place(role: str) -> sg.Place:
    return sg.Place(ABROAD, sg.Task(role, 0), "the test")


@pytest.mark.parametrize(
    "make",
    [
        lambda: sg.MultiWorkerMirroredStrategy(cluster=_place("worker")),
        lambda: sg.MirroredStrategy(["cpu:0"], cluster=_place("worker")),
        lambda: sg.ParameterServerStrategy(_place("worker")),
        lambda: sg.ParameterServerStrategy(_place("ps")),
        lambda: sg.ParameterServerStrategy(_place("evaluator")),
    ],
)
def test_every_strategy_refuses(make: Callable[[], object]) -> None:
    with pytest.raises(sg.ClusterError, match="STRATAGEM_SECRET is not set"):
        make()


def test_one_worker_listens_nowhere() -> None:
    spec = sg.ClusterSpec({"worker": ["10.0.0.3:1"]})
    place = sg.Place(spec, sg.Task("worker", 0), "the test")
    sg.MultiWorkerMirroredStrategy(cluster=place).close()


def test_a_server_and_a_check_refuse_and_can_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", ABROAD.to_json(), "--index", "0"]
    assert ps.main(words) == 1 and "--insecure does without" in capsys.readouterr().err

    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    assert parser.parse_args(["--insecure"]).insecure
