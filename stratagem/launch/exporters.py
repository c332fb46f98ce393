"""The figures of a run for other programs: a page for Prometheus, files for TensorBoard."""

from __future__ import annotations

import http.server
import threading
from typing import Any, Self

from stratagem.errors import UsageError
from stratagem.figures.run_folder import Line, RunFolder

#: of a line, and what each is called and means for Prometheus
_GAUGES = {
    "step": ("step", "the newest step"),
    "rate": ("examples_per_second", "examples of this task a second"),
    "compute": ("compute_seconds", "seconds a step that it computes"),
    "load": ("load_seconds", "seconds a step that it loads data"),
    "wait": ("wait_seconds", "seconds a step that it waits for others"),
    "link": ("link_seconds", "seconds a step that its link takes"),
    "bytes": ("bytes_per_second", "bytes a second that it hands over to be sent or added up"),
    "staleness": ("staleness", "updates that a pushed gradient is behind"),
    "updates": ("updates_per_second", "updates that a server makes"),
    "loss": ("loss", "of a batch, where a custom loop asks for it by strategy.mean"),
    "generation": ("generation", "how often the membership has changed"),
}


class PrometheusPage:
    """Serves the newest figures, for as long as it is open."""

    def __init__(self, where: str, run: RunFolder) -> None:
        host, _, port = where.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"--prometheus {where}: it takes a port, or host:port")
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = page.text().encode()
                self.send_response(200 if self.path in ("/", "/metrics") else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the terminal shows a table."""

        self._run = run
        try:
            address = (host.strip("[]") or "127.0.0.1", int(port))
            self._server = http.server.ThreadingHTTPServer(address, Handler)
        except OSError as problem:
            raise UsageError(f"--prometheus {where}: {problem.strerror or problem}") from None

    @property
    def port(self) -> int:
        """The one that it listens at: of port 0, the system has chosen one."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, task: str, line: Line) -> None:
        """Nothing: the page shows what the run holds when it is asked for."""

    def text(self) -> str:
        """The page, in Prometheus' text format."""
        tasks = list(self._run.tasks.values())
        found = []
        for name, (called, meaning) in _GAUGES.items():
            rows = [
                f"stratagem_{called}{{{_labels(task.name, task.host)}}} {value}"
                for task in tasks
                if (value := task.last.get(name)) is not None
            ]
            if rows:
                found += [f"# HELP stratagem_{called} {meaning}"]
                found += [f"# TYPE stratagem_{called} gauge", *rows]
        found += ["# HELP stratagem_up whether the task lives", "# TYPE stratagem_up gauge"]
        alive = ("runs", "silent")
        for task in tasks:
            up = int(self._run.state(task) in alive)
            found.append(f"stratagem_up{{{_labels(task.name, task.host)}}} {up}")
        found += ["# HELP stratagem_restarts_total how often the task was started again"]
        found += ["# TYPE stratagem_restarts_total counter"]
        for task in tasks:
            labels = _labels(task.name, task.host)
            found.append(f"stratagem_restarts_total{{{labels}}} {task.restarts}")
        return "\n".join(found) + "\n"


def _labels(task: str, host: str) -> str:
    named = {"task": task, "host": host}
    quoted = {k: v.replace("\\", r"\\").replace('"', r"\"") for k, v in named.items()}
    return ",".join(f'{name}="{value}"' for name, value in quoted.items())


class TensorBoardWriter:
    """A folder for TensorBoard, with one run a task; the axis is the step."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed; pip install 'stratagem[tensorboard]'."
            ) from None
        self._folder, self._make = folder, SummaryWriter
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def take(self, task: str, line: Line) -> None:
        """Write one line's figures."""
        if not line.get("steps"):
            return
        if task not in self._writers:
            self._writers[task] = self._make(f"{self._folder}/{task.replace(' ', '-')}")
        for name, (called, _) in _GAUGES.items():
            if name != "step" and line.get(name) is not None:
                self._writers[task].add_scalar(
                    f"figures/{called}", line[name], line["step"], walltime=line["time"]
                )
