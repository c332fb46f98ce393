"""Jobs for Slurm: a batch script that a person can read, sent with sbatch.

No accounting is needed: tasks and the script write their ends into the job's folder. A job that is
preempted, or that Slurm asks to end before its time is over, saves, is requeued, and resumes its
training (docs/resume.md).
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from stratagem.errors import UsageError
from stratagem.launch.job_folder import JobFolder, JobRequest, JobState, last_line
from stratagem.launch.supervise import write_end
from stratagem.training.termination import EXIT_CODE

#: seconds before the time limit at which trainings are asked to save: Slurm may be half a minute
#: early; a quarter of a short job
_BEFORE_THE_END = 90
_REQUEUES = 100
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESV_DEL_HOLD")


class Slurm:
    """Runs jobs with sbatch, squeue and scancel of this machine."""

    def prepare(self, request: JobRequest) -> JobRequest:
        if any("\n" in text for text in (*request.words, request.folder)):
            raise UsageError("a batch script has no room for arguments with line breaks")
        return request

    def check(self, request: JobRequest) -> JobRequest:
        if shutil.which("sbatch") is None:
            raise UsageError(
                "there is no sbatch on this machine: submit from a login node of the cluster"
            )
        request.check_script()
        python = shutil.which(request.python)
        if python is None:
            raise UsageError(
                f"there is no {request.python!r} on this machine; --python says which to use"
            )
        return replace(request, python=python)

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """The batch script; tasks of different roles are components of a heterogeneous job."""
        parts = [count for count in request.roles().values() if count]
        options = [f"--job-name={request.name}"]
        if request.minutes is not None:
            before = min(_BEFORE_THE_END, 15 * request.minutes)
            options += [f"--time={request.minutes}", f"--signal=TERM@{before}"]
        options += ["--requeue", "--open-mode=append", _quoted("output", job.path / "batch.log")]
        options += [_quoted("chdir", request.folder), *request.settings.get("sbatch", ())]
        lines = ["#!/bin/bash"]
        for number, count in enumerate(parts):
            own = [f"--nodes={count}", "--ntasks-per-node=1"]
            if request.gpus and not number:
                own.append(f"--gpus-per-node={request.gpus}")
            lines += ["#SBATCH hetjob"] if number else []
            lines += [f"#SBATCH {each}" for each in (options + own if not number else own)]
        python = shlex.quote(request.python)
        groups = [f"--het-group=0-{len(parts) - 1}"] if len(parts) > 1 else []
        step = ["srun", "--kill-on-bad-exit=1", "--wait=0", *groups]
        return "\n".join(
            [
                *lines,
                f"# {' '.join(shlex.quote(word) for word in ('python', *request.words))}",
                f"job={shlex.quote(str(job.path))}",
                f'{python} -m stratagem.launch.engines.slurm begin "$job" || exit',
                f'{" ".join(step)} {python} -m stratagem.launch.far_task slurm "$job" &',
                "step=$!",
                "trap : TERM  # Slurm tells the tasks, and srun would kill them at once",
                "wait $step; code=$?",
                "while kill -0 $step 2> /dev/null; do wait $step; code=$?; done",
                f'{python} -m stratagem.launch.engines.slurm end "$job" $code',
                "",
            ]
        )

    def send(self, request: JobRequest, job: JobFolder) -> str:
        script = job.path / "script"
        script.write_text(self.describe(request, job))
        job.sent("slurm", "", request)  # tasks may begin before sbatch has answered
        done = _call(["sbatch", "--parsable", str(script)])
        if done.returncode:
            said = last_line(done.stderr)
            if "configuration source" in said or "contact slurm controller" in said:
                said += " (submit where `sinfo` works: on a login node of the cluster)"
            raise UsageError(f"sbatch refused the job: {said}")
        name = done.stdout.strip().partition(";")[0]
        job.sent("slurm", name, request)
        return name

    def state(self, job: JobFolder) -> JobState:
        name = str(job.record["name"]) or self._found(job)
        if not name:
            return JobState("ended", text="whoever submitted it was killed before it was sent")
        done = _call(["squeue", "--noheader", f"--jobs={name}", "--format=%T %r"])
        found = done.stdout.split("\n")[0].split()
        known = found and found[0] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        if done.returncode and "Invalid job id" not in done.stderr:
            raise UsageError(f"squeue cannot tell: {last_line(done.stderr)}")
        if known and found[0] in _WAITING:
            return JobState("waiting", text=" ".join(found).lower())
        if known:  # the files may be of an earlier run of the job
            return JobState("running")
        os.scandir(job.path).close()  # a shared folder may not have shown the newest file yet
        end = job.end()
        if end is not None:
            return end
        return JobState("ended", text=f"it left no word: {job.path / 'batch.log'} may say why")

    def _found(self, job: JobFolder) -> str:
        """Find the number of a job whose sender was killed before writing it: Slurm knows the
        script."""
        listed = _call(["squeue", "--noheader", "--me", "--format=%i %o"])
        if listed.returncode:
            raise UsageError(f"squeue cannot tell: {last_line(listed.stderr)}")
        pairs = (line.partition(" ") for line in listed.stdout.splitlines())
        name = next((i for i, _, script in pairs if script == str(job.path / "script")), "")
        if name:
            job.sent("slurm", name.partition("+")[0], job.request)
        return str(job.record["name"])  # the job may have written it by now

    def cancel(self, job: JobFolder) -> None:
        job.write("cancelled.json", {})  # so that a job that saves is not requeued
        done = _call(["scancel", str(job.record["name"])])
        if done.returncode and "Invalid job id" not in done.stderr:
            raise UsageError(f"scancel refused: {last_line(done.stderr)}")


ENGINE = Slurm()


def _quoted(option: str, value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{text}"'


def _call(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UsageError(f"there is no {words[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{words[0]} has not answered in 60 s: is the controller up?") from None


def begin(job: JobFolder) -> int:
    """Called by the batch script at each start: make a new secret for this run."""
    job.sent("slurm", os.environ["SLURM_JOB_ID"], job.request)  # sbatch may have been killed
    job.begin_again()
    file = job.path / "secret"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(32))
    return 0


def finish(job: JobFolder, code: int) -> int:
    """Called by the batch script at its end: write who failed first; requeue a job that saved."""
    (job.path / "secret").unlink(missing_ok=True)
    code = write_end(job, code)
    number, again = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", 0))
    wanted = code == EXIT_CODE and job.read("cancelled.json") is None and again < _REQUEUES
    if wanted and _call(["scontrol", "requeue", number]).returncode == 0:
        (job.path / "end.json").unlink()
    return code


if __name__ == "__main__":
    _, what, folder, *rest = sys.argv
    here = JobFolder(Path(folder))
    sys.exit(begin(here) if what == "begin" else finish(here, int(rest[0])))
