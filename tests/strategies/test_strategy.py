"""The methods of a strategy on real replicas: run, reduce, gather, scope, prepare, close."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.replicas import zygote
from tests.clock import PATIENCE
from tests.support import by_hand, data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(60)

OPS = ["shared_memory", "ring", "hierarchical", "one_device"]


@pytest.fixture(scope="module")
def three() -> Iterator[sg.MirroredStrategy]:
    with contextlib.closing(strategy(3, cross_device_ops="ring")) as made:
        yield made


# --- run -----------------------------------------------------------------------------------------


def test_results_come_in_order(three: sg.MirroredStrategy) -> None:
    def work(base: int) -> tuple[int, int, str, bool]:
        replica = sg.current_replica()
        return base + replica.index, replica.count, replica.name, replica.is_chief

    assert three.run(work, 10) == [
        (10, 3, "replica 0", True),
        (11, 3, "replica 1", False),
        (12, 3, "replica 2", False),
    ]
    pids = three.run(os.getpid)
    assert pids[0] == os.getpid() and len(set(pids)) == 3
    assert three.run(os.getpid) == pids, "replicas stay between calls"


def test_one_device_runs_here() -> None:
    made = strategy(1)
    assert made.run(os.getpid) == [os.getpid()]
    assert made.num_replicas_in_sync == 1
    assert made.run(lambda: made.run(lambda: 5)) == [[5]], "nothing to be confused by"


def test_run_inside_run_is_refused(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"already runs on every replica.*current_replica"):
        two.run(lambda: two.run(os.getpid))
    assert two.run(lambda: 1) == [1, 1]


def test_fit_inside_run_is_refused(two: sg.MirroredStrategy) -> None:
    def work() -> None:
        model = sg.Model(mlp(), two)
        model.compile("sgd", "cross_entropy")
        model.fit(*data(8), batch_size=4, verbose=0)

    with pytest.raises(sg.UsageError, match="cannot be nested"):
        two.run(work)


def test_outside_a_replica_is_alone() -> None:
    replica = sg.current_replica()
    assert (replica.index, replica.count, replica.is_chief) == (0, 1, True)
    assert replica.all_reduce(torch.tensor([3.0])).tolist() == [3.0]
    replica.barrier()


def test_one_replica_is_the_chief(two: sg.MirroredStrategy) -> None:
    assert two.is_chief
    assert two.run(lambda: two.is_chief) == [True, False]


def test_inside_replicas_talk(three: sg.MirroredStrategy) -> None:
    def work() -> tuple[list[float], float, float, list[int]]:
        replica = sg.current_replica()
        mine = torch.tensor([replica.index + 1.0])
        told = replica.broadcast(torch.tensor([10.0 * replica.index]), source=2)
        sizes = [len(part) for part in replica.all_gather(torch.ones(replica.index))]
        return (
            replica.all_reduce(mine).tolist(),
            replica.all_reduce(mine, "max").item(),
            told.item(),
            sizes,
        )

    assert three.run(work) == [([6.0], 3.0, 20.0, [0, 1, 2])] * 3


def test_inside_numbers_are_reduced_too(three: sg.MirroredStrategy) -> None:
    def work() -> tuple[float, float, list[int]]:
        replica = sg.current_replica()
        parts = [int(part) for part in replica.all_gather(replica.index)]
        return float(replica.all_reduce(3.0)), float(replica.all_reduce(True, "mean")), parts

    assert three.run(work) == [(9.0, 1.0, [0, 1, 2])] * 3
    assert float(sg.current_replica().all_reduce(3)) == 3


def test_each_replica_has_its_own_dice(three: sg.MirroredStrategy) -> None:
    """The replicas' rngs follow the caller's seed; the caller's rng goes on as if alone."""

    def roll() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    def seeded(seed: int) -> list[list[tuple[float, float, float]]]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return [three.run(roll), three.run(roll)]

    first = seeded(0)
    assert seeded(0) == first
    other = seeded(1)
    for kind in range(3):
        drawn = [each[kind] for run in (*first, *other) for each in run]
        assert len(set(drawn)) == len(drawn), "drawn twice"
    torch.manual_seed(0)
    assert [first[0][0][0], first[1][0][0]] == torch.rand(2).tolist()


# --- reduce and gather: the numbers of facts/tf-distribute.md ------------------------------------

EVEN = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
UNEVEN = [[1.0, 2.0, 3.0], [10.0]]
REDUCED = [
    (EVEN, "sum", None, [11.0, 22.0, 33.0]),
    (EVEN, "mean", None, [5.5, 11.0, 16.5]),
    (EVEN, "sum", 0, 66.0),
    (EVEN, "mean", 0, 11.0),
    (EVEN, "max", None, [10.0, 20.0, 30.0]),
    (EVEN, "min", 0, 1.0),
    (UNEVEN, "mean", 0, 4.0),
    (UNEVEN, "sum", 0, 16.0),
]


@pytest.mark.parametrize(("values", "op", "axis", "expected"), REDUCED, ids=str)
def test_reduce(
    two: sg.MirroredStrategy, values: list[list[float]], op: str, axis: int | None, expected: Any
) -> None:
    """`reduce` of what `run` returned, and inside the replicas."""

    def mine() -> Tensor:
        return torch.tensor(values[sg.current_replica().index])

    assert two.reduce(op, two.run(mine), axis).tolist() == expected
    inside = two.run(lambda: two.reduce(op, mine(), axis))
    assert [each.tolist() for each in inside] == [expected] * 2


def test_gather(two: sg.MirroredStrategy) -> None:
    parts = two.run(lambda: torch.tensor(UNEVEN[sg.current_replica().index]))
    assert two.gather(parts).tolist() == [1, 2, 3, 10]
    inside = two.run(lambda: two.gather(torch.tensor(UNEVEN[sg.current_replica().index])).tolist())
    assert inside == [[1, 2, 3, 10]] * 2
    sides = two.run(lambda: torch.full((2, 1), float(sg.current_replica().index)))
    assert two.gather(sides, axis=1).tolist() == [[0, 1], [0, 1]]


def test_mean_of_whole_numbers(two: sg.MirroredStrategy) -> None:
    assert two.reduce("mean", [1, 2]).item() == 1.5
    assert two.reduce("mean", [torch.tensor([1]), torch.tensor([2, 4])], axis=0).item() == (
        pytest.approx(7 / 3)
    )


def test_reduce_refuses(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match="'median' is not known"):
        two.reduce("median", [1, 2])
    with pytest.raises(sg.UsageError, match=r"3 values for 2 replicas.*strategy\.run returned"):
        two.reduce("sum", [1, 2, 3])


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"a": 1.0, "b": 2.0}, "a dict"),
        (None, "a NoneType"),
        ("text", "a str"),
        ([torch.ones(2), torch.ones(2)], "a list"),
    ],
)
def test_reduce_and_gather_say_what_they_take(
    two: sg.MirroredStrategy, value: Any, what: str
) -> None:
    sentence = rf"takes? tensors or numbers, and this is {what}.*each"
    verbs = [
        lambda: two.reduce("sum", value),
        lambda: two.gather(value),
        lambda: sg.current_replica().all_gather(value),
        lambda: sg.current_replica().all_reduce(value),
    ]
    for verb in verbs:
        with pytest.raises(sg.UsageError, match=sentence):
            two.run(verb)
    with pytest.raises(sg.UsageError, match=sentence):
        two.reduce("sum", [value, value])
    assert two.run(lambda: two.reduce("sum", [1.0, 2.0]).tolist()) == [[2.0, 4.0]] * 2


# --- scopes --------------------------------------------------------------------------------------


def test_scopes(two: sg.MirroredStrategy, three: sg.MirroredStrategy) -> None:
    assert sg.get_strategy() is None
    with two.scope() as inside:
        assert inside is two is sg.get_strategy() is sg.Model(mlp()).strategy
        with two.scope():
            assert sg.get_strategy() is two
        with pytest.raises(sg.UsageError, match=r"open already.*leave its `with` block"):
            three.scope().__enter__()
        assert sg.get_strategy() is two, "the refused scope changed nothing"
    assert sg.get_strategy() is None
    with contextlib.suppress(KeyError), three.scope():
        raise KeyError
    assert sg.get_strategy() is None, "a scope closes however it is left"
    assert sg.Model(mlp()).strategy.num_replicas_in_sync == 1


def test_prepare_outside_of_run_is_refused(two: sg.MirroredStrategy) -> None:
    net = mlp()
    with pytest.raises(sg.UsageError) as caught:
        two.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert "strategy.run(train)" in str(caught.value)
    assert "stratagem run --replicas 2" in str(caught.value)


# --- tasks that do not train ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("ps", r"ps 0, .*End the script there before the strategy is made.*leave ps out"),
        ("evaluator", r"evaluator, .*model without a strategy.*model\.load.*model\.evaluate"),
    ],
)
def test_a_task_that_does_not_train_is_told_what_to_do(role: str, words: str) -> None:
    spec = sg.ClusterSpec({"worker": ["127.0.0.1:1"], role: ["127.0.0.1:2"]})
    with pytest.raises(sg.UsageError, match=words):
        sg.MirroredStrategy(cluster=sg.Place(spec, sg.Task(role), "the test"))


def test_what_an_evaluator_is_told_to_do_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(20)
    saved = sg.Model(by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=8))
    saved.compile(sgd, "cross_entropy")
    expected = saved.evaluate(x, y)
    saved.save(tmp_path / "checkpoint")
    spec = sg.ClusterSpec({"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]})
    monkeypatch.setenv("TF_CONFIG", spec.tf_config(sg.Task("evaluator")))
    model = sg.Model(mlp())
    model.compile(sgd, "cross_entropy")
    model.load(tmp_path / "checkpoint")
    assert model.evaluate(x, y) == expected


# --- several strategies, and one after its end ---------------------------------------------------


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fitted(on: sg.Strategy, start: nn.Module, x: Any, y: Any, batch: int = 32) -> nn.Module:
    with on.scope():
        model = sg.Model(start)
        model.compile(optimizer=sgd, loss="cross_entropy")
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model.module


def test_two_strategies_by_turns(two: sg.MirroredStrategy, three: sg.MirroredStrategy) -> None:
    x, y = data(100)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=32)
    for _ in range(2):
        for made in (two, three):
            assert distance(alone, fitted(made, mlp(), x, y)) < 1e-6
            indices = made.run(lambda: sg.current_replica().index)
            assert indices == list(range(made.num_replicas_in_sync))


def test_close_and_use_again() -> None:
    made = strategy(2)
    before = made.run(os.getpid)
    made.close()
    made.close()
    after = made.run(os.getpid)
    assert before[0] == after[0] and before[1] != after[1]
    x, y = data(100)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=32)
    assert distance(alone, fitted(made, mlp(), x, y)) < 1e-6
    made.close()


def test_a_forked_child_leaves_its_parents_replicas_alone(two: sg.MirroredStrategy) -> None:
    """The child gets an error; an unused strategy is the child's own from then on."""
    fresh = strategy(2)
    pids = two.run(os.getpid)

    def child() -> None:
        zygote._SLOW = ()  # type: ignore[assignment]  # what other tests have imported need not be imported again
        with pytest.raises(sg.UsageError, match=r"forked.*make a strategy in the child"):
            two.run(os.getpid)
        mine = fresh.run(os.getpid)
        assert len(set(mine)) == 2 and not set(mine) & set(pids)
        fresh.close()
        assert strategy(1).run(lambda: 1) == [1]

    assert exit_code_of(child) == 0
    assert two.run(os.getpid) == pids
    fresh.close()


def exit_code_of(work: Any) -> int | None:
    """Run `work` in a forked child, and return its exit code."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(PATIENCE)
    return child.exitcode


def test_threads_of_the_caller_are_given_back(two: sg.MirroredStrategy) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two.run(os.getpid)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_default_type_of_the_caller_is_carried(two: sg.MirroredStrategy) -> None:
    """Layers made on any replica have the caller's default type at the time of the call."""
    before = torch.get_default_dtype()
    for dtype in (torch.float64, before):
        torch.set_default_dtype(dtype)
        try:
            assert two.run(lambda: nn.Linear(2, 2).weight.dtype) == [dtype] * 2
        finally:
            torch.set_default_dtype(before)


# --- large arguments travel through shared memory ------------------------------------------------

LARGE = 40_000  # floats: 160 kB, over the 64 KiB from which they do


@pytest.mark.parametrize("kind", ["tensor", "array", "transposed", "bfloat16", "bool"])
def test_large_arrays_arrive_intact(three: sg.MirroredStrategy, kind: str) -> None:
    dice = torch.Generator().manual_seed(1)
    tensor = torch.randn(200, LARGE // 200, generator=dice)
    value: Any = {
        "tensor": tensor,
        "array": tensor.numpy(),
        "transposed": tensor.T,
        "bfloat16": tensor.bfloat16(),
        "bool": torch.randn(300, 300) > 0,
    }[kind]

    def back(given: Any) -> Any:
        return given

    for result in three.run(back, value):
        assert type(result) is type(value) and result.dtype == value.dtype
        assert np.array_equal(_plain(result), _plain(value))


def _plain(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else value.float().numpy()


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_replica_may_write_into_its_arguments(three: sg.MirroredStrategy, kind: str) -> None:
    """Followers have private copies of the arguments, the caller the objects themselves."""
    value: Any = torch.ones(LARGE) if kind == "tensor" else np.ones(LARGE, dtype=np.float32)

    def double(given: Any) -> tuple[float, float]:
        given *= 2
        sg.current_replica().barrier()
        return float(given.min()), float(given.max())

    assert three.run(double, value) == [(2.0, 2.0)] * 3
    assert float(value.max()) == 2.0
    assert three.run(double, value) == [(4.0, 4.0)] * 3


@pytest.mark.parametrize("op", OPS)
def test_large_parameters_are_not_shared_by_followers(op: str) -> None:
    """Layers of over 64 KiB on three replicas, with optimizer state from an earlier call."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4))
    assert start[0].weight.nbytes > 1 << 16
    x, y = data(100, features=64)
    alone = by_hand(start, sgd, F.cross_entropy, x, y, batch=32, epochs=4)
    with contextlib.closing(strategy(3, cross_device_ops=op)) as made, made.scope():
        model = sg.Model(start)
        model.compile(optimizer=sgd, loss="cross_entropy")
        for _ in range(2):
            model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    assert distance(alone, model.module) < 2e-6


def freezing_loop(where: sg.Strategy) -> list[float]:
    """A custom loop that freezes a layer during the training, on every replica."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    rows = torch.arange(48.0).view(12, 4) / 48
    loader: Any = DataLoader(TensorDataset(rows, torch.arange(12) % 2), batch_size=4)
    prepared: Any = where.prepare(net, optimizer, loader)
    net, optimizer, loader = prepared
    for step, (x, y) in enumerate(loader):
        if step == 1:
            net[0].requires_grad_(False)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return [float(value) for p in net.parameters() for value in p.detach().flatten()]


@pytest.mark.timeout(120)
def test_a_layer_that_every_replica_freezes_stays_where_it_is() -> None:
    found = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        where = sg.MirroredStrategy(devices)
        found.append(where.run(freezing_loop, where)[0])
        where.close()
    assert found[0] == pytest.approx(found[1], abs=1e-5)
