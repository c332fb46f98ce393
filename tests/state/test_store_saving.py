"""State saved on K servers as torch would save it, and loaded on K' servers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.errors import UsageError
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import (
    FixedShards,
    Piece,
    assemble,
    assemble_values,
    cut,
    cut_values,
    partition,
    states_of,
)
from tests.state.store_support import SHAPES, Servers, close, gradients, parameters
from tests.state.test_store import SETTINGS, plain_step

O = torch.optim  # noqa: E741
EACH = pytest.mark.parametrize("name", SETTINGS)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file that torch reads without running anything."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def grouped(name: str) -> Any:
    """The optimizer with its parameters in two groups and not in the model's order."""

    def make(params: list[nn.Parameter]) -> O.Optimizer:
        return SETTINGS[name](
            [{"params": [params[4], params[1]]}, {"params": [params[2], params[0]], "lr": 0.05}]
        )

    return make


@EACH
@pytest.mark.parametrize(("servers", "others"), [(1, 3), (3, 2), (2, 1), (4, 4)])
def test_from_k_servers_to_others_and_to_none(name: str, servers: int, others: int) -> None:
    """plain -> K servers -> K' servers -> plain, one or two steps in each, equals plain."""
    make = grouped(name)
    params, reference = parameters(), parameters()
    optimizer, whole = make(params), make(reference)
    for step in range(7):
        unused = [1] if step < 3 else []  # the first servers never see variable 1
        plain_step(reference, whole, gradients(step, unused=unused))
    plain_step(params, optimizer, gradients(0, unused=[1]))
    for count, steps in ((servers, (1, 2)), (others, (3, 4))):
        spread = Servers(params, optimizer, count)
        states, settings = states_of(saved(optimizer.state_dict()), spread.recipe.groups)
        spread.load(states)
        for store in spread.stores:
            store.set_settings(settings)
        for step in steps:
            grads = gradients(step, unused=[1] if step < 3 else [])
            spread.each(grads, lambda store, grad, used: store.apply_one(grad, 1.0, used))
        params = [nn.Parameter(value) for value in spread.values()]
        optimizer = make(params)
        optimizer.load_state_dict(saved(spread.state_dict()))
    for step in (5, 6):
        plain_step(params, optimizer, gradients(step))
    close(params, reference)
    ours, plain = optimizer.state_dict()["state"], whole.state_dict()["state"]
    assert ours.keys() == plain.keys()
    for key, state in plain.items():
        assert ours[key].keys() == state.keys()
        for item, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == ours[key][item].shape and value.dtype == ours[key][item].dtype
                close([ours[key][item]], [value], 1e-5)
            else:
                assert ours[key][item] == value


@EACH
def test_put_together_is_what_torch_has(name: str) -> None:
    params = parameters()
    optimizer = grouped(name)(params)
    spread = Servers(params, optimizer, 3)
    plain_step(params, optimizer, gradients(0, unused=[2]))
    spread.each(gradients(0, unused=[2]), lambda store, grad, used: store.apply_one(grad, 1, used))
    plain, ours = optimizer.state_dict(), spread.state_dict()
    assert list(ours) == list(plain)
    for a, b in zip(ours["param_groups"], plain["param_groups"], strict=True):
        assert list(a) == list(b)
        assert a == {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in b.items()}
    assert ours["state"].keys() == plain["state"].keys()


def test_sparse_state_of_pieces_that_were_never_used() -> None:
    """Rows of a piece without state are as if never used; the counter is the furthest."""
    params = parameters(shapes=[(6, 2)])
    spread = Servers(params, O.SparseAdam(params), 3)
    spread.stores[1].add_rows(0, torch.tensor([1]), torch.ones(1, 2), 1.0)
    for store in spread.stores:
        store.apply(1.0)
    for store in spread.stores[:2]:
        store.add_rows(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2), 1.0)
        store.apply(1.0)
    (state,) = spread.state_dict()["state"].values()
    assert state["step"] == 2
    assert state["exp_avg"].any(1).tolist() == [False, False, False, True, False, False]
    again = Servers(params, O.SparseAdam(params), 2)
    again.load(spread.states())
    assert torch.equal(again.states()[0]["exp_avg"], state["exp_avg"])


def test_state_of_other_shapes_stays_whole() -> None:
    """Adafactor keeps a row and a column: they move from server to server, and are never cut."""
    params = parameters()
    optimizer = SETTINGS["adafactor"](params)
    spread = Servers(params, optimizer, 2)
    spread.each(gradients(0), lambda store, grad, used: store.apply_one(grad, 1.0))
    shapes = {k: tuple(v.shape) for k, v in spread.states()[0].items()}
    assert (7, 1) in shapes.values() and (1, 3) in shapes.values()
    cuts = partition(SHAPES, 4, 2, FixedShards(2))
    with pytest.raises(UsageError, match="cannot be cut"):
        cut(spread.states(), cuts, SHAPES)


def test_pieces_must_all_be_there() -> None:
    pieces = [Piece(0, 0, 2, 0), Piece(0, 3, 5, 1)]
    for wrong in (pieces, pieces[:1], [*pieces, Piece(0, 1, 3, 2)]):
        with pytest.raises(UsageError, match="do not cover"):
            assemble(wrong, [{} for _ in wrong], [(5,)])


def test_another_models_state_is_refused() -> None:
    params = parameters()
    recipe = describe(O.SGD(params[:2]), params)
    with pytest.raises(UsageError, match="do not fit"):
        states_of(O.SGD(params).state_dict(), recipe.groups)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_values_cut_and_put_together(servers: int) -> None:
    shapes = [*SHAPES, (0, 3)]
    whole = [p.detach() for p in parameters(shapes=shapes)]
    pieces = partition(shapes, 4, servers, FixedShards(servers))
    flats = {s: cut_values(whole, [p for p in pieces if p.server == s]) for s in range(servers)}
    assert sum(flat.numel() for flat in flats.values()) == sum(t.numel() for t in whole)
    for a, b in zip(assemble_values(pieces, flats, shapes), whole, strict=True):
        assert torch.equal(a, b)
