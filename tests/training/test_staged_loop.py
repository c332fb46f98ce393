"""A loop of one's own through the stages of a pipeline, or divided layers: the weights of one
device.

The reference is the same loop without a strategy.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.clock import in_time
from tests.spread import watched
from tests.strategies.test_pipeline import Knotted, deep, doubles
from tests.support import cpus, distance, moved

pytestmark = pytest.mark.timeout(120)

Loop = Callable[[Callable[..., Any], nn.Module], Any]


@pytest.fixture(scope="module")
def pair() -> Iterator[sg.PipelineStrategy]:
    with sg.PipelineStrategy(cpus(2), 3) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[sg.PipelineStrategy]:
    with sg.PipelineStrategy(cpus(3), 4, "interleaved") as made:
        yield made


@pytest.fixture(scope="module")
def mesh() -> Iterator[sg.Mesh]:
    patient = sg.Patience(answer=30.0)  # of four processes on two cores
    with sg.Mesh(data=2, stage=2, microbatches=2, patience=patient) as made:
        yield made


@pytest.fixture(scope="module")
def divided() -> Iterator[sg.TensorParallelStrategy]:
    with sg.TensorParallelStrategy(cpus(2)) as made:
        yield made


def both(loop: Loop, module: nn.Module, on: sg.Strategy) -> tuple[Any, Any]:
    """What the loop returns without a strategy and with it; the weights must be the same, must have
    moved, and every stage must have computed."""
    one = copy.deepcopy(module)
    expected = loop(lambda *given: given, one)

    def run() -> Any:
        mine = copy.deepcopy(module)
        return loop(on.prepare, mine), mine

    told, work = watched(lambda: on.run(run), on)
    (found, other), *others = told
    assert others == [None] * (len(on.devices) - 1)  # the loop runs once
    assert distance(one, other) < 1e-12
    assert moved(module, one)
    assert all(work.rows), work.rows
    return expected, found


def training(prepare: Callable[..., Any], model: nn.Module) -> Any:
    """Clips, adds a penalty, accumulates, follows a schedule, and looks at what it has."""
    x, y = doubles(41)
    y[::5] = -100
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(TensorDataset(x, y), batch_size=13)  # 13, 13, 13, 2
    model, optimizer, loader = prepare(model, optimizer, loader)
    seen = []
    for epoch in range(3):
        for number, (rows, targets) in enumerate(loader):
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = F.cross_entropy(model(rows), targets).sqrt() + 1e-2 * penalty
            loss.backward()
            if number != 1:  # the second batch is added to the third
                seen.append(float(clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad(set_to_none=epoch != 1)
                schedule.step()
            seen.append(loss.item())
            assert sg.current_replica().count == 1
        model.eval()
        with torch.no_grad():
            seen.append(model(x).sum().item())
        model.train()
    momenta = [s["exp_avg"].clone() for _, s in sorted(optimizer.state_dict()["state"].items())]
    return torch.tensor(seen), momenta


@pytest.mark.parametrize("stages", ["mesh", "pair", "three", "divided"])
def test_the_loop_of_one_device(stages: str, request: pytest.FixtureRequest) -> None:
    """Losses, norms, outputs, momenta and weights."""
    on = request.getfixturevalue(stages)
    (seen, momenta), (ours, other) = both(training, deep(6), on)
    assert torch.allclose(seen, ours, 1e-12, 1e-12)
    assert len(momenta) == len(other) == 16
    assert all(torch.allclose(a, b, 1e-12, 1e-12) for a, b in zip(momenta, other, strict=True))


def paths(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of dicts and lists, and where they are."""
    if not isinstance(tree, dict | list):
        yield (), tree
        return
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from (((key, *inner), leaf) for inner, leaf in paths(part))


@pytest.mark.parametrize("stages", ["pair", "mesh", "divided"])
def test_what_a_loop_saves_is_what_one_device_saves(
    stages: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Weights, the optimizer's state and the whole model, between two steps; all of it is plain,
    and another loop goes on with it as the one that has saved it."""

    def loop(prepare: Callable[..., Any], model: nn.Module) -> list[Any]:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer, _ = prepare(model, optimizer, None)
        saved = []
        for step in range(4):
            x, y = doubles(7)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, 3):
                whole = {"weights": model.state_dict(), "state": optimizer.state_dict()}
                torch.save(whole, tmp_path / "whole.pt")
                torch.save(model, tmp_path / "model.pt")
                saved.append(torch.load(tmp_path / "whole.pt", weights_only=True))
                saved.append(torch.load(tmp_path / "model.pt", weights_only=False).state_dict())
        return saved

    net = deep()
    one, other = both(loop, net, request.getfixturevalue(stages))
    expected, found = ({str(path): leaf for path, leaf in paths(each)} for each in (one, other))
    assert expected.keys() == found.keys()
    for path, leaf in expected.items():
        same = torch.allclose if isinstance(leaf, Tensor) else operator.eq
        assert same(leaf, found[path]), path
    again = copy.deepcopy(net)  # on one device, from what the stages have saved in the midst
    again.load_state_dict(other[0]["weights"])
    optimizer = torch.optim.Adam(again.parameters())
    optimizer.load_state_dict(other[0]["state"])
    for _ in range(2):
        x, y = doubles(7)
        F.cross_entropy(again(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    final = other[2]["weights"]
    assert all(torch.allclose(v, final[k], 1e-12, 1e-12) for k, v in again.state_dict().items())


@pytest.mark.parametrize("stages", ["pair", "mesh"])
def test_every_number_of_rows(stages: str, request: pytest.FixtureRequest) -> None:
    """From 1 to 2M + 1, in one training; a row of the mesh may have none."""

    def loop(prepare: Callable[..., Any], model: nn.Module) -> None:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, _ = prepare(model, optimizer, None)
        for rows in range(1, 8):
            x, y = doubles(rows)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    both(loop, deep(), request.getfixturevalue(stages))


@pytest.mark.parametrize("stages", ["pair", "mesh", "divided"])
def test_skips_ties_names_and_several_passes(stages: str, request: pytest.FixtureRequest) -> None:
    """Two outputs in one loss, one that is thrown away, a forward in eval mode with gradients,
    frozen parameters, a state that is loaded on the way, a copy of the model."""
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 11, (2, 9, 5), generator=dice)
    factor = torch.rand(9, 1, 1, generator=dice).double()

    def loop(prepare: Callable[..., Any], model: Any) -> Any:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer, _ = prepare(model, optimizer, None)
        for step in range(4):
            model.train(step != 2)
            model.rnn.requires_grad_(step != 1)
            model(x[:3])
            output = model(x[:4], factor=factor[:4])
            output.mul_(0.5)
            loss = F.cross_entropy(output, y[:4]) * F.cross_entropy(model(x), y)
            loss.backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad = param.grad * 0.9
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                state = copy.deepcopy(optimizer.state_dict())
                for each in state["state"].values():
                    each["exp_avg"] *= 3
                optimizer.load_state_dict(state)
        with torch.no_grad():
            return copy.deepcopy(model)(x)

    one, other = both(loop, Knotted().double(), request.getfixturevalue(stages))
    assert torch.allclose(one, other, 1e-12, 1e-12)


def test_dropout_is_drawn_by_microbatch_and_can_be_repeated(pair: sg.PipelineStrategy) -> None:
    x, y = doubles(12)
    noisy = nn.Sequential(nn.Linear(6, 64), nn.Dropout(), nn.Linear(64, 64), nn.Dropout()).double()

    def loop() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        model: Any = nn.Sequential(copy.deepcopy(noisy), nn.Linear(64, 4).double())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, _ = pair.prepare(model, optimizer)
        output = model(x)
        F.cross_entropy(output, y).backward()
        return output.detach(), model[1].weight.grad.clone()

    first, second = pair.run(loop)[0], pair.run(loop)[0]
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[1].abs().sum() > 0


def test_draws_gradients_and_state_of_the_loop(pair: sg.PipelineStrategy) -> None:
    """The loop's own random numbers, a shuffle, gradients in other memory, state that is replaced,
    a hook behind steps: all as on one device."""

    def loop(prepare: Callable[..., Any], model: nn.Module) -> Tensor:
        torch.manual_seed(4)
        x, y = doubles(29)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(x, y), batch_size=9, shuffle=True)
        model, optimizer, loader = prepare(model, optimizer, loader)
        optimizer.register_step_post_hook(lambda *_: model[0].weight.data.mul_(0.99))
        for epoch in range(4):
            for rows, targets in loader:
                F.cross_entropy(model(rows + 0.1 * torch.randn_like(rows)), targets).backward()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.data = param.grad.data * 0.5
                optimizer.step()
                optimizer.zero_grad()
            for param in model.parameters() if epoch == 1 else ():
                optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
            if epoch == 2:
                optimizer.state.clear()
        return torch.rand(())

    one, other = both(loop, deep(), pair)
    assert one == other


@pytest.mark.parametrize("stages", ["pair", "divided"])
@pytest.mark.parametrize("kind", ["data", "number"])
def test_what_the_loop_writes_between_two_updates(
    stages: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Weights in other memory before step(), as SAM by hand has it; Adam's step in place."""

    def loop(prepare: Callable[..., Any], model: nn.Module) -> None:
        x, y = doubles(9)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        model, optimizer, _ = prepare(model, optimizer, None)
        for number in range(3):
            F.cross_entropy(model(x), y).backward()
            for param in model.parameters() if kind == "data" else ():
                param.data = param.data * 0.9
            optimizer.step()
            optimizer.zero_grad()
            if kind == "number" and number == 1:
                for state in optimizer.state.values():
                    state["step"].zero_()

    both(loop, deep(), request.getfixturevalue(stages))


class Picky(nn.Module):
    """Raises for some values."""

    def __init__(self, bad: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bad, self.calls = bad, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.bad(x).any():
            raise ValueError("no such luck")
        return x


@pytest.mark.parametrize(("stages", "behind"), [("pair", 0), ("mesh", 0), ("mesh", 1)])
def test_a_loop_goes_on_behind_a_forward_that_raised(
    stages: str, behind: int, request: pytest.FixtureRequest
) -> None:
    """In the first stage and in the last, of one pipeline, also of the second one of a mesh; also
    when the model is split."""
    on = request.getfixturevalue(stages)

    def loop(prepare: Callable[..., Any], model: nn.Module) -> list[int]:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer, _ = prepare(model, optimizer, None)
        caught = []
        for number, bad in enumerate([1e9, 0, 1e9, 0, float("nan"), 0, float("nan"), 1e9, 0]):
            x, y = doubles(7 + number % 3)
            # the first rows, also those that a split is tried on; or the last, of a mesh's row 1
            x[-1 - number % 3 if behind else number % 4] += bad
            try:
                output = model(x)
            except (ValueError, sg.ReplicaFailed) as error:
                assert "no such luck" in str(error)
                caught.append(number)
                continue
            F.cross_entropy(output, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return caught

    far, lost = Picky(lambda x: x.abs() > 1e3), Picky(torch.isnan)
    layers = nn.Linear(6, 8), far, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), lost, nn.Linear(8, 4)
    one, other = both(loop, nn.Sequential(*layers).double(), on)
    assert one == other == [0, 2, 4, 6, 7]


class _Refusing(torch.autograd.Function):
    """Raises on the last stage of a mesh's row 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if sg.current_replica().index == 3:
            raise ValueError("no such luck")
        return grads[0]


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not x.isnan().any()
        found: Tensor = _Refusing.apply(x)  # type: ignore[no-untyped-call]
        return found


def test_a_backward_that_raises_in_another_row_ends_the_loop(mesh: sg.Mesh) -> None:
    def loop() -> None:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Refusing(), nn.Linear(8, 4)).double()
        model, _, _ = mesh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(doubles(6)[0]).sum().backward()

    with pytest.raises(sg.ReplicaFailed, match=r"(?s)^replica 3 raised .*no such luck"):
        mesh.run(loop)


def test_divided_layers_do_not_go_on_behind_a_forward_that_raised(
    divided: sg.TensorParallelStrategy,
) -> None:
    def loop() -> None:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        model, _, _ = divided.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(doubles(3)[0])
        with contextlib.suppress(RuntimeError):
            model(doubles(3)[0][:, :5])
        model(doubles(3)[0])

    with pytest.raises(sg.StratagemError, match="a pass through the model has failed"):
        divided.run(loop)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if sg.current_replica().index == 1:
            raise ValueError("no such luck")
        return x


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Dying(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e3 and sg.current_replica().index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


@pytest.mark.parametrize("stages", ["pair", "divided"])
def test_a_process_that_dies_is_named(stages: str, request: pytest.FixtureRequest) -> None:
    """In the second forward, in the midst of a loop that waits for it."""
    on = request.getfixturevalue(stages)

    def loop() -> None:
        model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4), Dying()).double()
        model, optimizer, _ = on.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(doubles(7)[0]).sum().backward()
        optimizer.step()
        model[0].bias.data.fill_(1e5)
        model[1].weight.data.fill_(1.0)
        model(doubles(7)[0]).sum().backward()

    began = time.monotonic()
    with pytest.raises(sg.ReplicaLost, match=r"replica 1 .* was killed by SIGKILL"):
        on.run(loop)
    in_time(time.monotonic() - began, 5.0)
    both(training, deep(), on)  # it can be used again


def _twice(model: Any, x: Tensor) -> None:
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a batch norm": (nn.BatchNorm1d(6), None, "BatchNorm, which looks at all rows"),
    "rows that look at each other": (Mixing(), None, "rows of a batch look at each other"),
    "an input with a gradient": (
        nn.Identity(),
        lambda model, x: model(x.clone().requires_grad_()),
        "requires a gradient",
    ),
    "backward twice": (nn.Identity(), _twice, "been through a backward already"),
    "a stage that raises": (Broken(), None, "ValueError: no such luck"),
}


def test_a_mesh_refuses_buffers_that_a_forward_writes(mesh: sg.Mesh) -> None:
    class Counting(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen[1] += (x > 1e9).sum()  # none in the first batch
            return x

    def loop() -> None:
        model: Any = nn.Sequential(nn.Linear(6, 6), Counting(), nn.Linear(6, 4)).double()
        model, _, _ = mesh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(doubles(7)[0])

    with pytest.raises(sg.NotDistributable, match=r"writes the buffer '1\.seen'"):
        mesh.run(loop)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("stages", ["pair", "mesh"])
def test_rows_are_tried_behind_a_batch_of_one(stages: str, request: pytest.FixtureRequest) -> None:
    on = request.getfixturevalue(stages)

    def loop() -> None:
        model: Any = nn.Sequential(nn.Linear(6, 6), Centred(), nn.Linear(6, 4)).double()
        model, _, _ = on.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(doubles(1)[0])
        with pytest.raises(sg.NotDistributable, match="rows of a batch look at each other"):
            model(doubles(7)[0])

    on.run(loop)


@pytest.mark.parametrize("stages", ["pair", "mesh"])
def test_what_is_trained_may_change_before_backward(
    stages: str, request: pytest.FixtureRequest
) -> None:
    """In the first stage and in the last; torch leaves out what is frozen by then."""

    def loop(prepare: Callable[..., Any], model: nn.Module) -> None:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        named = [p for _, p in model.named_parameters()]
        model, optimizer, _ = prepare(model, optimizer, None)
        x, y = doubles(7)
        for changed in ((0, False), (0, True), (-2, False), (-2, True)):
            output = model(x)
            named[changed[0]].requires_grad_(changed[1])
            F.cross_entropy(output, y).backward()
            optimizer.step()
            optimizer.zero_grad()

    both(loop, deep(), request.getfixturevalue(stages))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(pair: sg.PipelineStrategy, case: str) -> None:
    layer, act, words = REFUSED[case]
    x, _ = doubles(7)

    def loop() -> None:
        model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), layer, nn.Linear(6, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _, _ = pair.prepare(model, optimizer)
        (act or (lambda model, x: model(x)))(model, x)

    with pytest.raises(sg.StratagemError, match=words):
        pair.run(loop)


def _none(model: Any, optimizer: Any) -> None:
    pass


def _backward(**how: Any) -> Callable[[Any, Any], Any]:
    def run(model: Any, optimizer: Any) -> None:
        if "inputs" in how:
            how["inputs"] = list(model[0].parameters())
        model(doubles(7)[0]).sum().backward(**how)

    return run


def _take_last_group(model: Any, optimizer: Any) -> None:
    """Have the optimizer train all but the last layer."""
    last = {id(param) for param in model[3].parameters()}
    group = optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if id(param) not in last]


#: what is done before prepare, behind the first step, and what is said
CHANGES: dict[str, tuple[Any, Any, str]] = {
    "an attribute": (_none, lambda m, o: setattr(m[1], "factor", 2.0), "the attribute '1.factor'"),
    "in inference mode": (
        _none,
        lambda m, o: setattr(m[1], "factor", torch.inference_mode()(torch.ones)(2)),
        "the attribute '1.factor'",
    ),
    "a rate": (_none, lambda m, o: setattr(m[2], "p", 0.5), "the attribute '2.p'"),
    "a layer": (_none, lambda m, o: m.__setitem__(1, nn.ReLU()), "'1' of the model has been repl"),
    "a weight": (
        _none,
        lambda m, o: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 2)),
        "'0.weight' of the model has been replaced",
    ),
    "a buffer": (
        lambda m, o: m[0].register_buffer("seen", torch.zeros(2)),
        lambda m, o: setattr(m[0], "seen", torch.ones(2)),
        "'0.seen' of the model has been replaced",
    ),
    "assigned": (
        _none,
        lambda m, o: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
        "without assign=True",
    ),
    "a module's hook": (lambda m, o: m[0].register_forward_hook(_none), _none, "module '0' has a"),
    "a later one": (_none, lambda m, o: m[0].register_forward_hook(_none), "module '0' has a hook"),
    "a weight's hook": (
        lambda m, o: m[0].weight.register_hook(lambda g: g),
        _none,
        "parameter '0.weight' has a hook",
    ),
    "a later one on a weight": (
        _none,
        lambda m, o: m[0].weight.register_post_accumulate_grad_hook(lambda p: None),
        "parameter '0.weight' has a hook",
    ),
    "a step's hook": (
        lambda m, o: o.register_step_post_hook(lambda *_: None),
        _none,
        "the optimizer has a hook",
    ),
    "a later one on steps": (
        _none,
        lambda m, o: o.register_step_pre_hook(lambda *_: None),
        "the optimizer has a hook",
    ),
    "a group": (
        _take_last_group,
        lambda m, o: o.add_param_group({"params": m[3].parameters(), "lr": 0.01}),
        "add the parameters before prepare",
    ),
    "some gradients": (_none, _backward(inputs=()), r"backward\(inputs=\)"),
    "a graph of gradients": (_none, _backward(create_graph=True), "create_graph=True"),
    "gradients": (
        _none,
        lambda m, o: torch.autograd.grad(m(doubles(7)[0]).sum(), [*m.parameters()]),
        r"torch\.autograd\.grad",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_other_stages_would_not_follow(pair: sg.PipelineStrategy, case: str) -> None:
    before, behind, words = CHANGES[case]
    x, _ = doubles(7)

    def loop() -> str:
        layers = nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 4)
        model: Any = nn.Sequential(*layers).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        before(model, optimizer)
        try:
            model, optimizer, _ = pair.prepare(model, optimizer)
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                behind(model, optimizer)
        except sg.NotDistributable as refusal:  # here, so that the stages live on
            return str(refusal)
        return "nothing"

    assert re.search(words, pair.run(loop)[0])


def test_a_group_that_is_added_before_the_first_batch(pair: sg.PipelineStrategy) -> None:
    x, _ = doubles(7)

    def loop() -> str:
        model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        model, optimizer, _ = pair.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        optimizer.add_param_group({"params": model[2].parameters()})
        try:
            model(x)
        except sg.NotDistributable as refusal:
            return str(refusal)
        return "nothing"

    assert "add the parameters before prepare" in pair.run(loop)[0]


def test_loops_that_are_refused(pair: sg.PipelineStrategy) -> None:
    class Mine(torch.optim.SGD):
        pass

    def closure() -> None:
        model = deep()
        _, optimizer, _ = pair.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer.step(lambda: 0.0)

    def own() -> None:
        model = deep()
        pair.prepare(model, Mine(model.parameters(), lr=0.1))

    def second() -> None:
        for model in (deep(), deep()):
            pair.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def again() -> None:
        model = deep()
        for _ in range(2):
            pair.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def resumed() -> None:
        model = deep()
        pair.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), resume="run/")

    for loop, words in (
        (closure, "without a closure"),
        (own, "Mine"),
        (second, "call the second model from"),
        (again, "this model is prepared already"),
        (resumed, r"use sg\.Model"),
    ):
        with pytest.raises((sg.NotDistributable, sg.UsageError), match=words):
            pair.run(loop)
