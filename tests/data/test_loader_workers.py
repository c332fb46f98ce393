"""Workers of a DataLoader outlast a SIGTERM for all processes of a job, and no longer."""

from __future__ import annotations

import multiprocessing
import subprocess
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.loader import ShareLoader
from stratagem.wire.collective import Alone


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(40))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data", [range(40), Stream()])
def test_workers_outlast_a_signal_for_all_and_end_by_their_parent(data: Any) -> None:
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1)
    batches = iter(ShareLoader(loader, Alone(), lambda *_: None))
    rows = next(batches).tolist()
    (worker,) = multiprocessing.active_children()
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    rows += [row for batch in batches for row in batch.tolist()]
    assert rows == list(range(40))
    assert loader.worker_init_fn is None

    batches = iter(ShareLoader(loader, Alone(), lambda *_: None))
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
