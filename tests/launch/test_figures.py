"""A recorded run: a slow task is named with the reason, a dead task is shown, the page works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stratagem.figures.run_folder import RunFolder
from stratagem.launch.report_command import page
from tests.clock import SLOWER
from tests.hosts import Hosts, needs_hosts

sys.path.insert(0, str(Path(__file__).parent))
from run_processes import Launcher

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


def command(where: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stratagem", *words],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=60 * SLOWER,
        env={**os.environ, **environ},
    )


MODEL = """
import torch
import stratagem as sg
from torch.utils.data import DataLoader, Dataset

slow_data = slow_model = 0.0

class Data(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        time.sleep(slow_data)
        return torch.ones(4), torch.ones(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        time.sleep(0.005 + slow_model)
        return self.layer(x)

loader = DataLoader(Data(), batch_size=8)
"""

#: worker 1 has slow data in fit; worker 0 a slow model in a loop of its own; then worker 1 dies
THREE_ACTS = (
    MODEL
    + """
strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = sg.Model(Net())
    model.compile("sgd", "mse")
slow_data = 0.005 * (index == 1)
model.fit(loader, epochs=1, steps_per_epoch=50, verbose=0)
model.save("weights") if index == 0 else None
slow_data, slow_model = 0.0, 0.03 * (index == 0)
net = Net()
net, optimizer, loader = strategy.prepare(net, torch.optim.SGD(net.parameters()), loader)
for step, (x, y) in enumerate(loader):
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 70 and index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


class Strict(HTMLParser):
    """Collects the elements of a page, and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.fetched += [f"{tag} {n}={v}" for n, v in attrs if n in ("src", "href", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.timeout(120)
def test_who_is_slow_is_named_and_who_is_dead_is_shown(launcher: Launcher) -> None:
    code, _, err = launcher.finish(THREE_ACTS, "--record", "runs/first", "--replicas", "2")
    assert code == 137, err
    slow = [line for line in err.splitlines() if " is slow: " in line]
    assert [re.findall(r"worker \d", line) for line in slow] == [
        ["worker 0", "worker 1"],
        ["worker 0", "worker 0"],
    ], err  # each said once, by the chief
    assert "it loads data for" in slow[0] and "it computes for" in slow[1]

    shown = command(launcher.where, "top", "--once")
    rows = {line[:8]: line.split() for line in shown.stdout.splitlines()}
    assert shown.returncode == 1 and rows["worker 1"][3] == "dead" == rows["worker 0"][3]
    assert int(rows["worker 0"][4]) > 50 and "\x1b" not in shown.stdout

    told = command(launcher.where, "report")
    assert told.stdout.strip() == "runs/first/report.html"
    text = (launcher.where / "runs/first/report.html").read_text()
    found = Strict()
    found.feed(text)
    assert not found.fetched and "url(" not in text and "@import" not in text
    assert found.counts["polyline"] >= 2 and found.counts["rect"] > 10
    for part in ("loads data for", "computes for", "weights.safetensors", "killed by SIGKILL"):
        assert part in text
    assert "worker 1 failed (killed by SIGKILL" in text  # what was done about it


def lines(folder: Path, name: str, *written: dict[str, object]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in written)


def figures(time: float, step: int, **more: object) -> dict[str, object]:
    usual = {"steps": 10, "rate": 80.0, "examples": 8.0, "compute": 0.01, "load": 0.0, "wait": 0.0}
    rest = {"link": 0.0, "bytes": 1000, "staleness": 1.5, "generation": 0}
    return {"time": time, "step": step, **usual, **rest, **more}


def test_a_task_that_comes_back(tmp_path: Path) -> None:
    """It is dead until it restarts; an unfinished line is not read."""
    start = {"time": 1.0, "event": "start", "task": "worker 1", "host": "far", "pid": 1}
    lines(tmp_path, "worker-1", start, figures(2.0, 10))
    lines(tmp_path, "launcher", {"time": 3.0, "event": "end", "about": "worker 1", "error": "bad"})
    run = RunFolder(tmp_path)
    run.read()
    (task,) = run.tasks.values()
    assert (task.name, len(task.lines)) == ("worker 1", 1)
    assert (run.state(task), task.restarts, run.is_over) == ("dead", 0, True)
    lines(tmp_path, "worker-1", {**start, "time": 4.0}, figures(5.0, 20))
    with (tmp_path / "worker-1.jsonl").open("a") as file:
        file.write('{"time": 6.0, "st')
    run.read()
    assert len(task.lines) == 2
    assert (run.state(task, 6.0), task.restarts, task.step) == ("runs", 1, 20)
    assert run.state(task, 60.0) == "silent"
    lines(tmp_path, "worker-1", {"x": 1})  # the rest of that line, and nonsense


def test_text_of_a_run_is_not_run(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    lines(tmp_path, "launcher", {"time": 1.0, "event": "fault", "about": bad, "text": bad})
    run = RunFolder(tmp_path)
    run.read()
    assert "<script" not in page(run) and "&lt;script" in page(run)


def coloured(picture: Any, colour: str) -> int:
    """Return the number of pixels with about this colour."""
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(picture[..., :3] - wanted).max(-1) < 0.03).sum())


@pytest.mark.timeout(90 * SLOWER)
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take the network away")
def test_the_page_in_a_browser_without_a_network(tmp_path: Path) -> None:
    """Curves, timelines and faults are visible; nothing is fetched, and there is no error."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    assert BROWSER is not None
    for rank in range(2):
        start = {"time": 1.0, "event": "start", "task": f"worker {rank}", "host": "far", "pid": 1}
        written = [
            figures(2.0 + i, 10 * i, compute=0.4, load=0.2, loss=2.0 / i) for i in range(1, 30)
        ]
        lines(tmp_path / "run", f"worker-{rank}", start, *written)
    died = {"about": "worker 1", "text": "killed", "error": "killed by SIGKILL"}
    lines(tmp_path / "run", "launcher", {"time": 20.0, "event": "fault", **died})
    run = RunFolder(tmp_path / "run")
    run.read()
    (tmp_path / "page.html").write_text(page(run), encoding="utf-8")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1600", "--screenshot"]
    done = subprocess.run(
        ["unshare", "--net", "--kill-child", "--fork", *words, (tmp_path / "page.html").as_uri()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60 * SLOWER,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    picture = pyplot.imread(tmp_path / "screenshot.png")
    curve, computes, loads, fault = "#1b6ca8", "#2e8b57", "#c77d0a", "#d1495b"
    assert coloured(picture, curve) > 700  # three marks of a legend have 600
    assert coloured(picture, computes) > 1.5 * coloured(picture, loads) > 1000
    assert coloured(picture, fault) > 30


def test_the_table_in_a_terminal(tmp_path: Path) -> None:
    """The state is red if colours are on, and a word in any case."""
    folder = tmp_path / "run"
    start = {"time": 1.0, "event": "start", "task": "worker 0", "host": "far", "pid": 1}
    end = {"time": 9.0, "event": "end", "error": "killed by SIGKILL", "text": ""}
    lines(folder, "worker-0", start, figures(2.0, 10), figures(3.0, 20), end)
    script = "import sys; from stratagem.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    for plain in ({}, {"NO_COLOR": "1"}):
        inner = " ".join([sys.executable, "-c", f"'{script}'", "top", "run"])
        shown = subprocess.run(
            ["script", "-qec", inner, "/dev/null"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60 * SLOWER,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", **plain},
        )
        assert shown.returncode == 1 and "dead" in shown.stdout
        assert ("\x1b[1;31m" in shown.stdout) == (not plain)


LINKED = """
import sys, torch
import stratagem as sg
torch.set_num_threads(1)
strategy = sg.MultiWorkerMirroredStrategy()
net = torch.nn.Linear(300, 300)
net, optimizer, _ = strategy.prepare(net, torch.optim.SGD(net.parameters()))
for _ in range(60):
    net(torch.ones(4, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(100)
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    """One of three hosts sends at 20 Mbit/s, the others without limit."""
    (tmp_path / "train.py").write_text(LINKED)
    with Hosts(3) as hosts:
        shape = ["tc", "qdisc", "add", "dev", "e0", "root", "tbf", "rate", "20mbit"]
        shaped = hosts.start(1, *shape, "burst", "64kb", "latency", "300ms")
        if said := shaped.communicate(timeout=20 * SLOWER)[0]:
            pytest.skip(f"links cannot be shaped here: {said}")
        workers = [f"{hosts.address(i)}:2222" for i in range(3)]
        running = [
            hosts.start(
                i,
                sys.executable,
                tmp_path / "train.py",
                STRATAGEM_SECRET="of a test",
                TF_CONFIG=json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}}
                ),
            )
            for i in range(3)
        ]
        told = [each.communicate(timeout=80 * SLOWER)[0] for each in running]
    slow = [line for line in told[0].splitlines() if " is slow: " in line]
    assert len(slow) == 1 and slow[0].startswith("worker 1 ") and "its link takes" in slow[0], told
