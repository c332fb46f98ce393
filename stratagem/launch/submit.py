"""Send a job to an engine: the same script, on machines that Slurm gives out or ssh reaches.

It shows the plan first. Settings that a project always uses stand in stratagem.toml, in the folder
or one above it; flags beat them:

    [submit]
    on = "slurm"
    workers = 4
    sbatch = ["--partition=gpu", "--account=vision"]

examples:
  stratagem submit --on slurm --workers 4 --gpus-per-worker 1 --time 2h train.py --epochs 10
  stratagem submit --on slurm --workers 4 --dry-run train.py      print the batch script
  stratagem submit --on ssh --hosts node1,node2 --workers 2 --follow train.py
  stratagem submit --on kubernetes --image registry/digits:1 --workers 2 train.py
  stratagem submit --on vertex --project me --region us-central1 --image IMAGE train.py
  stratagem submit --on ssh --hosts me@node1=10.0.0.1,node2=10.0.0.2 --workers 2 train.py
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.launch.cli import declare, declare_script, script_words, whole
from stratagem.launch.engines.engine import ENGINES, engine
from stratagem.launch.job_commands import follow
from stratagem.launch.job_folder import JobFolder, JobRequest

FILE = "stratagem.toml"
_UNITS = {"m": 1, "h": 60, "d": 24 * 60}
_TIME = re.compile(r"(\d+)([mhd])")
#: options, also for the settings file: their types there, METAVAR and help
_OPTIONS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "on": (str, "ENGINE", f"where to: {', '.join(ENGINES)}"),
    "workers": (int, "W", "W workers (1)"),
    "ps": (int, "P", "P parameter servers besides (0)"),
    "evaluator": (bool, "", "an evaluator besides"),
    "gpus_per_worker": (int, "G", "G GPUs for each worker (0)"),
    "time": (str, "T", "how long it may take: 30m, 2h, 1d (slurm)"),
    "name": (str, "N", "the job's name (that of the script)"),
    "python": (str, "PATH", "the interpreter there (this one)"),
    "folder": (str, "DIR", "where the tasks run (this folder)"),
    "env": (list, "NAME", "a variable that tasks get as it is here"),
    "hosts": ((list, str), "LIST", "hosts, with commas between, or a file of them (ssh)"),
    "ssh": (str, "COMMAND", "the ssh to use, with options: 'ssh -p 2222' (ssh)"),
    "sbatch": ((list, str), "OPTIONS", "more options for sbatch: '--partition=gpu' (slurm)"),
    "image": (str, "IMAGE", "what tasks run, with script and package (kubernetes, vertex)"),
    "namespace": (str, "NAME", "where they run (kubernetes)"),
    "context": (str, "NAME", "on which cluster of kubectl's (kubernetes)"),
    "ray_address": (str, "URL", "of the cluster: http://head:8265 (ray)"),
    "kind": (str, "KIND", "job, jobset or trainjob (kubernetes)"),
    "volume": (str, "CLAIM=/PATH", "a claim that all pods mount (kubernetes)"),
    "restarts": (int, "N", "begin again when a node is lost (ray, kubernetes)"),
    "project": (str, "ID", "who pays (vertex)"),
    "region": (str, "NAME", "where: us-central1 (vertex)"),
    "machine_type": (str, "TYPE", "of each task: n1-standard-4 (vertex)"),
    "accelerator": (str, "TYPE", "of workers: NVIDIA_TESLA_T4 (vertex)"),
    "bucket": (str, "URL", "where tasks meet: gs://my-bucket/jobs (vertex)"),
    "vertex_endpoint": (str, "HOST", "another than the region's (vertex)"),
}

_ENGINES_OWN = (
    *("image", "namespace", "context", "kind", "volume", "ray_address", "restarts"),
    *("project", "region", "machine_type", "accelerator", "bucket", "vertex_endpoint"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem submit`."""
    parser.usage = (
        "%(prog)s --on ENGINE [options] train.py [args...]\n"
        "       %(prog)s --on ENGINE [options] -m module [args...]"
    )
    for name, (kind, metavar, text) in _OPTIONS.items():
        plain: Any = {bool: bool, int: whole(int(name == "workers")), list: list}
        flag = f"--{name.replace('_', '-')} {metavar}".rstrip()
        declare(parser, (flag, text, plain.get(kind, str), None))
    declare(
        parser,
        (
            "--dry-run",
            "print what would be sent, to the byte but for the secret and values of --env; send "
            "nothing",
        ),
        ("--follow", "show what tasks print, to the end; exit as the job"),
    )
    declare_script(parser)


def main(args: argparse.Namespace) -> int:
    """Send the job; return 0, or with --follow the job's exit code."""
    settings = {**settings_of(Path.cwd()), **_given(args)}
    name = settings.get("on")
    if name is None:
        raise UsageError(f"where to? As in: --on {' or --on '.join(ENGINES)}")
    chosen = engine(name)
    request = chosen.prepare(make_request(script_words(args, "submit --on slurm"), settings))
    try:
        request = chosen.check(request)
    except UsageError as problem:
        if not args.dry_run:
            raise
        print(f"Not checked from here: {problem}", file=sys.stderr)
    job = JobFolder.create(request.name)
    try:
        if args.dry_run:
            print(chosen.describe(request, job), end="")
            return 0
        _show_plan(name, request)
        chosen.send(request, job)
    except UsageError:  # the engine refused; after another error the job may be running
        shutil.rmtree(job.path)
        raise
    finally:
        if args.dry_run:
            shutil.rmtree(job.path)
    handle = job.handle
    print(f"{handle} is submitted. Next:", flush=True)
    for command in (f"logs {handle} --follow", f"status {handle}", f"cancel {handle}"):
        print(f"  stratagem {command}", flush=True)
    return follow(job) if args.follow else 0


def _show_plan(name: str, request: JobRequest) -> None:
    roles = [f"{count} {role}" for role, count in request.roles().items() if count]
    print(f"{request.name} on {name}: {', '.join(roles)}")
    for task, host in zip(request.tasks(), request.settings.get("places", ()), strict=False):
        print(f"  {task} on {host}")
    gpus = f", {request.gpus} GPUs a worker" if request.gpus else ""
    words = shlex.join(("python", *request.words))
    where = request.folder or request.settings.get("image", "")
    print(f"  {words} in {where}{gpus}", flush=True)


def settings_of(folder: Path) -> dict[str, Any]:
    """Read the settings of the project from stratagem.toml, if there is one."""
    file = next((at / FILE for at in (folder, *folder.parents) if (at / FILE).is_file()), None)
    if file is None:
        return {}
    try:
        found: Any = tomllib.loads(file.read_text()).get("submit", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UsageError(f"{file} cannot be read: {problem}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file}: [submit] is a table")
    for key, value in found.items():
        if key not in _OPTIONS:
            raise UsageError(f"{file}: there is no setting {key!r} ({', '.join(_OPTIONS)})")
        kind = _OPTIONS[key][0]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise UsageError(f"{file}: {key} = {value!r} is of the wrong kind")
    return found


def _given(args: argparse.Namespace) -> dict[str, Any]:
    found = {key: getattr(args, key) for key in _OPTIONS}
    return {key: value for key, value in found.items() if value is not None}


def make_request(words: tuple[str, ...], settings: dict[str, Any]) -> JobRequest:
    """The job that runs a script, or -m and a module, with these options."""
    if settings.get("restarts") and settings["on"] not in ("ray", "kubernetes"):
        raise UsageError(
            "--restarts is for ray and kubernetes: Slurm puts jobs back into the queue by itself, "
            "and elsewhere a script goes on with resume=True when it is submitted again"
        )
    script = words[1] if words[0] == "-m" else Path(words[0]).stem
    # an image has its own folder and interpreter
    inside = settings["on"] in ("kubernetes", "vertex")
    folder = settings.get("folder") or ("" if inside else os.getcwd())
    return JobRequest(
        name=settings.get("name") or as_name(script),
        words=words,
        folder=folder,
        python=settings.get("python") or ("python" if inside else sys.executable),
        workers=settings.get("workers", 1),
        ps=settings.get("ps", 0),
        evaluator=settings.get("evaluator", False),
        gpus=settings.get("gpus_per_worker", 0),
        minutes=_minutes(settings["time"]) if "time" in settings else None,
        environ=_variables(settings.get("env", ())),
        settings={
            "hosts": _hosts(settings.get("hosts", ())),
            "ssh": settings.get("ssh", "ssh"),
            "far_python": settings.get("python", ""),
            "sbatch": _list(settings.get("sbatch", ())),
            **{key: settings[key] for key in _ENGINES_OWN if key in settings},
        },
    )


def as_name(script: str) -> str:
    """A job's name, after its script."""
    return re.sub(r"[^a-z0-9]+", "-", script.lower()).strip("-")[:52].strip("-") or "job"


def _minutes(text: str) -> int:
    match = _TIME.fullmatch(text)
    if not match or not int(match[1]):
        raise UsageError(f"--time {text!r} is no time: write 30m, 2h or 1d")
    return int(match[1]) * _UNITS[match[2]]


def _variables(names: Any) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UsageError(f"--env {missing[0]}: it is not set here")
    return {name: os.environ[name] for name in names}


def _hosts(given: Any) -> list[str]:
    """Read hosts from a list, a text with commas, or a file with one host a line."""
    if isinstance(given, str) and Path(given).is_file():
        given = [line.partition("#")[0].strip() for line in Path(given).read_text().splitlines()]
    listed = given.split(",") if isinstance(given, str) else given
    hosts = [str(host).strip() for host in listed if str(host).strip()]
    for host in hosts:
        if host.startswith("-") or any(c.isspace() for c in host):
            raise UsageError(f"{host!r} is no host")
    twice = next((host for host in hosts if hosts.count(host) > 1), None)
    if twice:
        raise UsageError(f"{twice} is named twice among the hosts")
    return hosts


def _list(given: Any) -> list[str]:
    return shlex.split(given) if isinstance(given, str) else [str(each) for each in given]
