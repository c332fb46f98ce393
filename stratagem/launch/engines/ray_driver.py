"""The driver of a job on Ray: reserves a place for each task, copies output, ends all on a failure.

    engines/ray.py      stratagem submit, on the user's machine
      Ray job             starts main() here on the cluster
        RayDriver           polls each place every 0.2 s
          TaskPlace           a Ray actor on the node of a task
            far_task ssh        a process; reads the task, ALIVE and SIGTERM from stdin
              the script          or a function; RayCluster runs RayDriver in the notebook

poll() reports a failure to the driver, which waits _GRACE, stops the other places, then kills them.
An actor ends with the driver, and closes the stdin of its process, which then ends. The driver
reports by lines on stdout: a time, a task or a word ("place", "end", "again"), a text.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from stratagem.cluster.spec import Task
from stratagem.launch.far_task import ALIVE, BECAUSE, GRACE
from stratagem.launch.job_folder import JobRequest, TaskEnd, now, stem_of
from stratagem.launch.supervise import culprit
from stratagem.training.termination import EXIT_CODE

_PLACES = 600.0  # seconds for the cluster to have room
_GRACE = 3.0  # from the first failure to SIGTERM, and from there to the end of all places
_TICK = 0.2
_SETTLED = GRACE + 5  # until all processes of a run whose places were lost have ended
_LOST = 255
#: when an actor ends, Ray kills its children and its process group, but not a grandchild in another
#: session: the task has time to save
_SHIELD = ("sh", "-c", '"$@"; exit $?', "sh")


class TaskPlace:
    """A Ray actor that runs one task as a process and keeps its output until it is polled."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, str]] = deque()
        self._tail: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def address(self, host: str) -> tuple[str, str]:
        """Return the machine's name, and the address of a free port there."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return socket.gethostname(), f"{host}:{sock.getsockname()[1]}"

    def start(self, task: str, call: bytes) -> None:
        """Start the process; `task` is JSON, `call` a pickled function, if any."""
        if call:
            self._folder = Path(mkdtemp(prefix="stratagem-call-"))
            (self._folder / "call").write_bytes(call)
            found = json.loads(task)
            task = json.dumps({**found, "words": [*found["words"], str(self._folder)]})
        words = [*_SHIELD, sys.executable, "-m", "stratagem.launch.far_task", "ssh"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            words,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._say(task)
        readers = [
            threading.Thread(target=self._read, args=(stream, keep), daemon=True)
            for stream, keep in ((self._process.stdout, False), (self._process.stderr, True))
        ]
        for reader in readers:
            reader.start()
        self._readers = readers

    def _read(self, stream: Any, keep: bool) -> None:
        for line in stream:
            self._lines.append((now(), line.rstrip("\n")))
            if keep:
                self._tail = [*self._tail[-9:], line.rstrip("\n")]

    def poll(self) -> tuple[list[tuple[str, str]], int | None, list[str]]:
        """Return the lines since the last poll, the exit code, and the last lines of stderr."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(5)
        self._say(ALIVE)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return lines, code, self._tail

    def result(self) -> str:
        """Return the function's result, as JSON."""
        text = (self._folder / "result").read_text()
        shutil.rmtree(self._folder)
        return text

    def stop(self) -> None:
        self._say("SIGTERM")

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


def _tell(what: str, text: str, when: str | None = None) -> None:
    print(f"{when or now()} {what} {text}", flush=True)


Tell = Callable[[str, str, str | None], None]


class RayDriver:
    """Starts the tasks of a job in places of a Ray cluster and waits for all of them."""

    def __init__(
        self, ray: Any, request: JobRequest, call: bytes = b"", tell: Tell = _tell
    ) -> None:
        """`call`: a pickled function to run instead of a script; `tell` reports an event."""
        self._ray, self._request = ray, request
        self._call, self._tell = call, tell
        self.ends: list[TaskEnd] = []
        self._places: dict[Task, Any] = {}
        self._group: Any = None

    def run(self) -> int:
        """Run the job, again if places were lost and restarts are left; return its exit code."""
        left = int(self._request.settings.get("restarts", 0))
        while True:
            code = self._run()
            if code not in (_LOST, EXIT_CODE) or not left:
                return code
            left -= 1
            self.close()
            self._tell("again", str(left), None)
            time.sleep(_SETTLED)
            self.ends, self._places, self._group = [], {}, None

    def _run(self) -> int:
        self._take_places()
        left, failed = list(self._places), 0.0
        while left:
            time.sleep(_TICK)
            for task in list(left):
                if self._look(task):
                    left.remove(task)
            if not failed and any(end.code for end in self.ends):
                failed = time.monotonic()
            if failed and time.monotonic() - failed > _GRACE and left:
                self._end(left)
                break
        first = culprit([end for end in self.ends if end.code])
        return first.code if first is not None else 0

    def _take_places(self) -> None:
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        request, ray = self._request, self._ray
        tasks = request.tasks()
        gpus = {task: request.gpus if task.type == "worker" else 0 for task in tasks}
        bundles = [{"CPU": 1, **({"GPU": gpus[t]} if gpus[t] else {})} for t in tasks]
        group = self._group = placement_group(bundles, strategy="SPREAD")
        if not group.wait(_PLACES):
            why = f"the cluster has had no room for {bundles} in {_PLACES:g} s"
            self._note(TaskEnd(tasks[0], 1, "", now(), (why,)))
            return
        for i, task in enumerate(tasks):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            self._places[task] = (
                ray.remote(TaskPlace)
                .options(num_cpus=1, num_gpus=gpus[task], scheduling_strategy=where)
                .remote()
            )
        ask = ray.remote(num_cpus=0)(ray.util.get_node_ip_address)
        addresses = []
        for i, (task, place) in enumerate(self._places.items()):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            ip = ray.get(ask.options(scheduling_strategy=where).remote())
            host, address = ray.get(place.address.remote(ip))
            addresses.append(address)
            self._tell("place", json.dumps([[task.type, task.index], host]), None)
        self._start(addresses)

    def _start(self, addresses: list[str]) -> None:
        request, secret = self._request, secrets.token_hex(32)
        for task, place in self._places.items():
            sent = {
                "task": [task.type, task.index],
                "cluster": request.by_role(addresses),
                "folder": ".",
                "words": request.words,
                "environ": {name: os.environ[name] for name in request.settings["env"]},
                "gpus": None,
                "secret": secret,
            }
            self._ray.get(place.start.remote(json.dumps(sent), self._call))

    def results(self) -> list[str]:
        """Return the function's results, one for each task."""
        return [self._ray.get(place.result.remote()) for place in self._places.values()]

    def close(self) -> None:
        """End the tasks that still run, and give the places back."""
        ended = {end.task for end in self.ends}
        self._end([task for task in self._places if task not in ended])
        for place in self._places.values():
            self._ray.kill(place)
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)

    def _look(self, task: Task) -> bool:
        """Report what a task has printed; return whether it has ended."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            lines, code, tail = self._ray.get(self._places[task].poll.remote())
        except (RayActorError, RayTaskError) as problem:
            lines, code, tail = [], _LOST, [f"its place was lost: {str(problem).splitlines()[0]}"]
        for when, line in lines:
            if not line.startswith(BECAUSE):
                self._tell(stem_of(task), line, when)
        if code is None:
            return False
        because = next((x.removeprefix(BECAUSE) for x in tail if x.startswith(BECAUSE)), "")
        tail = [line for line in tail if not line.startswith(BECAUSE)]
        self._note(TaskEnd(task, code if code >= 0 else 128 - code, because, now(), tuple(tail)))
        return True

    def _note(self, end: TaskEnd) -> None:
        self.ends.append(end)
        facts = {"task": [end.task.type, end.task.index], "code": end.code, "tail": end.tail}
        self._tell("end", json.dumps({**facts, "because_of": end.because_of}), end.when)

    def _end(self, left: list[Task]) -> None:
        """Ask the tasks to end, ask again, which kills them, then kill their actors."""
        for grace in (_GRACE, 1.0):  # a second SIGTERM does not wait for the task to save
            for task in left:
                self._places[task].stop.remote()
            until = time.monotonic() + grace
            while left and time.monotonic() < until:
                time.sleep(_TICK)
                left = [task for task in left if not self._look(task)]
        for task in left:
            self._ray.kill(self._places[task])
            self._note(TaskEnd(task, 137, "", now(), ()))


def main() -> int:
    import ray

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray.init(log_to_driver=False)
    code = RayDriver(ray, JobRequest.from_json(json.loads(os.environ["STRATAGEM_JOB"]))).run()
    _tell("end", str(code))
    return code


if __name__ == "__main__":
    sys.exit(main())
