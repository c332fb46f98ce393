"""Jobs on every engine, on a real Slurm and over real sshd between hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.clock import in_time, wait_for
from tests.hosts import needs_hosts
from tests.launch.sites import HEAD, finished, running, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import torch, stratagem as sg
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = sg.Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    model.compile("adam", "cross_entropy")
model.fit(x, y, batch_size=32, epochs=3, verbose=0)
model.save(sys.argv[1])
print("replicas", strategy.num_replicas_in_sync, flush=True)
"""


@pytest.fixture(scope="module", params=["slurm", "ssh", "kubernetes", "ray", "vertex"])
def there(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    made = site(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


def script(where: Any, text: str) -> None:
    for file in where.folder.glob("*-worker-?"):  # notes of an earlier test
        file.unlink()
    project = where.folder / "project"
    project.mkdir(exist_ok=True)
    (project / "train.py").write_text(f"at = {str(where.folder)!r}\n{HEAD}{text}")


def submitted(where: Any, *more: str) -> tuple[str, list[str]]:
    """Submit a job; return its handle, and the commands that the output names."""
    code, said = finished(where.start("submit", *where.options(), *more))
    assert code == 0, said
    handle = said.partition(" is submitted")[0].splitlines()[-1]
    lines = said.partition("Next:")[2].strip().splitlines()
    return handle, [line.strip().removeprefix("stratagem ") for line in lines]


def begun(where: Any, *tasks: str) -> None:
    wait_for(lambda: all((where.folder / f"pid-{task}").exists() for task in tasks), 60)


def nothing_left(where: Any) -> bool:
    return not running(str(where.folder / "jobs")) and not running("train.py")


@needs_hosts
def test_one_that_fails_ends_all_and_is_named(there: Any) -> None:
    """A task may also fail before it has joined the tasks that wait for it."""
    (there.folder / "failed").unlink(missing_ok=True)
    script(
        there,
        "if me == 'worker-1':\n    time.sleep(1)\n    print('no data', file=sys.stderr)\n"
        "    note('failed', time.time())\n    sys.exit(3)\n"
        "import stratagem as sg\nsg.MultiWorkerMirroredStrategy()\n",
    )
    job = ["submit", *there.options(), "--workers", "2", "--follow", "train.py"]
    code, said = finished(there.start(*job))
    assert code == 3, said
    in_time(time.time() - float((there.folder / "failed").read_text()), 11)
    assert "worker 1 failed first: exit code 3" in said.splitlines()[-2]
    assert "no data" in said.splitlines()[-1]
    wait_for(lambda: nothing_left(there), 10)


@needs_hosts
def test_one_that_fails_ends_those_that_will_not(there: Any) -> None:
    if there.name in ("kubernetes", "vertex"):
        pytest.skip("they kill whom they have asked in vain, 30 s later; their stand-ins do not")
    (there.folder / "failed").unlink(missing_ok=True)
    script(
        there,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote(f'deaf-{me}', 1)\n"
        "while not os.path.exists('deaf-worker-0'): time.sleep(0.1)\n"
        "if me == 'worker-1':\n    note('failed', time.time())\n    sys.exit(3)\ntime.sleep(200)\n",
    )
    job = ["submit", *there.options(), "--workers", "2", "--follow", "train.py"]
    code, said = finished(there.start(*job))
    assert code == 3 and "worker 1 failed first: exit code 3" in said.splitlines()[-1], said
    wait_for(lambda: nothing_left(there), 10)
    in_time(time.time() - float((there.folder / "failed").read_text()), 12)


@needs_hosts
def test_ctrl_c_leaves_the_job_and_cancel_ends_it(there: Any) -> None:
    script(
        there,
        "print('line 1', flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (note('told', me), sys.exit(9)))\n"
        "note(f'ready-{me}', 1)\n"
        "while not os.path.exists('go'): time.sleep(0.1)\n"
        "print('line 2', flush=True)\ntime.sleep(200)\n",
    )
    handle, following = submitted(there, "--workers", "2", "train.py")
    assert following == [f"logs {handle} --follow", f"status {handle}", f"cancel {handle}"]
    follow, status, cancel = (command.split() for command in following)
    wait_for(lambda: (there.folder / "ready-worker-1").exists(), 60)
    first = there.start(*follow)
    while "line 1" not in first.stdout.readline():
        pass
    _interrupt(first)
    _, said = finished(first)
    assert f"{handle} goes on. To come back: stratagem logs {handle} --follow" in said
    (there.folder / "go").write_text("")
    code, said = finished(there.start(*status))
    assert code == 0 and said.count("running") == 3, said
    second = there.start(*follow)
    lines = []
    while sum("line 2" in line for line in lines) < 2:
        lines.append(second.stdout.readline())
        assert lines[-1], lines  # it has ended
    code, said = finished(there.start(*cancel))
    assert code == 0 and f"{handle} is cancelled" in said
    code, rest = finished(second)
    assert code == (9 if there.name in ("slurm", "ssh") else 143), rest
    for task in ("worker 0", "worker 1"):
        for line in ("line 1", "line 2"):
            assert sum(f"[{task}] {line}" in each for each in lines) == 1
    assert (there.folder / "told").exists()
    wait_for(lambda: nothing_left(there), 10)
    assert f"{handle} has ended" in finished(there.start(*cancel))[1]
    assert handle in finished(there.start("jobs"))[1]


def _interrupt(child: subprocess.Popen[str]) -> None:
    """Send Ctrl-C to the command itself, which its host has started."""
    below = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(below[0]) if below else child.pid, signal.SIGINT)


@needs_hosts
def test_a_client_that_is_killed_leaves_the_job(there: Any) -> None:
    script(there, "time.sleep(4)\nnote(f'done-{me}', 1)\nprint('done')\n")
    client = there.start("submit", *there.options(), "--workers", "2", "--follow", "train.py")
    begun(there, "worker-0", "worker-1")
    client.kill()
    wait_for(lambda: all((there.folder / f"done-worker-{i}").exists() for i in (0, 1)), 30)
    listed = finished(there.start("jobs"))[1].splitlines()[-1]
    code, said = finished(there.start("logs", listed.split()[0], "--follow", "--times"))
    assert code == 0 and said.count("] done") == 2 and said.startswith("20")


@needs_hosts
def test_the_secret_is_nowhere_to_be_seen(there: Any) -> None:
    script(there, "time.sleep(2)\nnote(f'secret-{me}', os.environ['STRATAGEM_SECRET'])\n")
    seen, over = set[str](), threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen.update(running(""))

    watcher = threading.Thread(target=watch)
    watcher.start()
    job = ["submit", *there.options(), "--workers", "2", "--follow", "train.py"]
    code, said = finished(there.start(*job))
    over.set()
    watcher.join()
    assert code == 0, said
    secrets = {(there.folder / f"secret-worker-{i}").read_text() for i in (0, 1)}
    (secret,) = secrets
    assert len(secret) == 64 and any("train.py" in line for line in seen)
    assert not any(secret in line for line in seen) and secret not in said
    own = {f"secret-worker-{i}" for i in (0, 1)} | {"secret"}  # the job's, in its bucket
    for folder in (there.folder, getattr(there, "logs", there.folder)):  # the engine's own, too
        for file in (each for each in folder.rglob("*") if each.is_file() and each.name not in own):
            assert secret.encode() not in file.read_bytes(), file


@needs_hosts
def test_roles(there: Any) -> None:
    script(there, "print('I am', me, roles)")
    more = ["--workers", "2", "--ps", "1", "--evaluator", "--follow"]
    code, said = finished(there.start("submit", *there.options(), *more, "train.py"), 150)
    assert code == 0, said
    for task in ("worker 0", "worker 1", "ps 0", "evaluator"):
        name = task.replace(" ", "-") if task != "evaluator" else "evaluator-0"
        assert f"[{task}] I am {name} ['evaluator', 'ps', 'worker']" in said


@needs_hosts
def test_what_would_be_sent_is_what_is_sent(there: Any) -> None:
    script(there, "print('here')\n")
    code, shown = finished(
        there.start("submit", *there.options(), "--workers", "2", "--dry-run", "train.py")
    )
    assert code == 0 and "stratagem.launch" in shown
    before = set((there.folder / "jobs").iterdir())
    handle, _ = submitted(there, "--workers", "2", "train.py")
    (new,) = set((there.folder / "jobs").iterdir()) - before
    finished(there.start("logs", handle, "--follow"))
    sent = (new / "script").read_text()
    assert [_shape(line) for line in sent.splitlines()] == [_shape(x) for x in shown.splitlines()]


def _shape(line: str) -> str:
    """Return the text without what is new for each job: the name of its folder, its ports."""
    return re.sub(r"\d{8}-\d{6}-[0-9a-f]{6}|(?<=train-)[0-9a-f]{6}|(?<=:)\d{4,5}(?=\")", "", line)


RESUMED = """
import torch, stratagem as sg
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))

class Slow(sg.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        note(f"step-{me}", time.time())
        with open(f"{sys.argv[1]}-steps-{me}", "a") as steps:
            steps.write("x")
        time.sleep(float(sys.argv[2]))

strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = sg.Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    model.compile("adam", "cross_entropy")
model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Slow()],
          checkpoint=sys.argv[1], resume=True)
model.save(sys.argv[1] + "-end")
"""


@needs_hosts
def test_a_job_that_is_put_back_into_the_queue_goes_on(there: Any) -> None:
    if there.name != "slurm":
        pytest.skip("nothing is preempted there")
    script(there, RESUMED)
    job = ["submit", *there.options(), "--workers", "2", "--follow", "train.py"]
    code, said = finished(there.start(*job, "quiet", "0"))
    assert code == 0, said
    (there.folder / "step-worker-0").unlink(missing_ok=True)
    client = there.start(*job, "requeued", "0.15")
    wait_for(lambda: (there.folder / "step-worker-0").exists(), 60)
    (name,) = there.run("squeue", "-h", "-o", "%i").split()
    there.run("scontrol", "requeue", name)
    wait_for(lambda: "PENDING" in there.run("squeue", "-h", "-o", "%T"), 60)
    there.run("scontrol", "update", f"jobid={name}", "starttime=now")  # not in two minutes
    code, said = finished(client, 150)
    assert code == 0 and "waiting: pending" in said, said
    quiet, requeued = (
        load_file(there.folder / f"{each}-end.safetensors") for each in ("quiet", "requeued")
    )
    assert all(torch.equal(a, requeued[key]) for key, a in quiet.items())
    assert "SIGTERM: the training is saved" in said


@needs_hosts
def test_a_place_that_is_lost_is_taken_anew(there: Any) -> None:
    if there.name not in ("ray", "kubernetes"):
        pytest.skip("there nothing is begun again")
    script(there, RESUMED)
    kind = ["--kind", "jobset"] if there.name == "kubernetes" else []
    job = ["submit", *there.options(), *kind, "--workers", "2", "--follow"]
    code, said = finished(there.start(*job, "train.py", "quiet", "0"))
    assert code == 0, said
    (there.folder / "step-worker-0").unlink(missing_ok=True)
    client = there.start(*job, "--restarts", "1", "train.py", "lost", "0.15")
    wait_for(lambda: (there.folder / "step-worker-0").exists(), 60)
    time.sleep(1.5)
    there.lose("worker-1")
    code, said = finished(client, 180)
    assert code == 0, said
    assert there.name != "ray" or "waiting: to begin again" in said, said
    quiet, lost = (
        load_file(there.folder / f"{each}-end.safetensors") for each in ("quiet", "lost")
    )
    assert all(torch.equal(a, lost[key]) for key, a in quiet.items())


def test_a_node_that_is_lost(there: Any) -> None:
    """The raylet and all tasks of a node die at once; the tasks restart on the remaining nodes."""
    if there.name != "ray":
        pytest.skip("Ray's")
    script(there, RESUMED)
    job = ["submit", *there.options(), "--workers", "2", "--follow", "--restarts", "1", "train.py"]
    code, said = finished(there.start(*job, "whole", "0"))
    assert code == 0, said
    (there.folder / "step-worker-0").unlink(missing_ok=True)
    client = there.start(*job, "halved", "0.15")
    wait_for(lambda: (there.folder / "step-worker-0").exists(), 60)
    time.sleep(1.5)
    there.lose_node()
    try:
        code, said = finished(client, 180)
        assert code == 0, said
        assert "waiting: to begin again" in said, said
        whole, halved = (
            load_file(there.folder / f"{each}-end.safetensors") for each in ("whole", "halved")
        )
        assert all(torch.equal(a, halved[key]) for key, a in whole.items())
    finally:
        there.mend()


@needs_hosts
def test_a_job_that_was_cut_off_goes_on_when_it_is_submitted_again(there: Any) -> None:
    """On engines that do not requeue jobs: over ssh, on Vertex AI."""
    if there.name not in ("ssh", "vertex"):
        pytest.skip("there it is begun again without being asked")
    script(there, RESUMED)
    job = ["submit", *there.options(), "--workers", "2"]
    code, said = finished(there.start(*job, "--follow", "train.py", "quiet", "0"))
    assert code == 0, said
    (there.folder / "step-worker-0").unlink(missing_ok=True)
    handle, _ = submitted(there, "--workers", "2", "train.py", "cut", "3")
    wait_for(lambda: (there.folder / "step-worker-0").exists(), 60)
    if there.name == "ssh":
        _kill_supervisor(there)
    else:
        assert finished(there.start("cancel", handle))[0] == 0
    wait_for(lambda: nothing_left(there), 40)
    assert not (there.folder / "cut-end.safetensors").exists()
    before = (there.folder / "cut-steps-worker-0").stat().st_size
    code, said = finished(there.start(*job, "--follow", "train.py", "cut", "0"))
    assert code == 0, said
    assert 0 < before < 36 == (there.folder / "cut-steps-worker-0").stat().st_size
    quiet, cut = (load_file(there.folder / f"{each}-end.safetensors") for each in ("quiet", "cut"))
    assert all(torch.equal(a, cut[key]) for key, a in quiet.items())


@needs_hosts
def test_more_gpus_than_a_node_has(there: Any) -> None:
    script(there, "")
    if there.name == "kubernetes":
        pytest.skip("a cluster may grow; status says what a pod waits for (test_submit.py)")
    gpus = "3" if there.name in ("ray", "vertex") else "1"
    more = ["--accelerator=NVIDIA_TESLA_T4"] if there.name == "vertex" else []
    words = ["submit", *there.options(), *more, "--gpus-per-worker", gpus, "train.py"]
    code, said = finished(there.start(*words))
    remedy = {
        "slurm": "sbatch refused the job: sbatch: error: .*(gres|configuration)",
        "ssh": "node1 has 0 GPUs, and its workers need 1: fewer --gpus-per-worker, or more hosts",
        "ray": "no node of Ray at .* has 3 GPUs .the most is 2.: fewer --gpus-per-worker",
        "vertex": "has 1, 2, 4, 8 or 16 GPUs, not 3",
    }[there.name]
    assert code == 2 and re.search(remedy, said.splitlines()[-1]), said
    assert not (there.folder / "pid-worker-0").exists()


@needs_hosts
def test_each_worker_has_gpus_of_its_own(there: Any) -> None:
    if there.name != "ray":
        pytest.skip("Ray believes in GPUs that are not there; for ssh see test_what_is_sent.py")
    script(there, "print('mine:', os.environ['CUDA_VISIBLE_DEVICES'])\ntime.sleep(2)\n")
    more = ["--workers", "4", "--gpus-per-worker", "1", "--follow"]
    code, said = finished(there.start("submit", *there.options(), *more, "train.py"), 150)
    assert code == 0, said
    assert sorted(re.findall(r"mine: (.*)", said)) == ["0", "0", "1", "1"], said  # two nodes of two


@needs_hosts
def test_a_script_that_is_not_there(there: Any) -> None:
    """It is refused before anything starts; for an image, only the job itself can tell."""
    script(there, "")
    code, said = finished(there.start("submit", *there.options(), "--follow", "nothing.py"))
    if there.name in ("kubernetes", "vertex"):
        assert code == 2 and "worker 0 failed first: exit code 2" in said, said
        assert "can't open file" in said.splitlines()[-1]
        return
    assert code == 2 and "there is no script 'nothing.py' in" in said.splitlines()[-1], said
    assert ("on node1: copy it there, or say --folder" in said) == (there.name == "ssh")


@needs_hosts
def test_a_client_that_is_killed_while_it_submits(there: Any) -> None:
    if there.name != "kubernetes":
        pytest.skip("there it is one thing that is sent")
    script(there, "")
    there.server.held = {"secrets"}
    client = there.start("submit", *there.options(), "train.py")
    wait_for(lambda: not there.server.held, 30)
    client.kill()
    client.wait()
    listed = finished(there.start("jobs"))[1].splitlines()[-1]
    assert "waiting: suspended, as if whoever submitted it was killed" in listed
    handle = listed.split()[0]
    assert finished(there.start("cancel", handle))[0] == 0
    assert not [key for key in there.server.objects if key[1] == handle.partition(":")[2]]
    assert not (there.folder / "pid-worker-0").exists()


NOTEBOOK = """
import sys
import stratagem as sg

def train(name, fail):
    import torch
    from torch import nn
    torch.manual_seed(0)
    x, y = torch.randn(96, 8), torch.randint(0, 3, (96,))
    strategy = sg.MultiWorkerMirroredStrategy()
    if fail and not strategy.is_chief:
        raise ValueError("no data")
    with strategy.scope():
        model = sg.Model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
        model.compile("adam", "cross_entropy")
    model.fit(x, y, batch_size=32, epochs=3, verbose=0)
    model.save(name)
    print("saved")
    return {"replicas": strategy.num_replicas_in_sync}

cluster = sg.RayCluster(workers=2, address=sys.argv[1])
print(cluster.run(train, sys.argv[2], False))
try:
    cluster.run(train, sys.argv[2], True)
except sg.ReplicaFailed as error:
    print("failed:", error.who, str(error).splitlines()[0], str(error).splitlines()[-1])
for wrong in (lambda: object(), bytes(2_000_000).hex):
    try:
        cluster.run(wrong)
    except sg.StratagemError as error:
        print("refused:", str(error).splitlines()[-1])
"""


@needs_hosts
def test_a_function_of_a_notebook(there: Any) -> None:
    if there.name != "ray":
        pytest.skip("RayCluster is Ray's")
    script(there, TRAIN)
    code, said = finished(there.start("run", "--workers", "2", "train.py", "local"))
    assert code == 0, said
    code, said = finished(there.python(NOTEBOOK, there.address, str(there.folder / "far")), 200)
    assert code == 0, said
    assert "[{'replicas': 2}, {'replicas': 2}]" in said
    assert "[worker 0] saved" in said and "[worker 1] saved" in said
    assert "failed: worker 1 worker 1 failed first" in said and "ValueError: no data" in said
    assert "returned a object, and only numbers, text" in said
    assert "the function holds 2.0 MB" in said or "the function holds 4.0 MB" in said
    files = (there.folder / f"{name}.safetensors" for name in ("local", "far"))
    local, far = (load_file(file) for file in files)
    assert all(torch.allclose(a, far[name], atol=1e-7) for name, a in local.items())
    wait_for(lambda: not running("launch.ray_cluster"), 30)


@needs_hosts
def test_a_supervisor_that_is_killed_leaves_nobody(there: Any) -> None:
    if there.name != "ssh":
        pytest.skip("Slurm supervises itself")
    script(there, "time.sleep(200)\n")
    handle, _ = submitted(there, "--workers", "2", "train.py")
    begun(there, "worker-0", "worker-1")
    _kill_supervisor(there)
    wait_for(lambda: nothing_left(there), 30)
    code, said = finished(there.start("status", handle))
    assert code == 1 and "its supervisor was killed" in said, said


def _kill_supervisor(there: Any) -> None:
    (pid,) = (
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if f"stratagem.launch.engines.ssh {there.folder}" in " ".join(_words(entry))
    )
    os.kill(pid, signal.SIGKILL)


def _words(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@needs_hosts
@pytest.mark.parametrize("why", ["Forbidden", "AlreadyExists"])
@pytest.mark.parametrize("what", ["jobs", "services", "secrets"])
def test_a_job_that_is_refused_in_part_leaves_nothing(there: Any, what: str, why: str) -> None:
    """The cluster refuses one of the job's resources, with 403 or 409."""
    if there.name != "kubernetes":
        pytest.skip("there it is one thing that is sent")
    script(there, "")
    before, known = set(there.server.objects), set((there.folder / "jobs").glob("*"))
    refused = there.server.forbidden if why == "Forbidden" else there.server.taken
    refused.add(what)
    code, said = finished(there.start("submit", *there.options(), "train.py"))
    refused.clear()
    assert code == 2 and f"kubectl create failed: Error from server ({why})" in said, said
    assert set(there.server.objects) == before and all(
        pod.code is not None for pod in there.server.pods
    )
    assert set((there.folder / "jobs").glob("*")) == known


@needs_hosts
def test_answers_that_are_cut_off(there: Any) -> None:
    """A follower asks again, and gets every line once."""
    if there.name != "kubernetes":
        pytest.skip("its server can do so")
    script(there, "for i in range(40):\n    print('line', i, flush=True)\n    time.sleep(0.2)\n")
    handle, _ = submitted(there, "--workers", "2", "train.py")
    begun(there, "worker-0", "worker-1")
    follower = there.start("logs", handle, "--follow")
    lines = [follower.stdout.readline()]
    there.server.drop = 10**6  # kubectl itself asks a few times
    while "the job goes on, and is asked again" not in lines[-1]:
        lines.append(follower.stdout.readline())
        assert lines[-1], lines
    there.server.drop = 0
    code, said = finished(follower)
    assert code == 0, said
    lines += said.splitlines(keepends=True)
    for task in (0, 1):
        for i in range(40):
            assert lines.count(f"[worker {task}] line {i}\n") == 1, lines


@needs_hosts
def test_a_job_that_somebody_deletes(there: Any) -> None:
    if there.name != "kubernetes":
        pytest.skip("kubectl is Kubernetes'")
    script(there, "print('begun', flush=True)\ntime.sleep(200)\n")
    handle, _ = submitted(there, "--workers", "2", "train.py")
    begun(there, "worker-0", "worker-1")
    follower = there.start("logs", handle, "--follow")
    while "begun" not in follower.stdout.readline():
        pass
    with there.server._lock:
        there.server._delete("jobs", handle.partition(":")[2])
    code, said = finished(follower)
    assert code == 143 and "somebody has deleted it" in said, said
    assert not there.server.objects.keys() & {("secrets", handle.partition(":")[2])}


@needs_hosts
def test_who_is_cancelled_has_time_to_save_and_is_not_started_again(there: Any) -> None:
    script(
        there,
        "def save(*_):\n    time.sleep(5)\n    note(f'saved-{me}', 1)\n    os._exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nnote(f'armed-{me}', 1)\n"
        "while True: time.sleep(0.1)\n",
    )
    handle, _ = submitted(there, "--workers", "2", "train.py")
    wait_for(lambda: all((there.folder / f"armed-worker-{i}").exists() for i in (0, 1)), 60)
    code, said = finished(there.start("cancel", handle))
    assert code == 0 and f"{handle} is cancelled" in said, said
    wait_for(lambda: all((there.folder / f"saved-worker-{i}").exists() for i in (0, 1)), 20)
    assert "ended" in finished(there.start("status", handle))[1]
    if there.name == "slurm":
        assert not there.run("squeue", "-h").strip()
    wait_for(lambda: nothing_left(there), 10)


@needs_hosts
def test_a_job_that_slurm_takes_back_has_time_to_save(there: Any) -> None:
    if there.name != "slurm":
        pytest.skip("nothing is preempted there")
    script(
        there,
        "def save(*_):\n    time.sleep(5)\n    note(f'kept-{me}', 1)\n    os._exit(75)\n"
        "if not os.path.exists('kept-worker-0'):\n"
        "    if me != 'evaluator-0': signal.signal(signal.SIGTERM, save)\n"
        "    note(f'ready2-{me}', 1)\n    time.sleep(200)\nprint('again')\n",
    )
    handle, _ = submitted(there, "--workers", "2", "--evaluator", "train.py")
    wait_for(lambda: all((there.folder / f"ready2-worker-{i}").exists() for i in (0, 1)), 60)
    name = handle.partition(":")[2]
    there.run("scontrol", "requeue", name)
    wait_for(lambda: all((there.folder / f"kept-worker-{i}").exists() for i in (0, 1)), 20)
    wait_for(lambda: set(there.run("squeue", "-h", "-o", "%T").split()) == {"PENDING"}, 60)
    assert "waiting" in finished(there.start("status", handle))[1]
    for component in ("", "+1"):
        there.run("scontrol", "update", f"jobid={name}{component}", "starttime=now")
    code, said = finished(there.start("logs", handle, "--follow"), 150)
    assert code == 0 and said.count("] again") == 3, said
