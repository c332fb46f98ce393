"""The documentation pages about engines: every command is run, and its output compared.

Blocks marked `sh` are run; a block marked `text` after one is its output. Numbers, names of jobs
and the project's folder may differ; `...` stands for omitted lines. Commands that need machines
that the tests do not have (installing, building an image) are marked `bash`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import ROOT, needs_hosts
from tests.launch.sites import Site, finished, site

PAGES = ("slurm", "ssh", "ray", "kubernetes", "vertex")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HANDLE = re.compile(r"\b(?:slurm|ssh|ray|kubernetes|vertex):[\w-]*\w")


def blocks(page: str) -> list[tuple[str, str]]:
    return _BLOCK.findall((ROOT / "docs" / page).read_text())


def train_script() -> str:
    """The script that all pages train with."""
    (found,) = (text for kind, text in blocks("engines.md") if kind == "python")
    return found


def steps(page: str) -> list[tuple[list[str], str]]:
    """Return the commands of a block, and the output that the page shows."""
    found: list[tuple[list[str], str]] = []
    before = ""
    for kind, text in blocks(page):
        if kind == "sh":
            found.append((text.replace("\\\n", "").strip().splitlines(), ""))
        elif kind == "text" and before == "sh":
            found[-1] = (found[-1][0], text)
        before = kind
    return found


def follow(where: Site, page: str) -> list[tuple[list[str], str, str]]:
    """Run a page; return its commands, the output that it shows, and the real output."""
    (where.folder / "project").mkdir(exist_ok=True)
    (where.folder / "project" / "train.py").write_text(train_script())
    told, handle = list[tuple[list[str], str, str]](), ""
    for commands, shown in steps(page):
        said = ""
        for command in commands:
            words = _HANDLE.sub(handle, command) if handle else command
            code, answer = finished(where.shell(words), 150)
            assert code == 0, f"{words}: {answer}"
            handle = next(iter(_HANDLE.findall(answer)), handle)
            said += answer
        told.append((commands, shown, said))
    return told


def plain(text: str, folder: Path) -> Counter[str]:
    """Return the lines without the parts that differ from run to run."""
    for ours, theirs in (
        (folder / "project", "/home/me/digits"),
        (folder / "jobs", "/home/me/.stratagem/jobs"),
        (sys.executable, "/home/me/venv/bin/python"),
        (f" {socket.gethostname()} ", " head "),
    ):
        text = text.replace(str(ours), theirs)
    text = re.sub(r"train-(\d{8}-\d{6}-)?[0-9a-f]{6}", "NAME", _HANDLE.sub("JOB", text))
    text = re.sub(r"\d[\d,.]*", "N", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    timely = (
        "is slow:",
        " is waiting: ",
        "] waiting for ",
    )  # how fast a machine is is no part of a page
    return Counter(x for x in lines if x and not any(each in x for each in timely))


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_pages_word_for_word(
    tmp_path_factory: pytest.TempPathFactory, subtests: pytest.Subtests
) -> None:
    for name in PAGES:
        with subtests.test(name):
            folder = tmp_path_factory.mktemp(name)
            made: Any = site(name, folder)
            try:
                prepare(made)
                for commands, shown, said in follow(made, f"on-{name}.md"):
                    here, there = plain(said, folder), plain(shown, folder)
                    left_out = there.pop("...", 0)
                    assert there - here == Counter(), f"{commands} no longer says this: {said}"
                    assert left_out or not shown or here - there == Counter(), said
            finally:
                made.close()


def prepare(where: Any) -> None:
    """Set up what the page's cloud would have."""
    project = where.folder / "project"
    project.mkdir(exist_ok=True)
    if where.name == "vertex":
        (settings,) = (text for kind, text in blocks("on-vertex.md") if kind == "toml")
        endpoint = f'vertex_endpoint = "http://127.0.0.1:{where.port}"\n'
        (project / "stratagem.toml").write_text(settings + endpoint)
    if folder := {"ray": "shared", "kubernetes": "models"}.get(where.name):
        (project / folder).mkdir()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_about_tpus(tmp_path: Path) -> None:
    """With a fake torch_tpu, whose devices are the CPU."""
    ours = "sg.TPUStrategy(sg.TPUClusterResolver())"
    assert f"`strategy = {ours}`" in (ROOT / "docs" / "tpu.md").read_text()
    script = train_script().replace("sg.MultiWorkerMirroredStrategy()", ours)
    (tmp_path / "train.py").write_text(script)
    ((commands, shown),) = steps("tpu.md")
    assert commands == ["python train.py"]
    told = {"STAND_IN_TPUS": "4", "STAND_IN_CLAIMS": str(tmp_path / "claims")}
    path = f"{ROOT / 'tests' / 'stand_ins'}:{ROOT}"
    child = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, **told, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    code, said = finished(child, 250)
    there = plain(shown, tmp_path)
    assert code == 0 and there.pop("...") and not there - plain(said, tmp_path), said
    assert (tmp_path / "digits.safetensors").exists()
