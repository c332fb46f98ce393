"""The environments of `make test-versions`; pip and the tests themselves are not run here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import versions

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_what_is_missing_is_said_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"nowhere": ("3.99", ["torch"]), "next": (THIS, ["torch", ""])}
    monkeypatch.setattr(versions, "ENVIRONMENTS", known)
    assert versions.run("nowhere") and versions.run("next")
    assert capsys.readouterr().out.splitlines() == [
        "== nowhere: left out, no Python 3.99 on this machine",
        "== next: left out, no KERAS_WHEEL given",
    ]


def test_an_environment_is_made_once_for_the_same_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[Any]] = []

    def noted(command: list[Any], **_: Any) -> None:
        commands.append([str(each) for each in command])
        (tmp_path / "one").mkdir(exist_ok=True)

    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(subprocess, "run", noted)
    for packages in (["torch==1"], ["torch==1"], ["torch==2"]):
        versions.made("one", "python", packages)
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]] * 2
    assert "torch==2" in commands[-1] and any(each.startswith("pytest") for each in commands[-1])


def test_the_core_is_there_and_interpreters_are_found() -> None:
    for each in versions.CORE:
        file, _, name = each.partition("::")
        path = versions.ROOT / "tests" / file
        assert path.exists() and (not name or f"def {name}(" in path.read_text())
    assert versions.interpreter("3.99") is None
