"""Every collective, between real processes, against plain sums.

TensorFlow's hierarchical copy loses a replica when their number is odd; here every operation must
give the sum for every number, and the same bits on every replica.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import stratagem as sg
from stratagem.cluster.failure import Failure, Kind
from stratagem.cluster.membership import Membership
from stratagem.errors import ReplicaError
from stratagem.wire.collective import Collective
from stratagem.wire.process_group import Meeting, MeetingStore, ProcessGroup
from stratagem.wire.torch_dist import TorchCollective
from tests.support import strategy

pytestmark = pytest.mark.timeout(60)

OPS = {
    "shared_memory": sg.SharedMemoryAllReduce(),
    "ring": sg.RingAllReduce(),
    "hierarchical": sg.HierarchicalCopyAllReduce(),
    "three packs": sg.HierarchicalCopyAllReduce(num_packs=3),
    "one device": sg.ReductionToOneDevice(),
    "last device": None,  # set when the size is known
}
SIZES = [2, 3, 5]
LENGTHS = [1, 17, 10_007]
#: the error of one rounding to the type; packs round once more
TYPES = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2e-2, torch.float16: 2e-3}


#: an even and an odd size are quick enough to run every operation
RARE = [(5, "one device"), (5, "last device"), (2, "three packs"), (3, "hierarchical")]


@pytest.fixture(
    scope="module",
    params=[
        (1, "ring"),
        *(
            pytest.param(each, marks=pytest.mark.slow) if each in RARE else each
            for each in itertools.product(SIZES, OPS)
        ),
    ],
    ids=str,
)
def several(request: pytest.FixtureRequest) -> Iterator[sg.MirroredStrategy]:
    count, name = request.param
    op = OPS[name] or sg.ReductionToOneDevice(f"cpu:{count - 1}")
    made = strategy(count, cross_device_ops=op)
    yield made
    made.close()


def part(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return one replica's numbers: positive, so that sums do not cancel."""
    dice = torch.Generator().manual_seed(1000 * rank + length)
    return (torch.rand(length, generator=dice, dtype=torch.float64) + 0.1).to(dtype)


def everywhere(on: sg.MirroredStrategy, work: Callable[[Collective], Any]) -> list[Any]:
    """Return the results of `work` on every replica."""
    return on.run(lambda: work(sg.current_replica().collective))


def agree(parts: list[Tensor], expected: Tensor, dtype: torch.dtype) -> None:
    """Check that all replicas have the same bits, and the sum up to rounding."""
    for each in parts:
        assert each.dtype == dtype
        assert torch.equal(each, parts[0]), "replicas differ"
    assert torch.allclose(parts[0].double(), expected, rtol=TYPES[dtype], atol=0)


def test_all_reduce_is_the_plain_sum(several: sg.MirroredStrategy) -> None:
    """In a buffer of the collective's own, and in any other tensor."""
    count, kinds = several.num_replicas_in_sync, list(itertools.product(TYPES, LENGTHS))

    def work(collective: Collective) -> list[Tensor]:
        sums = []
        for dtype, length in kinds:
            mine = part(collective.rank, length, dtype)
            buffer = collective.buffer(length, dtype, torch.device("cpu"))
            buffer.copy_(mine)
            for flat in (buffer, mine):
                collective.all_reduce(flat).wait()
            sums += [buffer.clone(), mine]
        return sums

    results = everywhere(several, work)
    for i, (dtype, length) in enumerate(kinds):
        expected = sum(part(rank, length, dtype).double() for rank in range(count))
        for kind in (0, 1):
            agree([each[2 * i + kind] for each in results], expected, dtype)


def test_two_sixteen_bit_numbers_are_added_up_in_fp32(several: sg.MirroredStrategy) -> None:
    """All bit patterns: rounded once, to even, infinities and subnormal numbers included."""
    if several.num_replicas_in_sync != 2:
        pytest.skip("of more the order counts")

    def bits(rank: int, dtype: torch.dtype) -> Tensor:
        dice = torch.Generator().manual_seed(rank)
        return torch.randint(
            -(1 << 15), 1 << 15, (20_001,), generator=dice, dtype=torch.int16
        ).view(dtype)

    def work(collective: Collective) -> list[Tensor]:
        flats = [bits(collective.rank, each) for each in (torch.bfloat16, torch.float16)]
        for flat in flats:
            collective.all_reduce(flat).wait()
        return flats

    for found in everywhere(several, work):
        for flat in found:
            expected = (bits(0, flat.dtype).float() + bits(1, flat.dtype).float()).to(flat.dtype)
            assert torch.equal(flat.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_weights(several: sg.MirroredStrategy) -> None:
    """Weights may differ, as shares of a batch do; a weight of zero erases the content."""
    count = several.num_replicas_in_sync

    def weight(rank: int) -> float:
        return 0.0 if rank == 1 else (rank + 1) / 10

    def work(collective: Collective) -> list[Tensor]:
        sums = []
        for dtype, weights in itertools.product(TYPES, ("unequal", "equal", "none")):
            flat = collective.buffer(17, dtype, torch.device("cpu"))
            flat.copy_(part(collective.rank, 17, dtype))
            if weights == "none" or (weights == "unequal" and weight(collective.rank) == 0.0):
                flat.fill_(float("nan"))
            mine = {"unequal": weight(collective.rank), "equal": 0.25, "none": 0.0}[weights]
            collective.all_reduce(flat, mine).wait()
            sums.append(flat.clone())
        return sums

    results = everywhere(several, work)
    for i, (dtype, weights) in enumerate(itertools.product(TYPES, ("unequal", "equal", "none"))):
        scale = {"unequal": weight, "equal": lambda _: 0.25, "none": lambda _: 0.0}[weights]
        expected = torch.zeros(17, dtype=torch.float64)
        for rank in range(count):
            expected += scale(rank) * part(rank, 17, dtype).double()
        agree([each[i] for each in results], expected, dtype)


def test_order_of_reductions_nobody_waits_for(several: sg.MirroredStrategy) -> None:
    """Alternating types and sizes, which take different paths, on replicas of varying speed."""
    count = several.num_replicas_in_sync
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16]
    jobs = [(kinds[i % len(kinds)], 1 + 997 * (i % 7)) for i in range(30)]

    def work(collective: Collective) -> list[float]:
        flats, pending = [], []
        for i, (dtype, length) in enumerate(jobs):
            flats.append(torch.full((length,), float(i + 1), dtype=dtype))
            pending.append(collective.all_reduce(flats[-1]))
            if (i + collective.rank) % 4 == 0:
                torch.rand(50_000).sort()  # some replicas are slower
        for each in reversed(pending):
            each.wait()
        assert all((flat == flat[0]).all() for flat in flats)
        return [flat[0].item() for flat in flats]

    assert everywhere(several, work) == [[count * (i + 1.0) for i in range(30)]] * count


def message(rank: int, size: int) -> Tensor:
    return (torch.arange(size) * 7 + rank).to(torch.uint8)


def test_messages_of_any_size(several: sg.MirroredStrategy) -> None:
    """Empty, around the 64 KiB of a mailbox, and larger; in any order."""
    count = several.num_replicas_in_sync
    sizes = [0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_000]

    def work(collective: Collective) -> list[list[Tensor]]:
        return [
            [
                part.clone()
                for part in collective.gather_bytes(
                    message(collective.rank, sizes[(turn + collective.rank) % 6])
                )
            ]
            for turn in range(6)
        ]

    for result in everywhere(several, work):
        for turn, parts in enumerate(result):
            assert len(parts) == count
            for rank, got in enumerate(parts):
                assert torch.equal(got, message(rank, sizes[(turn + rank) % 6]))


def test_broadcast_from_everyone(several: sg.MirroredStrategy) -> None:
    """Bytes and tensors of several types and shapes, also an empty and a large one."""
    count = several.num_replicas_in_sync
    shapes = [(3, 5), (), (0,), (100, 250)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]

    def work(collective: Collective) -> bool:
        for source in range(count):
            size = 70_000 * source + 3
            sent = message(source, size) if collective.rank == source else None
            assert torch.equal(collective.broadcast_bytes(sent, source), message(source, size))
            for shape, dtype in itertools.product(shapes, dtypes):
                tensor = torch.full(shape, collective.rank + 1, dtype=dtype)
                collective.broadcast(tensor, source)
                assert torch.equal(tensor, torch.full(shape, source + 1, dtype=dtype))
        view = torch.zeros(4, 6)[:, ::2]  # not contiguous
        view += collective.rank
        collective.broadcast(view, count - 1)
        assert (view == count - 1).all()
        return True

    assert everywhere(several, work) == [True] * count


def test_barriers_hold_everybody_back(several: sg.MirroredStrategy) -> None:
    """Writes before a barrier are visible after it, many times in a row."""
    count = several.num_replicas_in_sync

    def work(collective: Collective) -> bool:
        for turn in range(20):
            collective.barrier()
            seen = collective.gather_bytes(torch.tensor([turn], dtype=torch.uint8))
            assert [int(each) for each in seen] == [turn] * collective.size
        return True

    assert everywhere(several, work) == [True] * count


def test_many_reductions_give_the_same_bits(several: sg.MirroredStrategy) -> None:
    """Many repetitions reveal stale reads and lost writes in shared memory."""
    count = several.num_replicas_in_sync

    def work(collective: Collective) -> Tensor:
        flat = collective.buffer(4097, torch.float32, torch.device("cpu"))
        flat.copy_(part(collective.rank, 4097, torch.float32))
        for _ in range(50):
            collective.all_reduce(flat, 1 / collective.size).wait()
            flat.add_(collective.rank * 1e-3)
        collective.all_reduce(flat, 1 / collective.size).wait()
        return flat.clone()

    results = everywhere(several, work)
    assert all(torch.equal(each, results[0]) for each in results)
    start = sum(part(rank, 4097, torch.float32).double() for rank in range(count)) / count
    drift = 50 * 1e-3 * sum(range(count)) / count
    assert torch.allclose(results[0].double(), start + drift, rtol=1e-4)


class Work:
    """Work that ends just after a wait for it has timed out."""

    def __init__(self, error: str | None) -> None:
        self.error, self.ended = error, False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.ended:
            self.ended = True
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


@pytest.mark.parametrize("error", [None, "Connection closed by peer"])
def test_work_that_ends_between_two_looks(error: str | None) -> None:
    """A race, rare on an idle machine: a reduction that succeeded must not end the training."""
    limit = timedelta(seconds=9)
    store = MeetingStore(Membership.alone(), "x", limit)
    meeting = Meeting(store, "127.0.0.1", limit, lambda _: None)
    group = ProcessGroup("alone", 0, 1, "gloo", meeting)
    if error is None:
        group.wait(Work(None))
    else:
        with pytest.raises(RuntimeError, match=error):
            group.wait(Work(error))


#: empty, short, just short enough for one message, just too long, too long to be held back
BYTES = [0, 5, 1008, 1009, (1 << 20) + 1, 7]


def test_messages_of_all_lengths(several: sg.MirroredStrategy) -> None:
    def work(collective: Collective) -> list[list[int]]:
        found = []
        for length in BYTES:
            mine = torch.full((length + collective.rank,), collective.rank + 1, dtype=torch.uint8)
            for each in collective.gather_bytes(mine):
                found.append([len(each), int(each.sum())])
            told = collective.broadcast_bytes(mine if collective.rank == 0 else None)
            found.append([len(told), int(told.sum())])
        return found

    size = several.num_replicas_in_sync
    expected = []
    for length in BYTES:
        expected += [[length + r, (length + r) * (r + 1)] for r in range(size)]
        expected.append([length, length])
    assert everywhere(several, work) == [expected] * size


def test_what_is_held_back_comes_in_order(several: sg.MirroredStrategy) -> None:
    """Also around collectives; no replica waits for a deferred message."""

    def work(collective: Collective) -> tuple[list[list[int]], int]:
        leads, found, sent = collective.rank == 0, [], [0]
        group = getattr(collective, "messages", None)
        if group is not None:
            whole = type(group).broadcast

            def counted(flat: Tensor, root: int) -> None:
                sent[0] += 1
                whole(group, flat, root)

            group.broadcast = counted

        def hear(number: int, length: int) -> None:
            mine = torch.full((length,), number, dtype=torch.uint8)
            told = collective.broadcast_bytes(mine if leads else None)
            if leads:
                mine.zero_()  # the message is a copy
            else:
                found.append([len(told), int(told.sum())])

        collective.hold()
        for i in range(3):
            hear(i + 1, 100 * i)
        collective.tell()
        few = sent[0]
        collective.hold()
        hear(4, 10)
        collective.gather_bytes(torch.zeros(2, dtype=torch.uint8))
        hear(5, 11)
        hear(6, (1 << 20) + 1)
        collective.all_reduce(torch.ones(3)).wait()
        hear(7, 12)
        collective.barrier()
        hear(8, 13)
        collective.tell()
        return found, few

    size = several.num_replicas_in_sync
    lengths = [0, 100, 200, 10, 11, (1 << 20) + 1, 12, 13]
    told = everywhere(several, work)
    if size > 1:
        expected = [[length, length * (i + 1)] for i, length in enumerate(lengths)]
        assert [each for each, _ in told[1:]] == [expected] * (size - 1)
    shares = several.replica_group.start().collective.shares_memory
    assert {few for _, few in told} == {0 if size == 1 or shares else 1}


def test_who_knows_of_a_death_says_nothing_more(several: sg.MirroredStrategy) -> None:
    """Sending a short message to a dead peer would not fail, and the sender would run ahead.

    A peer that joins is no reason to raise.
    """
    if several.num_replicas_in_sync == 1 or several.replica_group.start().collective.shares_memory:
        pytest.skip("they wait for each other")

    def work(collective: Collective) -> list[str]:
        assert isinstance(collective, TorchCollective)
        membership, found = collective.membership, []
        for kind in KINDS if collective.rank == 0 else ():
            known = SimpleNamespace(trouble=Failure(1, membership.members[1], kind, "here"))
            collective.membership = cast(Membership, known)
            try:
                collective.broadcast_bytes(torch.zeros(3, dtype=torch.uint8))
            except ReplicaError as error:
                found.append(type(error).__name__)
            finally:
                collective.membership = membership
        if collective.rank:
            collective.broadcast_bytes(None)
        return found

    assert everywhere(several, work)[0] == ["ReplicaLost", "ReplicaStalled", "ReplicaFailed"]


#: kinds of trouble; the last one is no loss
KINDS: tuple[Kind, ...] = ("died", "stalled", "failed", "joined")


def test_a_forked_process_may_drop_the_group_of_its_parent() -> None:
    """As in a DataLoader's worker whose parent has regrouped: the child has no threads to join."""
    limit = timedelta(seconds=9)
    store = MeetingStore(Membership.alone(), "forked", limit)
    meeting = Meeting(store, "127.0.0.1", limit, lambda _: None)
    group = ProcessGroup("forked", 0, 1, "gloo", meeting)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the time limit of pytest has one
        signal.alarm(10)
        del group
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
