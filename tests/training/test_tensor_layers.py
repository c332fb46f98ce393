"""Divided layers give outputs and gradients of the whole, for any widths and numbers of parts.

The processes of a group are threads here, each with its own copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.errors import NotDistributable
from stratagem.state.divided_update import Division
from stratagem.training.layer_graph import run_graph, shapes_of, trace
from stratagem.training.tensor_layers import Split, dropped, widths
from stratagem.training.tensor_plan import TensorPlan, make_plan, named_layers
from stratagem.training.tensor_program import OPENED, OwnParts, divided_program, table
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.shared_scratch import SharedScratch

pytestmark = pytest.mark.timeout(120)

Found = tuple[Tensor, dict[str, Tensor], TensorPlan]


def each(count: int, work: Callable[[SharedScratch], Any]) -> list[Any]:
    """What every member of a group makes of it."""
    control = Segment(SharedMemoryCollective.control_size(count))
    groups = [SharedScratch(SharedMemoryCollective(r, count, control)) for r in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, groups))


def planned(module: nn.Module, x: Tensor, count: int, asked: dict[str, str]) -> Any:
    graph = trace(module, x, OPENED)
    return graph, make_plan(graph, count, asked, shapes_of(graph, [x]))


def divided(
    module: nn.Module, x: Tensor, count: int, asked: dict[str, str]
) -> tuple[list[Tensor], list[dict[str, Tensor]], TensorPlan]:
    """Everybody's outputs, and whole gradients put together of everybody's parts."""

    copies = [copy.deepcopy(module) for _ in range(count)]
    plans = [planned(own, x, count, asked) for own in copies]

    def work(group: SharedScratch) -> Found:
        own, (graph, plan) = copies[group.rank], plans[group.rank]
        parts = OwnParts(plan, list(own.parameters()), group.rank, count)
        output = divided_program(graph, plan, parts, group)(x)
        output.square().sum().backward()
        grads = {n: parts.of(p).grad for n, p in own.named_parameters()}
        ways = {n: plan.divided.get(p) for n, p in own.named_parameters()}
        return output.detach(), grads, ways  # type: ignore[return-value]

    found = each(count, work)
    wholes: list[dict[str, Tensor]] = []
    for rank in range(count):
        whole: dict[str, Tensor] = {}
        for name, param in module.named_parameters():
            way: Division | None = found[0][2][name]
            if way is None:
                whole[name] = found[rank][1][name]
                continue
            parts = [grads[name] for _, grads, _ in found]
            whole[name] = torch.cat(parts, way.dim).reshape(param.shape)
        wholes.append(whole)
    return [output for output, _, _ in found], wholes, found[0][2]


def same(module: nn.Module, x: Tensor, count: int, asked: dict[str, str]) -> Any:
    outputs, gradients, ways = divided(module, x, count, asked)
    one = copy.deepcopy(module)
    expected = one(x)
    expected.square().sum().backward()
    for output, gradient in zip(outputs, gradients, strict=True):
        assert torch.allclose(output, expected, 1e-12, 1e-12)
        for name, param in one.named_parameters():
            assert torch.allclose(gradient[name], param.grad, 1e-10, 1e-10), name  # type: ignore[arg-type]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    return ways


def choice(draw: st.DataObject, module: nn.Module, count: int) -> dict[str, str]:
    """A plan for some of the layers."""
    graph = trace(module, None, OPENED)
    found = {}
    for name, layer in named_layers(graph).items():
        ways = [how for how, width in widths(layer).items() if width >= count]
        way = draw.draw(st.sampled_from([None, "replicate", *ways]))
        if way is not None:
            found[name] = way
    return found


def test_an_encoder_with_a_hook_stays_whole() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    module = nn.Sequential(encoder, nn.Linear(8, 2))
    assert [layer.name for layer in trace(module).layers] == ["0.layers.0", "0.layers.1", "1"]
    calls = []
    encoder.register_forward_hook(lambda *given: calls.append(1))
    graph = trace(module)
    assert [layer.name for layer in graph.layers] == ["0", "1"]
    calls.clear()
    run_graph(graph, [torch.randn(2, 3, 8)])
    assert calls == [1]


numbers = st.integers(1, 9)


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 4), st.lists(numbers, min_size=3, max_size=5), st.data())
def test_linear_layers_of_any_width(count: int, sizes: list[int], draw: st.DataObject) -> None:
    sizes[draw.draw(st.integers(0, len(sizes) - 1))] = count + 1  # one of them can be divided
    torch.manual_seed(sum(sizes))
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b, bias=draw.draw(st.booleans())), nn.Tanh()]
    module = nn.Sequential(*layers).double()
    same(module, torch.randn(3, sizes[0]).double(), count, choice(draw, module, count))


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 3), numbers, numbers, st.booleans(), st.data())
def test_convolutions_of_any_channels_with_batch_norm(
    count: int, first: int, second: int, flat: bool, draw: st.DataObject
) -> None:
    torch.manual_seed(first * 10 + second)
    behind = [nn.Flatten(), nn.Linear(4 * second, 3)] if flat else [nn.Conv2d(second, 2, 1)]
    module = nn.Sequential(
        nn.Conv2d(4, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(inplace=True),
        nn.Conv2d(first, second, 3, padding="same"),
        nn.BatchNorm2d(second, momentum=None),
        nn.MaxPool2d(2),
        *behind,
    ).double()
    same(module, torch.randn(5, 4, 4, 4).double(), count, choice(draw, module, count))


class Words(nn.Module):
    """An encoder between an embedding and a head."""

    def __init__(self, heads: int, wide: int, tied: bool, norm_first: bool) -> None:
        super().__init__()
        width = 2 * heads
        self.embedding = nn.Embedding(11, width, padding_idx=3)
        kind = nn.TransformerEncoderLayer(
            width, heads, wide, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(kind, 1, enable_nested_tensor=False)
        self.gate, self.up = nn.Linear(width, wide), nn.Linear(width, wide)
        self.down = nn.Linear(wide, width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        h = self.encoder(self.embedding(x), mask, x == 3)
        h = h + self.down(torch.sigmoid(self.gate(h)) * self.up(h))
        out: Tensor = self.head(h)
        return out


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 3), st.integers(1, 4), numbers, st.booleans(), st.booleans(), st.data())
def test_attention_embeddings_and_ties(
    count: int, heads: int, wide: int, tied: bool, norm_first: bool, draw: st.DataObject
) -> None:
    torch.manual_seed(heads * 10 + wide)
    module = Words(heads, wide, tied, norm_first).double()
    x = torch.randint(0, 11, (4, 5))
    x[:, 0] = 1
    asked = choice(draw, module, count)
    try:
        same(module, x, count, asked)
    except NotDistributable as error:  # of ties that are asked to be divided in two ways
        assert tied and "shares a parameter" in str(error)


def test_pairs_cross_once() -> None:
    """Columns, rows: nothing crosses between, and a gated pair of columns stays divided."""
    module = Words(4, 6, tied=True, norm_first=False).double()
    x = torch.randint(0, 11, (4, 5))
    graph, plan = planned(module, x, 2, {})
    lines = {line.split()[0]: line for line in table(graph, plan, 2).splitlines()}
    assert "gathered" not in lines["up"] and "gathered" not in lines["gate"]
    assert "rows" in lines["down"] and "outputs added up" in lines["down"]
    assert "heads" in lines["encoder.layers.0.self_attn"]
    assert "columns" in lines["embedding"] and "rows" in lines["head"]  # the same part of the tie
    assert plan.divided[module.embedding.weight] == Division((11, 8), 1, (0, 4, 8))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_dropout_of_parts_is_that_of_the_whole(order: tuple[int, ...]) -> None:
    """Also where memory is in another order than axes are."""
    x = torch.randn(4, 5, 7).permute(order)
    torch.manual_seed(3)
    expected = nn.functional.dropout(x, 0.4)
    for dim in range(3):
        size = x.shape[dim]
        split = Split(dim, (0, 1, size - 1, size))
        parts = []
        for rank in range(3):
            torch.manual_seed(3)
            parts.append(dropped(split.part(x, rank), 0.4, split, rank))
        assert torch.equal(torch.cat(parts, dim), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.lists(st.integers(0, 5), min_size=2, max_size=4), st.integers(0, 1))
def test_sums_and_gathers(count: int, shape: list[int], dim: int) -> None:
    whole = torch.randn(*shape)
    sizes = [torch.tensor_split(torch.arange(shape[dim]), count)[r].numel() for r in range(count)]
    parts = list(torch.split(whole, sizes, dim))

    def work(group: SharedScratch) -> Any:
        found = []
        for _ in range(3):  # tables are used by turns
            found.append(group.gather(parts[group.rank], dim, sizes))
            found.append(group.sum(whole * (group.rank + 1)))
        return found

    for found in each(count, work):
        for gathered, total in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(gathered, whole)
            assert torch.allclose(total, whole * (count * (count + 1) / 2), atol=1e-5)
