"""Who failed first in a submitted job, and what it said: the job's last word."""

from __future__ import annotations

import signal

from stratagem.launch.job_folder import JobFolder, TaskEnd
from stratagem.launch.supervise import culprit, ending
from stratagem.training.termination import EXIT_CODE

TOLD_TO_END = 128 + signal.SIGTERM
_UNKNOWN = "no task has said why"


def write_end(job: JobFolder, code: int) -> int:
    """Write down how the job ended, by what its tasks have written; its exit code.

    `code` is what their starter says, which a task that ended itself knows better.
    """
    ends = job.ends()
    first = culprit([end for end in ends if end.code and not end.stopped])
    if first is None:
        told = [end.code for end in ends if end.stopped]
        if EXIT_CODE in told:
            code = EXIT_CODE
        elif told:
            code = max(told) or TOLD_TO_END
        text = {EXIT_CODE: "saved", 0: ""}.get(code, "told to end" if told else _UNKNOWN)
        job.ended(code, text)
        return code
    job.ended(first.code, verdict(first))
    return first.code


def verdict(first: TaskEnd) -> str:
    """Who failed, how, and its last lines."""
    killed = first.code - 128 in signal.valid_signals()
    how = ending(128 - first.code if killed else first.code)
    what = f"{first.task} failed first: {how}"
    if not first.tail:
        return f"{what}; it wrote nothing to stderr."
    return "\n".join([f"{what}; its last lines:", *(f"    {line}" for line in first.tail)])
