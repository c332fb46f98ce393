"""Segments, slices and sums in one process; test_collectives.py has several processes."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import ReplicaLost, UsageError
from stratagem.wire.segment import Segment, host_identity
from stratagem.wire.shared_memory import SharedMemoryCollective, SharedTable, slices, sum_rows
from tests.replicas.scripts import nursery


@given(st.integers(0, 5000), st.integers(1, 40))
def test_slices_cover_everything_once(count: int, parts: int) -> None:
    cut = slices(count, parts)
    assert len(cut) == parts
    assert [i for a, b in cut for i in range(a, b)] == list(range(count))


@given(
    st.integers(1, 6),
    st.integers(1, 50),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_weighted_sums(rows: int, count: int, dtype: torch.dtype, draw: st.DataObject) -> None:
    choice = st.sampled_from([0.0, 0.25, 1.0, 2.5])
    weights = draw.draw(st.lists(choice, min_size=rows, max_size=rows))
    table = SharedTable(Segment(SharedTable.size(rows, count, dtype)), rows, count, dtype)
    for row, weight in zip(table.rows, weights, strict=True):
        row.copy_(torch.randn(count))
        if weight == 0.0:
            row.fill_(float("nan"))
    start = draw.draw(st.integers(0, count - 1))
    total = torch.empty(count - start)
    sum_rows(table, start, weights, total)
    wide = [row[start:].double() * w for row, w in zip(table.rows, weights, strict=True) if w]
    expected = sum(wide, torch.zeros(count - start).double())
    assert torch.allclose(total.double(), expected, atol=1e-5)
    assert torch.equal(table.grid[0], table.rows[0]) or weights[0] == 0.0


def test_another_process_maps_the_same_memory(tmp_path: Path) -> None:
    segment = Segment(1024)
    segment.tensor(torch.float32, (4,)).fill_(1.0)
    code = (
        "import sys, torch\nfrom stratagem.wire.segment import Segment\n"
        "t = Segment.attach(sys.argv[1]).tensor(torch.float32, (4,))\n"
        "assert t.sum() == 4\nt.fill_(7.0)\n"
    )
    script = nursery().start(tmp_path, code.replace("sys.argv[1]", repr(segment.handle)))
    assert script.ends() == 0, script
    assert segment.tensor(torch.float32, (4,)).sum() == 28


def test_nothing_is_left_when_the_owner_lets_go() -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment(4096)
    tensor = segment.tensor(torch.uint8, (10,))
    handle = segment.handle
    del segment
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    tensor.fill_(3)  # the mapping lives as long as a tensor does
    with pytest.raises(UsageError, match="RingAllReduce"):
        Segment.attach(handle)


def _resident() -> int:
    """Return the bytes of our segments that count as this process's memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            ours = "/memfd:stratagem" in line
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages stay where they are")
def test_pages_that_are_let_go_keep_what_is_in_them() -> None:
    segment, count = Segment(4 << 20), 1 << 20
    whole = segment.tensor(torch.float32, (count,)).copy_(torch.arange(count))
    before, part = _resident(), whole[1000:-1000]
    segment.let_go(part)
    assert before - _resident() >= part.nbytes - 2 * 65536
    part += 1
    assert torch.equal(whole[:1000], torch.arange(1000.0))
    assert torch.equal(part, torch.arange(1001.0, count - 999))
    segment.let_go(whole[5:6])  # no whole page


def test_identity_of_a_host_is_stable() -> None:
    assert host_identity() == host_identity()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arrives", [True, False])
def test_one_that_arrived_and_left_is_not_missed(arrives: bool) -> None:
    control = Segment(SharedMemoryCollective.control_size(2))

    def watch(rank: int, waited: float) -> None:
        if arrives:
            flags[rank * 8] = 8  # its arrival at the first meeting, a barrier
        raise ReplicaLost("it left", "replica 1")

    mine = SharedMemoryCollective(0, 2, control, watch)
    flags = control.words(16)
    if arrives:
        mine.barrier()
    else:
        with pytest.raises(ReplicaLost):
            mine.barrier()
