"""One worker more than there are processors, for tests that watch no clock.

Tests that wait for processes leave the processors idle for much of their time. With `--spare` the
last of pytest's workers gives way to all others (nice) and takes only files whose tests compute,
alone or on replicas, and promise no time; the others take such files when they have nothing else.
"""

from __future__ import annotations

import re

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

#: enough to give way, and not to stand still beside them
NICE = 5
#: how many times as long a test may take that gives way
SLOWER = 4.0

_COMPUTES = re.compile(
    r"tests/("
    r"codecs|compat|rules/test_(?!cost)"
    r"|state/test_(?!file_pair|checkpoint_folder)"
    r"|plan/test_(?!causes|cost|gpu|hardware|machine|notebook|profile|script|staged)"
    r"|plan/simulation/test_(?!elastic_ring|replica_training|servers|speedups)"
    r"|frontends/test_(accuracy|callback_extras|callbacks_and_state|change_tracker|data_order)"
    r"|frontends/test_(ensemble|inputs|loss|metric_states|outputs|scaler|sources|spectral_norm)"
    r"|frontends/keras/test_(fused|image_layout|same_answer|served_optimizers|shards)"
    r"|strategies/test_(fully_sharded|same_answer|sharded)\.py"
    r"|training/test_(gradient_placement|loss_terms|running_statistics|sync_batchnorm)"
    r"|test_(types|house|docs)\.py"
    r")"
)


class WithSpare(LoadFileScheduling):
    """Files in their order: the last worker has those without a clock, the others these last."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next(node)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self._next(node) is None and not node.shutting_down:
            node.shutdown()
        else:
            super()._reschedule(node)

    def _next(self, node: WorkerController) -> str | None:
        spare = node.gateway.id == f"gw{self.numnodes - 1}"
        fitting = [scope for scope in self.workqueue if bool(_COMPUTES.match(scope)) == spare]
        return next(iter(fitting or ([] if spare else self.workqueue)), None)


def is_spare(config: pytest.Config) -> bool:
    """Whether this is the process of the last worker."""
    told = getattr(config, "workerinput", None)
    if told is None or not config.getoption("spare", False):
        return False
    return bool(told["workerid"] == f"gw{told['workercount'] - 1}")
