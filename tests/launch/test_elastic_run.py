"""`stratagem run` and a job whose tasks are killed: the others go on, or all go on from where
they were, and the result is that of one device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.clock import SLOWER, unless_late
from tests.hosts import ROOT
from tests.launch.run_processes import Launcher
from tests.strategies.test_elastic import net, rows

pytestmark = pytest.mark.timeout(200)

EPOCHS = 8
SOURCE = """
import torch
import stratagem as sg
from tests.strategies.test_elastic import net, rows
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
me = f"{task['type']} {index}"
note(f"task-{me}", os.getpid())
strategy = %(strategy)s

class Kill(sg.callbacks.Callback):
    "Each of these tasks is killed once, after so many steps of the chief."
    seen = 0
    def on_batch_end(self, batch, logs=None):
        Kill.seen += 1
        for name, step in %(kills)r.items():
            back = name != me or %(together)s  # the chief only when all are here again
            if Kill.seen >= step and back and not os.path.exists(f"killed {name}"):
                pid = pathlib.Path(f"task-{name}").read_text()
                note(f"killed {name}", "")
                os.kill(int(pid), signal.SIGKILL)
                if %(waits)r:  # until it is started again, and has imported torch
                    until = time.monotonic() + 60
                    while pathlib.Path(f"task-{name}").read_text() == pid:
                        time.sleep(0.05)
                        if time.monotonic() > until:
                            sys.exit("it was not started again")
        time.sleep(%(pause)s)

torch.manual_seed(5)
x, y = rows()
with strategy.scope():
    model = sg.Model(net())
    model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=32, epochs=%(epochs)d, verbose=0, callbacks=[Kill()],
                    checkpoint=sg.Checkpoints("saved", every=5), resume=True)
if me == "worker 0":
    weights = [p.tolist() for p in model.module.parameters()]
    told = {k: history.history[k] for k in ("loss", "accuracy")}
    note("result", json.dumps({"weights": weights, "history": told}))
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    found.end()


def run(
    launcher: Launcher, strategy: str, kills: dict[str, int], *options: str, pause: str = "0.02"
) -> str:
    """Run the job to its end; what it has said."""
    waits = "--task-restarts" in options
    words = {"strategy": strategy, "kills": kills, "pause": pause, "waits": waits, "epochs": EPOCHS}
    words["together"] = "strategy.num_replicas_in_sync == 2" if waits else "True"
    job = launcher(SOURCE % words, *options, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    said = job.communicate(timeout=150 * SLOWER)[1]
    assert job.returncode == 0, said
    for name in kills:
        unless_late((launcher.where / f"killed {name}").exists(), said)
    return said


def check(launcher: Launcher, atol: float) -> None:
    """The result is that of one device that nothing happens to."""
    found: dict[str, Any] = json.loads((launcher.where / "result").read_text())
    torch.set_default_dtype(torch.float64)
    try:
        with closing(sg.MirroredStrategy(["cpu:0"])) as one:
            torch.manual_seed(5)
            x, y = rows()
            with one.scope():
                model = sg.Model(net())
                model.compile(
                    lambda p: torch.optim.Adam(p, lr=1e-2), "cross_entropy", metrics=["accuracy"]
                )
            history = model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0).history
        for mine, theirs in zip(found["weights"], model.module.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine), theirs.detach(), rtol=0, atol=atol)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, values in found["history"].items():
        assert values == pytest.approx(history[name], abs=1e-9), name


def test_a_worker_is_started_again_and_joins_then_the_chief_dies(launcher: Launcher) -> None:
    strategy = "sg.MultiWorkerMirroredStrategy(elastic=True)"
    kills = {"worker 1": 12, "worker 0": 60}
    said = run(
        launcher,
        strategy,
        kills,
        "--workers",
        "2",
        "--task-restarts",
        "3",
        "--restarts",
        "1",
        "--grace",
        "1",
        pause="0.01 if strategy.num_replicas_in_sync == 2 else 0.4",  # it has time to come
    )
    assert "worker 1 was killed by SIGKILL" in said and "is started again" in said
    assert "joins the job" in said, said
    assert "worker 0 failed first: killed by SIGKILL" in said
    assert said.count("starting it again") == 1
    check(launcher, 1e-12)


@pytest.mark.slow
def test_servers_without_a_backup_are_started_again(launcher: Launcher) -> None:
    """The first among them; workers go back to the last checkpoint, and are the same processes."""
    strategy = "sg.ParameterServerStrategy(updates=sg.Synchronous())"
    sizes = ("--workers", "2", "--ps", "2", "--task-restarts", "2")
    said = run(launcher, strategy, {"ps 1": 12, "ps 0": 40}, *sizes)
    for name in ("ps 1", "ps 0"):
        assert f"{name} was killed by SIGKILL" in said and f"{name} is lost" in said, said
    assert said.count("is started again") == 2 and "worker 1 was" not in said, said
    check(launcher, 1e-12)


@pytest.mark.slow
def test_a_server_without_a_backup_dies(launcher: Launcher) -> None:
    """The job ends and names it; started again, it goes on from the last checkpoint."""
    strategy = "sg.ParameterServerStrategy(updates=sg.Synchronous())"
    said = run(launcher, strategy, {"ps 1": 33}, "--workers", "2", "--ps", "2", "--restarts", "1")
    assert "ps 1 failed first: killed by SIGKILL" in said and "ps 1 is lost" in said
    assert said.count("starting it again") == 1
    check(launcher, 1e-9)
