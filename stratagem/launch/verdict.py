"""Who failed first in a submitted job, and what it said: the job's last word."""

from __future__ import annotations

from stratagem.launch.job_folder import JobFolder, TaskEnd
from stratagem.launch.supervise import culprit, ending


def write_end(job: JobFolder, code: int) -> int:
    """Write down how the job ended, by what its tasks have written; its exit code.

    `code` is what their starter says, which a task that ended itself knows better.
    """
    failed = [end for end in job.ends() if end.code]
    first = culprit(failed)
    if first is None:
        text = "" if not code else f"the tasks were started with exit code {code}"
        job.ended(code, text)
        return code
    job.ended(first.code, verdict(first))
    return first.code


def verdict(first: TaskEnd) -> str:
    """Who failed, how, and its last lines."""
    how = ending(first.code if first.code < 128 else 128 - first.code)
    what = f"{first.task} failed first: {how}"
    if not first.tail:
        return f"{what}; it wrote nothing to stderr."
    return "\n".join([f"{what}; its last lines:", *(f"    {line}" for line in first.tail)])
