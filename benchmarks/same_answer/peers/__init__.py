"""One file a peer. Each has:

TITLE           its name in the table
PACKAGES        whose versions are printed
command(n)      how n processes are started; the script and its arguments follow
run(job)        one case, in each of these processes; the result is that of the first
WAYS            cases that its documentation offers several ways for; the table shows the best
OMITTED         cases that it has no way for, and why
"""

from __future__ import annotations

import sys


def torchrun(replicas: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
