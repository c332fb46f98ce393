"""`stratagem run` starts real processes, shows their output, and leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.launch.local_job import Job
from stratagem.launch.supervise import Escalation, culprit, steps_after
from tests.clock import PATIENCE, SLOWER, in_time
from tests.ports import free_ports

sys.path.insert(0, str(Path(__file__).parent))
from run_processes import DEAF, FAMILY, Launcher, alive, said, wait_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


# --- the cluster ----------------------------------------------------------------------------------

SHOW = """
names = ("TF_CONFIG", "STRATAGEM_SECRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
         "STRATAGEM_GPU_MEMORY", "PYTHONUNBUFFERED")
found = dict((name, os.environ.get(name)) for name in names)
name = task["type"] + str(index)
note(name, json.dumps(dict(found, argv=sys.argv[1:], cmdline=open("/proc/self/cmdline").read())))
"""


def test_every_task_finds_its_place(launcher: Launcher) -> None:
    code, out, err = launcher.finish(SHOW, "--workers", "2", "--ps", "1", "--evaluator")
    assert (code, out) == (0, "") and "ran the whole script" in err  # it made no strategy
    names = {
        "worker0": ("worker", 0),
        "worker1": ("worker", 1),
        "ps0": ("ps", 0),
        "evaluator0": ("evaluator", 0),
    }
    told = {name: json.loads((launcher.where / name).read_text()) for name in names}
    configs = {name: json.loads(found["TF_CONFIG"]) for name, found in told.items()}
    for name, (role, index) in names.items():
        assert configs[name]["task"] == {"type": role, "index": index}
    assert all(config["cluster"] == configs["ps0"]["cluster"] for config in configs.values())
    jobs = configs["ps0"]["cluster"]
    assert {role: len(listed) for role, listed in jobs.items()} == {
        "worker": 2,
        "ps": 1,
        "evaluator": 1,
    }
    addresses = [address for listed in jobs.values() for address in listed]
    assert len(set(addresses)) == 4 and all(a.startswith("127.0.0.1:") for a in addresses)


def test_the_secret_is_fresh_and_only_in_the_environment(launcher: Launcher) -> None:
    seen = set()
    for _ in range(2):
        launcher.finish(SHOW, "--replicas", "2", STRATAGEM_SECRET="old")
        told = [json.loads((launcher.where / f"worker{i}").read_text()) for i in (0, 1)]
        secret = told[0]["STRATAGEM_SECRET"]
        assert len(secret) == 64 and secret == told[1]["STRATAGEM_SECRET"]
        assert secret not in told[0]["cmdline"] and "train.py" in told[0]["cmdline"]
        seen.add(secret)
    assert len(seen) == 2


def test_environment_and_arguments(launcher: Launcher) -> None:
    options = [
        "--gpu-memory",
        "8 gib",
        "--workers",
        "1",
        "train.py",
        "--workers",
        "9",
        "-m",
        "--",
        "x",
    ]
    code, _, err = launcher.finish(SHOW, *options, OMP_NUM_THREADS="7")
    assert code == 0 and "no GPU here" in err
    told = json.loads((launcher.where / "worker0").read_text())
    assert told["argv"] == ["--workers", "9", "-m", "--", "x"]
    assert told["OMP_NUM_THREADS"] == "7" and told["PYTHONUNBUFFERED"] == "1"
    assert told["STRATAGEM_GPU_MEMORY"] == "8GiB"


def test_modules_run_too(launcher: Launcher) -> None:
    code, _, err = launcher.finish(SHOW, "--workers", "1", "-m", "train", "--lr", "0.1")
    assert code == 0, err
    assert json.loads((launcher.where / "worker0").read_text())["argv"] == ["--lr", "0.1"]


def test_threads_are_shared_out() -> None:
    spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in (4000, 4001)]})
    job = Job(spec, ("python",), dict.fromkeys(spec.tasks(), ()))
    cores = len(os.sched_getaffinity(0))
    for environ in job.environments({}).values():
        assert environ["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        assert "CUDA_VISIBLE_DEVICES" not in environ and "STRATAGEM_GPU_MEMORY" not in environ


def test_gpus_reach_the_tasks(launcher: Launcher) -> None:
    launcher.finish(SHOW, "--replicas", "2", "--ps", "1", CUDA_VISIBLE_DEVICES="3,5")
    told = [
        json.loads((launcher.where / name).read_text()) for name in ("worker0", "worker1", "ps0")
    ]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == ["3", "5", ""]


def test_chosen_ports(launcher: Launcher) -> None:
    ports = free_ports(2)
    while ports[1] != ports[0] + 1:  # somebody else has one in between
        ports = free_ports(2)
    base = ports[0]
    code, _, err = launcher.finish(SHOW, "--workers", "2", "--port", str(base))
    assert code == 0, err
    config = json.loads(json.loads((launcher.where / "worker1").read_text())["TF_CONFIG"])
    assert config["cluster"]["worker"] == [f"127.0.0.1:{base}", f"127.0.0.1:{base + 1}"]


def test_a_port_in_use_is_named(launcher: Launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = launcher.finish(SHOW, "--workers", "2", "--port", str(port - 1))
    assert code == 2 and err.count("\n") == 1
    assert f"worker 1 cannot listen at port {port}" in err or f"port {port - 1}" in err
    assert not (launcher.where / "worker0").exists()


# --- the end --------------------------------------------------------------------------------------


def test_all_well_is_silent_zero(launcher: Launcher) -> None:
    script = "import stratagem as sg; sg.MultiWorkerMirroredStrategy().run(int)"
    assert launcher.finish(script, "--workers", "3") == (0, "", "")


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        pytest.param("1 / 0", 1, "exit code 1", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL; out of memory?"),
        pytest.param("os.abort()", 134, "killed by SIGABRT", marks=pytest.mark.slow),
    ],
)
def test_the_code_of_the_first_failure(launcher: Launcher, how: str, code: int, words: str) -> None:
    script = f"""
if index == 1:
    note("failed", os.getpid())
    {how}
while not os.path.exists("failed") or os.path.exists("/proc/" + open("failed").read()):
    time.sleep(0.01)  # until the launcher knows
print("worker 1 is lost", file=sys.stderr)
sys.exit(3)
"""
    found, _, err = launcher.finish(script, "--workers", "2")
    assert found == code
    told = err.splitlines()
    assert "[worker 0] worker 1 is lost" in told
    verdict = next(i for i, line in enumerate(told) if line.startswith("worker 1 failed first: "))
    assert f"{words} (pid {launcher.pid('failed')}) after " in told[verdict]
    assert all(line.startswith("    ") for line in told[verdict + 1 :])  # the last word


# Worker 1 tells worker 0 at once, and is the last to end: it registers before stratagem does.
TELLS_AND_LINGERS = """
import atexit
if index == 1:
    atexit.register(time.sleep, 2)
import torch
import stratagem as sg
torch.set_num_threads(1)
strategy = sg.MultiWorkerMirroredStrategy()
model = sg.Model(torch.nn.Linear(2, 2), strategy)
model.compile("sgd", "mse")
x = torch.ones(8, 2)
model.fit(x, x, verbose=0)
if index == 1:
    {how}
model.fit(x, x, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "last"), [("sys.exit(7)", 7, ""), ("raise ValueError('mine')", 1, "mine")]
)
def test_the_first_is_not_whoever_ends_first(
    launcher: Launcher, how: str, code: int, last: str
) -> None:
    script = TELLS_AND_LINGERS.format(how=how)
    found, _, err = launcher.finish(script, "--workers", "2", "--grace", "0")
    assert f"worker 1 failed first: exit code {code} " in err, err
    assert err.rstrip().endswith(last) and found == code
    assert "worker 0 failed because of worker 1 (exit code 1); worker 1 may take" in err
    assert "SIGTERM" not in err and not folders(launcher.started[0])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("server", ["ps runs the script", "ps by itself"])
def test_a_server_that_ends_first_is_not_to_blame(launcher: Launcher, server: str) -> None:
    script = TELLS_AND_LINGERS.format(how="raise ValueError('mine')")
    script = script.replace("sg.MultiWorkerMirroredStrategy()", "sg.ParameterServerStrategy()")
    if server == "ps by itself":
        served = "import stratagem.ps\nif task['type'] == 'ps': sys.exit(stratagem.ps.main([]))\n"
        script = served + script
    script = script.replace("if index == 1:", "if index == 1 and task['type'] == 'worker':")
    child = launcher(script, "--workers", "2", "--ps", "1", OMP_NUM_THREADS="1")
    _, err = child.communicate(timeout=100 * SLOWER)
    assert "worker 1 failed first: exit code 1 " in err, err
    assert err.rstrip().endswith("mine") and child.returncode == 1


def folders(child: subprocess.Popen[str]) -> list[Path]:
    """Return the folders that a launcher has left among temporary files."""
    return list(Path(tempfile.gettempdir()).glob(f"stratagem-{child.pid}-*"))


def ended(task: str, because_of: str = "") -> Any:
    role, _, index = task.partition(" ")
    return SimpleNamespace(task=Task(role, int(index)), because_of=because_of)


@pytest.mark.parametrize(
    ("failed", "first"),
    [
        ([], None),
        (["worker 1"], 0),
        (["worker 1", "worker 0"], 0),
        (["worker 0 < worker 1", "worker 1"], 1),
        (["worker 0 < worker 1 replica 2", "worker 2", "worker 1"], 2),
        (["worker 2 < worker 0", "worker 0 < worker 1", "worker 1"], 2),
        (["worker 1 < worker 10", "worker 10 < worker 1 replica 1"], 0),
        (["worker 0 < worker 1", "worker 2"], 0),
        (["worker 0 < worker 0 replica 1", "worker 1 < worker 0"], 0),
        (["worker 0 < worker 1", "worker 1 < worker 0"], 0),
    ],
)
def test_who_began_it(failed: list[str], first: int | None) -> None:
    """Each task with the task that it blames; only a task that failed can be the first."""
    several = [ended(*each.split(" < ")) for each in failed]
    assert culprit(several) is (None if first is None else several[first])


def test_the_last_lines_are_quoted(launcher: Launcher) -> None:
    script = "for i in range(30): print('step', i, file=sys.stderr)\nraise ValueError('bad lr')"
    code, _, err = launcher.finish(script)
    assert code == 1
    before, _, quoted = err.partition("; its last lines:\n")
    told = quoted.splitlines()
    assert (
        "[worker 0] step 0" in before and len(told) == 10 and told[-1] == "    ValueError: bad lr"
    )


def test_the_verdict_waits_for_a_slow_reader(launcher: Launcher) -> None:
    script = """
for i in range(900):  # more than the pipe to us holds, less than that and the launcher's own
    print(i, "x" * 100, file=sys.stderr)
print("and on stdout")
note("task0", os.getpid())
sys.exit(9)
"""
    child = launcher(script)
    task = launcher.pid("task0")
    wait_for(lambda: not alive(task))
    time.sleep(0.5)
    out, err = child.communicate(timeout=PATIENCE)
    told = err.splitlines()
    assert out == "[worker 0] and on stdout\n"
    assert child.returncode == 9 and len(told) == 900 + 1 + 10
    assert told[900].startswith("worker 0 failed first: exit code 9")


def test_silence_is_said_to_be_silence(launcher: Launcher) -> None:
    _, _, err = launcher.finish("print('only here'); sys.exit(4)")
    assert err.endswith(" s; it wrote nothing to stderr.\n")


def test_others_may_end_within_the_grace(launcher: Launcher) -> None:
    script = """
if index == 1:
    note("failed", os.getpid())
    sys.exit(5)
while not os.path.exists("failed") or os.path.exists("/proc/" + open("failed").read()):
    time.sleep(0.01)
time.sleep(0.3)
print("saved")
"""
    code, out, err = launcher.finish(script, "--workers", "2", "--grace", "20")
    assert code == 5 and said(out, "worker 0") == ["saved"]
    assert "worker 1 failed (exit code 5); worker 0 may take 20 s to end" in err
    assert "SIGTERM" not in err


def test_after_the_grace_comes_sigterm(launcher: Launcher) -> None:
    script = """
def leave(*_):
    print("asked to leave")
    sys.exit(0)
if index == 0:
    signal.signal(signal.SIGTERM, leave)
    note("ready", 0)
    time.sleep(60)
while not os.path.exists("ready"):
    time.sleep(0.01)
sys.exit(6)
"""
    began = time.monotonic()
    code, out, err = launcher.finish(script, "--workers", "2", "--grace", "0.5")
    assert code == 6 and said(out, "worker 0") == ["asked to leave"]
    in_time(time.monotonic() - began, 10, least=0.5)
    assert "SIGTERM to worker 0" in err and "SIGKILL" not in err


@pytest.mark.slow
def test_after_sigterm_comes_sigkill(launcher: Launcher) -> None:
    script = f"""
if index == 1:
    while not os.path.exists("task0"):
        time.sleep(0.01)
    sys.exit(6)
{FAMILY.format(DEAF)}
"""
    code, _, err = launcher.finish(script, "--workers", "2", "--grace", "0")
    assert code == 6 and "SIGKILL to worker 0" in err
    assert not alive(launcher.pid("task0")) and not alive(launcher.pid("child0"))


def test_what_a_task_leaves_behind_is_ended(launcher: Launcher) -> None:
    script = "note('child0', subprocess.Popen(['sleep', '60']).pid)"
    code, _, err = launcher.finish(script)
    assert code == 0 and "worker 0 left processes behind" in err
    assert not alive(launcher.pid("child0"))


@pytest.mark.parametrize(
    ("number", "deaf"),
    [
        (signal.SIGINT, False),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        (signal.SIGTERM, False),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
        (signal.SIGHUP, False),
        (signal.SIGKILL, True),
    ],
)
def test_a_signal_to_the_launcher_leaves_nobody(
    launcher: Launcher, number: signal.Signals, deaf: bool
) -> None:
    script = FAMILY.format(DEAF if deaf else "")
    child = launcher(script, "--workers", "2", "--grace", "0.5")
    family = [launcher.pid(f"{who}{i}") for who in ("task", "child") for i in (0, 1)]
    assert all(map(alive, family)) and len(set(family)) == 4
    began = time.monotonic()
    child.send_signal(number)
    code = child.wait(PATIENCE)
    wait_for(lambda: not any(map(alive, family)) and not folders(child))
    assert code == (-9 if number is signal.SIGKILL else 128 + number)
    in_time(time.monotonic() - began, 8 if deaf else 3)


def guard_of(child: subprocess.Popen[str]) -> int:
    family = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    guards = [p for p in family if b"\0guard\0" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(guards) == 1
    return int(guards[0])


def test_tasks_die_even_if_their_guard_was_killed(launcher: Launcher) -> None:
    child = launcher(FAMILY.format(""))
    task = launcher.pid("task0")
    os.kill(guard_of(child), signal.SIGKILL)
    child.kill()
    wait_for(lambda: not alive(task))
    for left in folders(child):  # nobody lives who could have
        left.rmdir()


def test_the_guard_stays_to_the_end(launcher: Launcher) -> None:
    child = launcher(FAMILY.format(""))
    family = [launcher.pid("task0"), launcher.pid("child0")]
    guard = guard_of(child)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard, number)
    time.sleep(0.2)
    child.kill()
    wait_for(lambda: not any(map(alive, [*family, guard])))


def test_nobody_watches_once_it_is_over(launcher: Launcher) -> None:
    child = launcher("note('task0', os.getpid())\nwhile not os.path.exists('go'): time.sleep(0.01)")
    launcher.pid("task0")
    family = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    assert len(family) == 2  # the task and the guard
    (launcher.where / "go").touch()
    assert child.wait(PATIENCE) == 0
    assert not any(alive(int(pid)) for pid in family)


def test_ctrl_c_lets_the_tasks_say_goodbye(launcher: Launcher) -> None:
    script = """
try:
    note(f"task{index}", os.getpid())
    time.sleep(60)
except KeyboardInterrupt:
    print("goodbye")
"""
    child = launcher(script, "--workers", "2")
    for i in (0, 1):
        launcher.pid(f"task{i}")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130 and "Traceback" not in err and "failed first" not in err
    assert said(out, "worker 0") == said(out, "worker 1") == ["goodbye"]


def test_a_second_ctrl_c_does_not_wait(launcher: Launcher) -> None:
    child = launcher(FAMILY.format(DEAF), "--grace", "500")
    family = [launcher.pid("task0"), launcher.pid("child0")]
    for _ in range(3):  # SIGINT, SIGTERM, SIGKILL
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert child.wait(PATIENCE) == 130
    assert not any(map(alive, family))


def test_the_steps_of_an_escalation() -> None:
    steps = steps_after(None, 5.0)
    assert steps == ((5.0, signal.SIGTERM), (8.0, signal.SIGKILL))
    assert steps_after(signal.SIGINT, 5.0) == ((0.0, signal.SIGINT), *steps)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        assert steps_after(number, 1.0) == ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))
    plan = Escalation(steps, 100.0)
    assert (plan.due(104.9), plan.begun) == ([], False)
    assert (plan.due(105.0), plan.begun, plan.over) == ([signal.SIGTERM], True, float("inf"))
    plan.hurry(106.0)
    assert (plan.due(106.0), plan.over) == ([signal.SIGKILL], 106.0)


def test_a_job_is_started_again(launcher: Launcher) -> None:
    """After a failure, and after a task that has saved; at most --restarts times."""
    script = """
path = pathlib.Path(f"starts{index}")
starts = int(path.read_text()) + 1 if path.exists() else 1
note(f"starts{index}", starts)
sys.exit([9, 75, 0][starts - 1])
"""
    code, _, said = launcher.finish(script, "--replicas", "1", "--restarts", "5")
    assert code == 0, said
    assert "failed (9); starting it again, 4 more" in said and "saved; starting it again" in said
    (launcher.where / "starts0").unlink()
    code, _, said = launcher.finish(script, "--replicas", "1", "--restarts", "1")
    assert code == 75, said
    assert (launcher.where / "starts0").read_text() == "2"


def test_sigterm_lets_tasks_save_and_starts_nothing_again(launcher: Launcher) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
note(f"ready{index}", os.getpid())
time.sleep(60)
"""
    running = launcher(script, "--replicas", "2", "--restarts", "5")
    wait_for(lambda: all((launcher.where / f"ready{i}").exists() for i in range(2)))
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 75, said
    assert "starting it again" not in said


PLAIN = """
import torch, stratagem as sg
strategy = sg.MultiWorkerMirroredStrategy() if {made} else None
net = torch.nn.Linear(2, 1)
if {given}:
    rows = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer, loader = strategy.prepare(
        net, optimizer, torch.utils.data.DataLoader(rows, batch_size=2))
    for x, y in loader:
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        (False, False, "stratagem run: make a strategy in the script"),
        (True, False, "stratagem run: give your model to the strategy"),
        (True, True, ""),
    ],
)
def test_tasks_that_train_by_themselves_are_told_of(
    made: bool, given: bool, said: str, launcher: Launcher
) -> None:
    code, _, err = launcher.finish(PLAIN.format(made=made, given=given), "--replicas", "2")
    assert code == 0
    assert said in err if said else "the same work" not in err
    assert ("worker 0 and worker 1 ran the whole script" in err) == bool(said)
