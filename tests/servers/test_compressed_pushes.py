"""Compressed pushes: workers and servers of real processes, against the formulas in one process."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.codecs.codec import codec_for
from stratagem.servers import transfers
from stratagem.servers.outbox import PackedGradient
from stratagem.servers.session import Session
from stratagem.servers.shard import WorkerSlot
from stratagem.servers.shard_requests import gradient
from stratagem.training.settings import Served
from stratagem.wire.tcp import Frame
from tests.codecs.by_hand import Pushes, int8
from tests.servers.server_threads import ThreadedJob
from tests.support import data, mlp, moved

pytestmark = pytest.mark.timeout(120)

RECORDS = {
    "dgc": sg.TopK(0.2, momentum=0.5, dense_steps=2),
    "power": sg.PowerSGD(rank=1),
    "int8": sg.Int8(block=16),
    "topk": sg.TopK(0.1),
    "sign": sg.Sign(dense_steps=1),
}
ROWS, BATCH, EPOCHS = 48, 8, 2
RATE = 0.1


def rows() -> tuple[Tensor, Tensor]:
    x, y = data(ROWS)
    return x.double(), y


def by_formula(wire: Any, workers: int) -> nn.Module:
    """Return batches whose parts have the same rows, so that any worker may take any part."""
    module = copy.deepcopy(mlp().double())
    pushes = [Pushes(wire, dict(module.named_parameters())) for _ in range(workers)]
    x, y = twice(*rows()) if workers == 2 else rows()
    size = BATCH * workers
    for _ in range(EPOCHS):
        for start in range(0, len(x), size):
            a, b = x[start : start + size], y[start : start + size]
            total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
            for each in pushes:
                loss = F.cross_entropy(module(a[:BATCH]), b[:BATCH])
                found = torch.autograd.grad(loss, list(module.parameters()))
                sent = each.sent(dict(zip(total, found, strict=True)))
                for name in total:
                    total[name] += sent[name] / workers
            with torch.no_grad():
                for name, p in module.named_parameters():
                    p -= RATE * total[name]
    return module


def twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each batch, so that both parts of a global batch have the same rows."""
    order = [i for s in range(0, len(x), BATCH) for i in [*range(s, s + BATCH)] * 2]
    return x[order], y[order]


def cluster(wire: Any, workers: int, servers: int) -> sg.ParameterServerStrategy:
    updates = sg.Synchronous() if workers > 1 else sg.Asynchronous()
    place = sg.LocalCluster(workers=workers, ps=servers)
    return sg.ParameterServerStrategy(place, updates=updates, wire=wire)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


def fitted(where: sg.Strategy, workers: int, **options: Any) -> nn.Module:
    with where.scope():
        model = sg.Model(mlp().double())
        model.compile(optimizer=sgd, loss=F.cross_entropy)
        x, y = twice(*rows()) if workers == 2 else rows()
        given = {"verbose": 0, "shuffle": False, "epochs": EPOCHS, **options}
        model.fit(x, y, batch_size=BATCH * workers, **given)
    return model.module


def looped(where: sg.Strategy, workers: int) -> nn.Module:
    """The same in a custom loop."""
    module, rows_of_all = mlp().double(), twice(*rows()) if workers == 2 else rows()
    loader: Any = DataLoader(TensorDataset(*rows_of_all), batch_size=BATCH * workers)
    model, optimizer, loader = where.prepare(module, sgd(module.parameters()), loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module


def far(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("workers", [2, 1])
def test_fit_and_loops_are_what_the_formula_says(
    workers: int, name: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over sockets and through shared memory."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", memory)
    expected = by_formula(RECORDS[name], workers)
    assert moved(mlp().double(), expected)
    with cluster(RECORDS[name], workers, 2) as where:
        assert far(fitted(where, workers), expected) < 1e-12
        assert far(where.run(looped, where, workers)[0], expected) < 1e-12


@pytest.mark.parametrize("name", ["dgc", "power"])
def test_a_fit_goes_on_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker goes on with its own residuals."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    plan = sg.Checkpoints(tmp_path / "whole", every=1, keep=99)
    with cluster(RECORDS[name], 2, 1) as where:
        expected = fitted(where, 2, checkpoint=plan)
        middle = sorted((tmp_path / "whole").iterdir(), key=lambda p: int(p.name.split("-")[-1]))[5]
        shutil.copytree(middle, tmp_path / "one" / middle.name)
        found = fitted(where, 2, checkpoint=sg.Checkpoints(tmp_path / "one"), resume=True)
    assert moved(mlp().double(), expected)
    assert far(found, expected) == 0.0


# --- servers in threads of this process: what travels, and what they refuse ----------------------

WIDE = 400
SIZES = [WIDE * WIDE, WIDE, 10 * WIDE, 10]
FORMULA = {
    "topk": (sg.TopK(0.01), 8 * 0.01 * sum(SIZES)),
    "dense": (None, 4 * sum(SIZES)),
    "int8": (sg.Int8(), sum(SIZES) * (1 + 4 / 1024)),
    "power": (sg.PowerSGD(4), 4 * (4 * 2 * WIDE + WIDE + 4 * (WIDE + 10) + 10)),
    "sign": (sg.Sign(), sum(SIZES) / 8),
}


class Counted:
    """Counts the bytes of a channel."""

    def __init__(self, channel: Any) -> None:
        self.inner, self.bytes = channel, 0

    def send(self, pieces: Any) -> None:
        self.bytes += sum(len(piece) for piece in pieces)
        self.inner.send(pieces)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def session(wire: Any, module: nn.Module, rate: float = 0.1, servers: int = 1) -> Iterator[Any]:
    job = ThreadedJob(servers)
    try:
        worker = job.workers[0]
        rule = Served(sg.Asynchronous(), None, 1, servers, 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        made = Session(worker, module, optimizer, rule, wire=wire)
        worker.deal(1, 0, [[1, 99]], last=True)
        yield made
        made.worker.put_back()
        made.end()
    finally:
        job.close()


def push(made: Any, loss: Callable[[], Tensor]) -> bool:
    """Take a ticket, and push a gradient for it."""
    work = made.worker.next()
    value = loss()
    made.worker.begin_backward()
    value.backward()
    kept = made.worker.push(work.ticket, 1.0, 0.0, 1)
    made.forget_gradients()
    return bool(kept)


@pytest.mark.parametrize("name", FORMULA)
def test_as_many_bytes_leave_as_the_formula_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    wire, expected = FORMULA[name]
    module = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 10))
    with session(wire, module) as made:
        channels = []
        for line in made.worker.lines.of(0):
            line.connection._channel = Counted(line.connection._channel)
            channels.append(line.connection._channel)
        pushes = 5
        for _ in range(pushes):
            assert push(made, lambda: module(torch.randn(3, WIDE)).pow(2).mean())
        sent = sum(channel.bytes for channel in channels) / pushes
        told = made.worker.memory.outbox.nbytes
    # besides, every push has a header of a few hundred bytes, and asks for the next ticket
    assert told == pytest.approx(expected, rel=0.02)
    assert told < sent < told + 800


class Branches(nn.Module):
    """Two layers, of which a batch may use only one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(9, 7).double(), nn.Linear(9, 6).double()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found = self.left(x).tanh().sum()
        return found + self.right(x).tanh().sum() if both else found


WAYS = ("beside the computation", "shared memory", "in turn")


@pytest.mark.parametrize(  # one of three is run: each with another record
    ("name", "way"), [(n, WAYS[(i + j) % 3]) for i, n in enumerate(RECORDS) for j in range(3)]
)
def test_layers_without_a_gradient_keep_what_they_have(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are sent during backward; layers without a gradient keep their residuals."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "1" if way == "shared memory" else "0")
    monkeypatch.setattr(transfers, "_MUCH", 0 if way == "beside the computation" else 1 << 30)
    wire, module, alone = RECORDS[name], Branches(), Branches()
    pushes = Pushes(wire, dict(alone.named_parameters()))
    torch.manual_seed(4)
    batches = [(torch.randn(5, 9).double(), n % 3 != 2) for n in range(7)]
    with session(wire, module, servers=2) as made:
        for x, both in batches:
            assert push(made, lambda x=x, both=both: module(x, both))
        made.worker.refresh()
        found = [p.detach().clone() for p in module.parameters()]
    for x, both in batches:
        named = [(n, p) for n, p in alone.named_parameters() if both or n.startswith("left")]
        gradients = torch.autograd.grad(alone(x, both), [p for _, p in named])
        sent = pushes.sent({n: g for (n, _), g in zip(named, gradients, strict=True)})
        with torch.no_grad():
            for n, p in named:
                p -= 0.1 * sent[n]
    far_off = zip(found, alone.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in far_off) < 1e-12


class Table(nn.Module):
    """A table of which a batch touches a few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(50, 4, sparse=True).double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).tanh().sum()


@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("wire", [sg.Int8(8, dense_steps=2), sg.TopK(0.5), sg.Int8(8)])
def test_rows_of_a_table(wire: Any, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Int8 sends rows with residuals; other compressions send rows unchanged."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", memory)
    module, alone = Table(), Table()
    pushes = Pushes(wire, {"head.weight": alone.head.weight, "head.bias": alone.head.bias})
    dice = torch.Generator().manual_seed(6)
    batches = [torch.randint(0, 50, (6,), generator=dice) for _ in range(6)]
    kept = torch.zeros(50, 4).double()
    for number, x in enumerate(batches):
        params = [alone.table.weight, alone.head.weight, alone.head.bias]
        table, *head = torch.autograd.grad(alone(x), params)
        sent = pushes.sent(dict(zip(pushes.e, head, strict=True)))
        rows, values = table.coalesce().indices()[0], table.coalesce().values()
        values = values + kept[rows]
        if isinstance(wire, sg.Int8) and number >= wire.dense_steps:
            got = int8([values.reshape(-1)], wire.block)[0].view(values.shape)
            kept[rows], values = values - got, got
        with torch.no_grad():
            alone.table.weight.index_add_(0, rows, values, alpha=-0.1)
            alone.head.weight -= 0.1 * sent["head.weight"]
            alone.head.bias -= 0.1 * sent["head.bias"]
    with session(wire, module) as made:
        for x in batches:
            assert push(made, lambda x=x: module(x))
        made.worker.refresh()
        found = [p.detach().clone() for p in module.parameters()]
    far_off = zip(found, alone.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in far_off) < 1e-12


@pytest.mark.parametrize(
    ("header", "size", "sentence"),
    [
        ({}, 8, "where .* belong"),
        ({"pieces": [0]}, 16, "where .* belong"),
        ({"pieces": [0, 0]}, 128, "or twice"),
        ({"pieces": [1, 0]}, 120, "not in their order"),
        ({"pieces": [True]}, 56, "pieces that there are not"),
        ({"pieces": [9]}, 8, "pieces that there are not"),
        ({"pieces": "all"}, 8, "pieces that there are not"),
        ({"rows": [[1, 1 << 40]]}, 8, "more rows than it sends"),
        ({"rows": [[-1, 1]], "pieces": [0]}, 81, "pieces that there are not"),
        ({"rows": [[1, 1], [1, 1]], "pieces": [0]}, 98, "or twice"),
    ],
)
def test_lengths_are_checked_before_memory_is_taken(
    header: dict[str, Any], size: int, sentence: str
) -> None:
    with pytest.raises(sg.UsageError, match=sentence):
        received(header, size)


def received(header: dict[str, Any], size: int) -> WorkerSlot:
    packed = PackedGradient(sg.Int8(), [(60,), (10, 5)], [64, 56], 4)
    views = [torch.zeros(60), torch.zeros(10, 5)]
    slot = WorkerSlot(views, codec_for(None, torch.float32), torch.zeros(110), 110, packed=packed)
    shard: Any = SimpleNamespace(slots={"t": slot}, wait_until=lambda done: None)
    line = SimpleNamespace(read_into=lambda into: [each.zero_() for each in into])
    peer: Any = SimpleNamespace(token="t", name="worker 1", connection=line)
    gradient(shard, peer, Frame(header, size))
    return slot


_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats(allow_nan=False) | st.just("a"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("a"), inner),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(
    pieces=_anything, rows=_anything, after=_anything, size=st.sampled_from([0, 17, 64, 81, 120])
)
def test_headers_of_any_kind_are_taken_or_refused(
    pieces: Any, rows: Any, after: Any, size: int
) -> None:
    """A valid header names existing pieces, once each and in order; others are refused."""
    try:
        slot = received({"pieces": pieces, "rows": rows, "after": after}, size)
    except sg.StratagemError:
        return
    places = [piece for piece, _, _ in slot.rows]
    assert places == sorted(set(places)) and set(places) <= {0, 1}
    assert pieces is None or sorted([*pieces, *places]) == sorted({*pieces, *places})


def test_rows_get_no_momentum_of_the_wire() -> None:
    module = Table()
    with (
        session(sg.TopK(0.5, momentum=0.9), module) as made,
        pytest.raises(sg.NotDistributable, match="use sparse=False, or TopK without momentum"),
    ):
        push(made, lambda: module(torch.tensor([1, 2])))


def test_places_that_there_are_not_are_refused() -> None:
    packed = PackedGradient(sg.TopK(0.1), [(20,)], [16], 4)
    packed.room(None, 16, "worker 1").copy_(torch.full([16], 255, dtype=torch.uint8))
    with pytest.raises(sg.UsageError, match=r"worker 1: .* places that there are not"):
        packed.decode(torch.zeros(20), "worker 1")
    with pytest.raises(sg.UsageError, match="clip where the sum is"):
        sg.ParameterServerStrategy(wire=sg.TopK(0.1, clip=1.0))


def test_it_is_said_once_that_pushes_are_not_whole(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with session(sg.Int8(block=77), module := mlp()) as made:
            push(made, lambda module=module: module(data(5)[0]).sum())
    said = [r.getMessage() for r in caplog.records if "Int8(block=77)" in r.getMessage()]
    assert len(said) == 1 and "no longer that of whole gradients" in said[0]


def test_optimizers_that_a_record_leads_astray_are_refused() -> None:
    module = mlp()
    rule, job = Served(sg.Asynchronous(), None, 1, 1, 0), ThreadedJob(1)
    try:
        with pytest.raises(sg.NotDistributable, match="Adam divides by"):
            adam = torch.optim.Adam(module.parameters())
            Session(job.workers[0], module, adam, rule, wire=sg.TopK(0.1))
        with pytest.raises(sg.NotDistributable, match="would lose"):
            half = mlp().bfloat16()
            sgd = torch.optim.SGD(half.parameters(), lr=0.1)
            Session(job.workers[0], half, sgd, rule, wire=sg.Int8())
    finally:
        job.close()
