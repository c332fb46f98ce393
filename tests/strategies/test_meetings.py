"""Replicas that meet every few updates, in real processes, against the formulas in one."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import stratagem as sg
from stratagem.data.shares import share
from tests.clock import wait_for
from tests.ports import free_ports
from tests.strategies.test_compressed import at_rest, far, rows
from tests.support import by_hand, data, mlp, moved, strategy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)
BATCH, EPOCHS = 16, 3  # 50 rows: 4 batches, the last of 2 rows, fewer than replicas
SYNCS = {
    "local": sg.LocalSteps(3),
    "post-local": sg.LocalSteps(3, after=2),
    "diloco": sg.DiLoCo(3),
    "fragments": sg.DiLoCo(2, outer=sg.Outer(0.5, 0.6), fragments=2),
    "streaming": sg.DiLoCo(4, outer=sg.Outer(0.5, 0.6), fragments=2, overlap=1, mix=0.25),
    "ring": sg.Gossip("ring"),
    "exponential": sg.Gossip("exponential"),
}
#: over sockets and through shared memory; one of three is run
BOTH: list[Any] = [("ring", n) for n in ("streaming", "local", "exponential")]
BOTH += [("shared_memory", "exponential"), ("ring", "diloco"), ("ring", "fragments")]
BOTH += [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in [("ring", "post-local"), ("shared_memory", "streaming"), ("ring", "ring")]
]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


class ByHand:
    """The papers' formulas, for `count` replicas in one process."""

    def __init__(self, sync: Any, count: int) -> None:
        self.sync, self.count, self.since, self.updates = sync, count, 0, 0
        self.replicas = [self.module() for _ in range(count)]
        self.optimizers = [self.optimizer(each.parameters()) for each in self.replicas]
        outer = getattr(sync, "outer", sg.Outer(1.0, 0.0))
        self.lr, self.mu = outer.lr, outer.momentum
        self.momenta = [torch.zeros_like(p) for p in self.module().parameters()]
        # of 96 + 16 + 64 + 4 numbers the first weight is a half
        several = getattr(sync, "fragments", 1) == 2
        self.fragments = [[0], [1, 2, 3]] if several else [[0, 1, 2, 3]]
        self.unmet = [0] * len(self.fragments)
        self.delay, self.mix_in = getattr(sync, "delay", 0), getattr(sync, "mix", 0.0)
        #: the fragment that travels, and the mean way of each of its parameters
        self.travels: tuple[int, list[Tensor]] | None = None
        self.old: list[Tensor] = []

    def module(self) -> nn.Module:
        return mlp().double()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return adam(params)

    def params(self, index: int) -> list[Tensor]:
        return [list(each.parameters())[index].data for each in self.replicas]

    def batch(self, x: Tensor, y: Tensor) -> None:
        exact = self.updates < getattr(self.sync, "after", 0)
        if not self.since:
            self.old = [p.detach().clone() for p in self.replicas[0].parameters()]
        gradients = []
        for i, module in enumerate(self.replicas):
            start, end = share(len(x), self.count, i)
            loss = F.cross_entropy(module(x[start:end]), y[start:end], reduction="sum") / len(x)
            gradients.append(torch.autograd.grad(loss, list(module.parameters())))
        mean = [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]
        for own, module, optimizer in zip(gradients, self.replicas, self.optimizers, strict=True):
            for p, g, m in zip(module.parameters(), own, mean, strict=True):
                p.grad = m.clone() if exact else self.count * g
            optimizer.step()
        self.updates += 1
        if exact:
            return
        self.since += 1
        self.unmet = [count + 1 for count in self.unmet]
        if isinstance(self.sync, sg.Gossip):
            self.mix()
        else:
            pace = self.sync.every // len(self.fragments)
            if self.since % pace == 0:
                self.send((self.since // pace - 1) % len(self.fragments))
            if self.travels is not None and self.since % pace == self.delay:
                self.end()

    def mix(self) -> None:
        n, ring = self.count, self.sync.graph == "ring"
        hop = 1 << (self.updates - 1) % (n - 1).bit_length()
        for index in range(4):
            old = [p.clone() for p in self.params(index)]
            for i, p in enumerate(self.params(index)):
                near = {i, (i - 1) % n, (i + 1) % n} if ring else {i, (i - hop) % n}
                p.copy_(torch.stack([old[j] for j in near]).mean(0))

    def send(self, number: int) -> None:
        self.unmet[number] = 0
        indices = self.fragments[number]
        ways = [self.old[i] - torch.stack(self.params(i)).mean(0) for i in indices]
        self.travels = number, ways

    def end(self) -> None:
        assert self.travels is not None
        (number, ways), self.travels = self.travels, None
        mix = self.mix_in if self.unmet[number] else 0.0
        for index, way in zip(self.fragments[number], ways, strict=True):
            self.momenta[index] = self.mu * self.momenta[index] + way
            new = self.old[index] - self.lr * (way + self.mu * self.momenta[index])
            for p in self.params(index):
                p.copy_(mix * p + (1 - mix) * new)
            self.old[index] = new.clone()
        self.unmet[number] *= mix > 0

    def meet(self) -> None:
        """Hold the meeting of a call's end; a fragment under way comes first."""
        if self.travels is not None:
            self.end()
        for number in range(len(self.fragments)):
            if self.unmet[number]:
                self.send(number)
                self.end()
        self.since = 0

    def train(self, epochs: int = EPOCHS) -> nn.Module:
        x, y = rows()
        for _ in range(epochs):
            for start in range(0, len(x), BATCH):
                self.batch(x[start : start + BATCH], y[start : start + BATCH])
            self.meet()
        return self.replicas[0]


def fitted(made: Any, epochs: int = EPOCHS, **options: Any) -> tuple[sg.Model, dict[str, Any]]:
    with made.scope():
        model = sg.Model(mlp().double())
        model.compile(optimizer=adam, loss=F.cross_entropy)
    x, y = rows()
    options = {"verbose": 0, "shuffle": False, **options}
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, **options)
    return model, history.history


def looped(made: Any, folder: Path | None = None, end: int = -1) -> list[Tensor]:
    """The same in a custom loop, with checkpoints if given, and left after `end` batches."""
    torch.manual_seed(7)
    module = mlp().double()
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    plan = None if folder is None else sg.Checkpoints(folder, every=1)
    optimizer = adam(module.parameters())
    model, optimizer, shares = made.prepare(module, optimizer, loader, resume=plan)
    seen = 0
    for _ in range(EPOCHS) if plan is None else shares.epochs(EPOCHS):
        for x, y in shares:
            if seen == end:
                return []
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("op", "name"), BOTH)
def test_fit_and_loops_are_what_the_formula_says(op: str, name: str) -> None:
    """With Adam, unequal shares and one empty share."""
    expected = ByHand(SYNCS[name], 3).train()
    with strategy(3, cross_device_ops=op, sync=SYNCS[name]) as made:
        model, history = fitted(made, validation_data=rows())
        first, *others = made.run(looped, made)
    assert moved(mlp().double(), expected)
    assert far(model.module, expected) < 1e-12
    pairs = zip(first, expected.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12
    assert all(all(map(torch.equal, first, other)) for other in others)
    with torch.no_grad():
        x, y = rows()
        assert history["val_loss"][-1] == pytest.approx(float(F.cross_entropy(expected(x), y)))
    exact = by_hand(mlp().double(), adam, F.cross_entropy, *rows(), batch=BATCH, epochs=EPOCHS)
    assert far(exact, expected) > 1e-4  # and it is no longer that of one device


def goes_on(made: Any, seen: Path) -> list[Tensor]:
    """The second replica sends a fragment only after the first has made one more update."""
    chief, module = sg.current_replica().is_chief, mlp().double()
    loader = DataLoader(TensorDataset(*rows()), batch_size=8)  # 7 batches
    model, optimizer, shares = made.prepare(module, adam(module.parameters()), loader)
    for number, (x, y) in enumerate(shares, 1):
        F.cross_entropy(model(x), y).backward()
        if number == 4 and not chief:
            wait_for(seen.exists)
        optimizer.step()
        optimizer.zero_grad()
        if number == 5 and chief:
            seen.touch()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("wire", [sg.Int8(block=8), None], ids=repr)
def test_updates_are_made_before_others_have_sent_their_part(wire: Any, tmp_path: Path) -> None:
    sync = sg.DiLoCo(4, overlap=2, wire=wire)
    with strategy(2, cross_device_ops="ring", sync=sync) as made:
        first, second = made.run(goes_on, made, tmp_path / "seen")
    assert (tmp_path / "seen").exists() and all(map(torch.equal, first, second))


def test_the_loss_of_an_epoch_is_that_of_all_rows() -> None:
    """Without learning, the mean over the replicas' own rows is the loss of one device."""
    x, y = rows()
    losses = []
    for sync in (None, sg.LocalSteps(3), sg.Gossip()):
        with strategy(3, sync=sync) as made, made.scope():
            model = sg.Model(mlp().double())
            still = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
            model.compile(optimizer=still, loss=F.cross_entropy, metrics=["accuracy"])
            found = model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0).history
        losses.append([found["loss"][0], found["accuracy"][0]])
    assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    assert losses[2] == pytest.approx(losses[0], abs=1e-12)


# --- targets that do not count -----------------------------------------------------------------


def uneven() -> tuple[Tensor, Tensor]:
    """Rows whose targets do not count: the first replica's in batch 1, all in batch 3."""
    x, y = rows(32)
    y[9::3] = y[0:4] = y[16:24] = -100
    return x, y


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3)


def ignoring(made: Any, weight: Tensor | None = None) -> Tensor:
    """Return all weights after each update of a custom loop with two backward passes."""
    module = mlp().double()
    loader = DataLoader(TensorDataset(*uneven()), batch_size=8)
    model, optimizer, shares = made.prepare(module, plain_sgd(module.parameters()), loader)
    seen = []
    for x, y in shares:
        y = torch.where(y < 0, 0, y) if weight is not None else y
        for _ in range(2):
            F.cross_entropy(model(x), y, weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return torch.stack(seen)


def test_a_share_without_a_target_adds_nothing_in_a_loop() -> None:
    with strategy(1) as one:
        expected = ignoring(one)
    with strategy(2) as made:
        assert float((made.run(ignoring, made)[0] - expected).abs().max()) < 1e-12
    with strategy(2, sync=sg.LocalSteps(2)) as made:
        first, second = made.run(ignoring, made)
        begun = torch.cat([p.detach().reshape(-1) for p in mlp().double().parameters()])
        assert torch.equal(first[0], begun) and not torch.equal(second[0], begun)
        weighted = made.run(ignoring, made, torch.tensor([0.0, 1, 1, 2]).double())[0]
    assert first.isfinite().all() and torch.equal(first[1], second[1])
    assert weighted[1].isfinite().all()  # later nobody's target counts, and torch has NaN


def test_a_share_without_a_target_adds_nothing_in_fit() -> None:
    """The updates before the first meeting equal one device's, with accumulation or without."""
    x, y = uneven()
    for accumulate in (1, 2):
        expected = by_hand(
            mlp().double(), plain_sgd, F.cross_entropy, x, y, batch=8, accumulate=accumulate
        )
        for sync in (None, sg.LocalSteps(2, after=99), sg.LocalSteps(2)):
            with strategy(2, cross_device_ops="ring", sync=sync) as made, made.scope():
                model = sg.Model(mlp().double())
                model.compile(plain_sgd, nn.CrossEntropyLoss(), accumulate=accumulate)
                model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            exact = far(model.module, expected) < 1e-12
            assert exact == (sync != sg.LocalSteps(2)), (sync, accumulate)
            assert all(p.isfinite().all() for p in model.module.parameters())


# --- going on ----------------------------------------------------------------------------------

#: with what a checkpoint has to keep of each: outer momentum, residuals, turns
KEPT = {
    "diloco": sg.DiLoCo(4, fragments=2, wire=sg.TopK(0.2), overlap=1),  # a part travels then
    "local": sg.LocalSteps(3, after=2),
    "gossip": sg.Gossip("exponential"),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_fit_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """From a checkpoint within an epoch; each replica has its own state of Adam."""
    plan = sg.Checkpoints(tmp_path / "whole", every=6, keep=99)
    with strategy(2, cross_device_ops="ring", sync=KEPT[name]) as made:
        expected, _ = fitted(made, checkpoint=plan)
        first = min((tmp_path / "whole").iterdir(), key=lambda p: int(p.name.split("-")[-1]))
        assert first.name.endswith("-6")
        shutil.copytree(first, tmp_path / "one" / first.name)
        found, _ = fitted(made, checkpoint=sg.Checkpoints(tmp_path / "one", every=6), resume=True)
    assert moved(mlp().double(), expected.module)
    assert far(found.module, expected.module) == 0.0


def test_a_custom_loop_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with strategy(2, cross_device_ops="ring", sync=KEPT["diloco"]) as made:
        expected = made.run(looped, made, tmp_path / "whole", -1)[0]
        made.run(looped, made, tmp_path / "parts", 5)
        found = made.run(looped, made, tmp_path / "parts", -1)[0]
    assert any(
        (a - b).abs().max() > 1e-3 for a, b in zip(expected, mlp().parameters(), strict=True)
    )
    assert all(map(torch.equal, found, expected))


def test_another_cadence_goes_on_without_what_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = sg.Checkpoints(tmp_path, every=4)
    with strategy(2, sync=sg.DiLoCo(3)) as made:
        fitted(made, epochs=1, checkpoint=plan)
    with strategy(2, sync=sg.LocalSteps(3)) as made:
        fitted(made, epochs=2, checkpoint=plan, resume=True)
    assert "made with sync=DiLoCo(every=3)" in caplog.text


# --- bytes -------------------------------------------------------------------------------------

WIDE, EVERY = 1000, 4


def counted(made: Any) -> float:
    """Return the bytes that this replica sends in a round of EVERY updates."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 10))
    few = TensorDataset(torch.randn(6, WIDE), torch.arange(6))
    loader = DataLoader(ConcatDataset([few] * (2 * EVERY)), batch_size=6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, shares = made.prepare(module, optimizer, loader)
    before = 0
    for step, (x, y) in enumerate(shares):
        before = at_rest() if step == EVERY else before  # connections come with the first
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 * EVERY - 1:
            return at_rest() - before
    return 0.0


NUMBERS = WIDE * WIDE + WIDE + 10 * WIDE + 10
RING = 2 * 2 / 3 * 4 * NUMBERS  # bytes of an all-reduce over 3


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of bytes are Linux's")
@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        (sg.DiLoCo(EVERY, wire=sg.Int8()), RING / 4 * (1 + 4 / 1024)),
        (sg.DiLoCo(EVERY, fragments=2), RING),
        (sg.LocalSteps(EVERY), RING),
        (sg.Gossip("exponential"), EVERY * 4 * NUMBERS),
        (sg.Gossip("ring"), EVERY * 2 * 4 * NUMBERS),
    ],
    ids=repr,
)
def test_the_kernel_counts_as_many_bytes_as_the_formula(sync: Any, expected: float) -> None:
    with strategy(3, cross_device_ops="ring", sync=sync) as made:
        sent = made.run(counted, made)
    for each in sent:
        assert 0.98 * expected < each < 1.02 * expected, (each / expected, sent)


# --- what cannot be ----------------------------------------------------------------------------


def compiled(made: Any, **options: Any) -> None:
    model = sg.Model(mlp(), made)
    model.compile(optimizer="adam", loss="cross_entropy", **options)
    model.fit(*data(20), batch_size=10, epochs=1, verbose=0)


def test_what_cannot_go_together_is_refused() -> None:
    def refused(sentence: str, **options: Any) -> None:
        with pytest.raises(sg.UsageError, match=sentence):
            strategy(2, **options)

    refused("every layer of every step", sync=sg.DiLoCo(3), sync_batchnorm=True)
    refused("leave wire out, or use sg.DiLoCo", sync=sg.Gossip(), wire=sg.Int8())
    refused("both say what travels", sync=sg.DiLoCo(3, wire="bfloat16"), wire=sg.Int8())
    refused("keeps a momentum of gradients", sync=sg.DiLoCo(3), wire=sg.TopK(0.1, momentum=0.9))
    refused(r"it is sg\.EveryStep", sync=20)
    half = pytest.raises(sg.NotDistributable, match='precision="bfloat16"')
    with strategy(2, sync=sg.LocalSteps(3)) as made, half:
        compiled(made, precision="float16")
    many = pytest.raises(sg.UsageError, match="more fragments than the model has")
    with strategy(2, sync=sg.DiLoCo(8, fragments=8)) as made, many:
        compiled(made)


def skipping(made: Any, scaled: bool) -> None:
    """Train with steps that a scaler or an `if` skips."""
    module = mlp()
    loader = DataLoader(TensorDataset(*data(40)), batch_size=8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, shares = made.prepare(module, optimizer, loader)
    first = sg.current_replica().is_chief
    scaler = torch.amp.GradScaler("cpu")
    for number, (x, y) in enumerate(shares):
        loss = F.cross_entropy(model(x), y)
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            if number != 1 or not first:
                optimizer.step()
        optimizer.zero_grad()


def told(error: type[Exception], sentence: str) -> Any:
    """Whichever replica comes there first is the one that is told of."""
    return pytest.raises((error, sg.ReplicaFailed), match=sentence)


def test_a_step_that_one_replica_skips_is_refused() -> None:
    # the other replica is at the end, too, or at a meeting before it, or a part of its comes back
    for sync in (sg.LocalSteps(2), sg.LocalSteps(5), sg.DiLoCo(4, overlap=1)):
        counts = told(sg.UsageError, r"have made \[4, 5\] updates.*skip none")
        with strategy(2, cross_device_ops="ring", sync=sync) as made, counts:
            made.run(skipping, made, False)
    scaler = told(sg.NotDistributable, "leave the scaler out.*leave sync out")
    with strategy(2, sync=sg.LocalSteps(2)) as made, scaler:
        made.run(skipping, made, True)


def test_a_second_optimizer_is_told_of() -> None:
    """Its weights have not met: the meeting is at the step of the optimizer that was prepared."""

    def loop() -> None:
        model: Any = mlp()
        loader: Any = DataLoader(TensorDataset(*data(21)), batch_size=8)
        first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
        model, first, loader = made.prepare(model, first, loader)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            for each in (first, second):
                each.step()
                each.zero_grad()

    sentence = "parameter '2.weight' has other values.*one optimizer all that is trained"
    with strategy(2, sync=sg.LocalSteps(1)) as made, told(sg.UsageError, sentence):
        made.run(loop)


def test_every_step_is_the_default_and_exact() -> None:
    with strategy(2) as plain, strategy(2, sync=sg.EveryStep()) as made:
        assert made.settings == plain.settings
        assert far(fitted(made)[0].module, fitted(plain)[0].module) == 0.0


def test_it_is_said_once_what_is_no_longer_exact(caplog: pytest.LogCaptureFixture) -> None:
    with strategy(2, sync=sg.LocalSteps(17)) as made:
        compiled(made)
        compiled(made)
    said = [r.getMessage() for r in caplog.records if "LocalSteps(every=17)" in r.getMessage()]
    assert len(said) == 1 and "no longer that of one device" in said[0]
    with strategy(1, sync=sg.DiLoCo(17)) as made, strategy(1) as plain:
        assert far(fitted(made)[0].module, fitted(plain)[0].module) == 0.0
    assert "one replica meets nobody" in caplog.text


WORKER = """
import sys
import torch
import stratagem as sg
from tests.strategies.test_meetings import SYNCS, fitted

strategy = sg.MultiWorkerMirroredStrategy(sync=SYNCS[sys.argv[1]], devices=["cpu:0"])
torch.save(list(fitted(strategy)[0].module.state_dict().values()), sys.argv[2])
"""


def test_workers_of_a_cluster_do_what_the_formula_says(tmp_path: Path) -> None:
    """Two processes with TF_CONFIG."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    running = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        command = [sys.executable, "-c", WORKER, "streaming", str(tmp_path / f"{index}.pt")]
        environ = os.environ | {"TF_CONFIG": json.dumps(task)}
        running.append(subprocess.Popen(command, env=environ, cwd=ROOT))
    assert [each.wait(100) for each in running] == [0, 0]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    expected = ByHand(SYNCS["streaming"], 2).train().state_dict().values()
    assert max(float((a - b).abs().max()) for a, b in zip(first, expected, strict=True)) < 1e-12


class Clamp(sg.callbacks.Callback):
    """Writes weights after each batch, or after each epoch."""

    def __init__(self, each: str) -> None:
        super().__init__()
        self.each = each

    def clamp(self) -> None:
        with torch.no_grad():
            for p in self.model.module.parameters():
                p.clamp_(-50, 50)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.each == "batch":
            self.clamp()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.each == "epoch":
            self.clamp()


def test_a_callback_cannot_throw_the_others_updates_away() -> None:
    for sync in (sg.LocalSteps(3), sg.Gossip()):
        with strategy(2, sync=sync) as made:
            expected, _ = fitted(made)
            found, _ = fitted(made, callbacks=[Clamp("epoch")])
            assert far(found.module, expected.module) == 0.0
            with pytest.raises(sg.UsageError, match="write them at the end of an epoch"):
                fitted(made, callbacks=[Clamp("batch")])
    with strategy(2, sync=sg.LocalSteps(1)) as made:
        fitted(made, callbacks=[Clamp("batch")])


def left_early(made: Any, file: Path, meets: bool) -> list[Tensor]:
    module = mlp()
    loader = DataLoader(TensorDataset(*data(40)), batch_size=8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer, shares = made.prepare(module, optimizer, loader)
    for number, (x, y) in enumerate(shares):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            break
    if meets:
        made.meet()
    if file.name:
        torch.save(model.state_dict(), file)
    return [p.detach().clone() for p in model.parameters()]


def test_a_loop_that_is_left_early_meets_or_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy(2, sync=sg.LocalSteps(4)) as made:
        first, second = made.run(left_early, made, tmp_path / "m.pt", True)
        assert all(map(torch.equal, first, second)) and "strategy.meet()" not in caplog.text
        first, second = made.run(left_early, made, tmp_path / "m.pt", False)
        assert not any(map(torch.equal, first, second))
        made.run(left_early, made, Path(), False)
    said = [r.getMessage() for r in caplog.records if "strategy.meet()" in r.getMessage()]
    assert [each.split()[0] for each in said] == ["torch.save", "strategy.run"]


def left_apart(made: Any) -> None:
    looped(made, end=4 - made.replica().index)


def test_a_part_that_only_some_have_sent_is_told_in_its_own_call() -> None:
    """After 4 updates a fragment is under way, which the next call would receive; not after 3."""
    with (
        strategy(2, cross_device_ops="ring", sync=sg.DiLoCo(4, overlap=1)) as made,
        told(sg.UsageError, r"replicas have made \[4, 3\] updates"),
    ):
        made.run(left_apart, made)


class Freeze(sg.callbacks.Callback):
    """Freezes the first layer for the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.module[0].requires_grad_(epoch != 1)


def test_a_layer_may_be_frozen_between_two_epochs() -> None:
    with strategy(2, sync=sg.DiLoCo(2, fragments=2, wire=sg.Int8(block=8))) as made:
        model, _ = fitted(made, epochs=3, callbacks=[Freeze()])
        other = copy.deepcopy(model.module)
        again, _ = fitted(made, epochs=3, callbacks=[Freeze()])
    assert far(again.module, other) == 0.0
    assert moved(mlp().double(), other)


class Spare(nn.Sequential):
    """With a layer that no row uses."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.add_module("spare", nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)))  # type: ignore[no-any-return]


def _decaying(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)


def _freezing(prepare: Any) -> nn.Module:
    """A loop whose first layer is frozen after an epoch; the last batch has one row."""
    module: Any = Spare().double()
    x, y = data(17)
    loader: Any = DataLoader(TensorDataset(x.double(), y), batch_size=8)
    model, optimizer, loader = prepare(module, _decaying(module.parameters()), loader)
    for epoch in range(3):
        module[0].requires_grad_(epoch == 0)
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module


@pytest.mark.parametrize(("op", "count"), [("shared_memory", 2), ("ring", 3)])
def test_a_meeting_after_every_update_leaves_frozen_layers(op: str, count: int) -> None:
    """One device's result in loops and `fit`, though a share of the last batch is empty."""
    alone = _freezing(lambda *given: given)
    x, y = data(17)
    by_fit = by_hand(Spare().double(), _decaying, F.cross_entropy, x.double(), y, batch=8)
    with strategy(count, cross_device_ops=op, sync=sg.LocalSteps(1)) as made:
        first, *_ = made.run(lambda: _freezing(made.prepare).state_dict())
        with made.scope():
            model = sg.Model(Spare().double())
            model.compile(_decaying, "cross_entropy")
        model.fit(x.double(), y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert max(float((v - first[k]).abs().max()) for k, v in alone.state_dict().items()) < 1e-12
    assert far(model.module, by_fit) < 1e-12
    assert moved(Spare().double(), alone)
    assert torch.equal(model.module.spare.weight, Spare().spare.weight.double())
