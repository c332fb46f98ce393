"""Workers of a DataLoader outlast a SIGTERM for all processes of a job, and no longer."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stratagem.data.loader import ShareLoader
from stratagem.wire.collective import Alone


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(40))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data", [range(40), Stream()])
def test_workers_outlast_a_signal_for_all(data: Any) -> None:
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1)
    batches = iter(ShareLoader(loader, Alone(), lambda *_: None))
    rows = next(batches).tolist()
    (worker,) = multiprocessing.active_children()
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    rows += [row for batch in batches for row in batch.tolist()]
    assert rows == list(range(40))
    assert loader.worker_init_fn is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_end_by_their_parent(context: str) -> None:
    """Also where a server forks them; else a program would wait for them when it ends. There a
    thread of numpy's may take the signal, which ends them by it."""
    loader = DataLoader(range(40), 2, num_workers=1, multiprocessing_context=context)
    batches = iter(ShareLoader(loader, Alone(), lambda *_: None))
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(10)
    left = worker.is_alive()
    worker.kill()
    assert not left
    assert worker.exitcode == 0 or context == "forkserver"


class Programs(Dataset[int]):
    """Rows that start a program, and end it by SIGTERM."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> int:
        with subprocess.Popen(["sleep", "60"]) as program:
            program.terminate()
            try:
                return program.wait(5)
            finally:
                program.kill()


@pytest.mark.timeout(60)
def test_programs_that_a_worker_starts_end_by_a_signal() -> None:
    loader = DataLoader(Programs(), 2, num_workers=1)
    (batch,) = ShareLoader(loader, Alone(), lambda *_: None)
    assert batch.tolist() == [-signal.SIGTERM] * 2
