"""Private names of other libraries: all are listed, and there as we need them.

Under another version of one of these libraries, the tests that fail here name what it has taken
away, and the tables in stratagem/compat say what that was for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import optuna
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from stratagem.compat import keras_names, optuna_names, torch_names, torchmetrics_names
from tests.sources import ROOT, nodes

TABLES = {
    "torch": torch_names,
    "keras": keras_names,
    "torchmetrics": torchmetrics_names,
    "optuna": optuna_names,
}
FOREIGN = tuple(TABLES)
#: of Python itself, and the attributes that we give to models of Keras and to callbacks
OF_OTHERS = {"_fields", "_replace", "_exit", "_actions", "_stratagem", "_stratagem_first"}


def listed() -> set[str]:
    names = {name.rpartition(".")[2] for table in TABLES.values() for name in table.PRIVATE}
    names |= {name.rpartition(".")[2] for name in keras_names.SOMETIMES}
    return names | keras_names.BOOKKEEPING  # of which it does not matter whether they are there


# --- every name that is used is listed --------------------------------------------------------


def private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and not name.startswith("__")


def own_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Attributes that a file gives to objects of its own."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield each.name
                elif isinstance(each, ast.AnnAssign | ast.Assign):
                    targets = [each.target] if isinstance(each, ast.AnnAssign) else each.targets
                    yield from (t.id for t in targets if isinstance(t, ast.Name))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


@cache
def every_own_name() -> set[str]:
    return {name for path in ROOT.rglob("*.py") for name in own_names(nodes(path))}


def foreign_imports(nodes: list[ast.AST]) -> tuple[set[str], set[str]]:
    """Names that stand for a library or a part of it, and those among them that are private."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = home + alias.name
    of_them = {n: at for n, at in found.items() if at.partition(".")[0] in FOREIGN}
    hidden = {at for at in of_them.values() if any(private(p) or p == "src" for p in at.split("."))}
    return set(of_them), hidden


def used(found: list[ast.AST], *, in_compat: bool = False) -> tuple[set[str], set[str]]:
    """Private names that a file uses of objects not its own, and those only for stratagem/compat:
    of a library's modules."""
    own, (roots, reserved) = set(own_names(found)), foreign_imports(found)
    variables = {n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names: set[str] = set()
    for node in found:
        if isinstance(node, ast.Attribute) and private(node.attr):
            of = node.value
            whose = of.id if isinstance(of, ast.Name) else ast.unparse(of)
            if whose in ("self", "cls", "super()"):
                names |= {node.attr} - every_own_name()
            elif whose.partition(".")[0] in roots:
                reserved.add(f"{whose}.{node.attr}")
            elif node.attr not in own:
                names.add(node.attr)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and private(node.value)
            and node.value.isidentifier()
        ):
            names |= {node.value} - every_own_name() - variables
    return names - OF_OTHERS, set() if in_compat else reserved


@cache
def used_by_file() -> dict[str, tuple[set[str], set[str]]]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        in_compat = path.parent.name == "compat"
        found[str(path.relative_to(ROOT))] = used(nodes(path), in_compat=in_compat)
    return found


def test_every_private_name_is_listed() -> None:
    unlisted = {at: names - listed() for at, (names, _) in used_by_file().items()}
    assert {at: names for at, names in unlisted.items() if names} == {}, "list them in compat/"


def test_modules_are_reached_through_compat() -> None:
    assert {at: names for at, (_, names) in used_by_file().items() if names} == {}


def test_every_listed_name_is_listed_once_and_used() -> None:
    names = [name for table in TABLES.values() for name in table.PRIVATE]
    owners = {name: lib for lib, table in TABLES.items() for name in table.PRIVATE}
    assert len(owners) == len(names)
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    for name, lib in owners.items():
        last = name.rpartition(".")[2]
        table = Path(str(TABLES[lib].__file__))
        others = [text for path, text in sources.items() if path != table]
        here = sources[table].partition("PRIVATE = {")
        rest = here[0] + here[2].partition("\n}\n")[2]
        assert any(last in text for text in [*others, rest]), f"{name} is listed, and not used"


@pytest.mark.parametrize(
    ("line", "names", "reserved"),
    [
        ("tensor._grad_layout", {"_grad_layout"}, set()),
        ("self.optimizer._slots_by_name", {"_slots_by_name"}, set()),
        ("self._non_persistent_buffers_set", {"_non_persistent_buffers_set"}, set()),
        ("getattr(layer, '_call_context', 0)", {"_call_context"}, set()),
        ("class A:\n    def f(self, b): self._x = b._x", set(), set()),
        ("import torch\ntorch._C._cuda_init()", set(), {"torch._C", "torch._C._cuda_init"}),
        ("from keras.src import ops", set(), {"keras.src.ops"}),
        ("from torch.nn.modules.conv import _ConvNd", set(), {"torch.nn.modules.conv._ConvNd"}),
        ("import os\nos._exit(1)", set(), set()),
    ],
)
def test_private_names_are_seen(line: str, names: set[str], reserved: set[str]) -> None:
    assert used(list(ast.walk(ast.parse(line)))) == (names, reserved)


# --- every listed name is there ------------------------------------------------------------------


@cache
def keras_model() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, validation_data=(x, y), batch_size=2, verbose=0)
    return model


def masked() -> Any:
    x = np.array([[1, 0]])
    return keras.layers.Embedding(3, 2, mask_zero=True)(x)


def cross_entropy() -> Any:
    values = torch.randn(3, 2, requires_grad=True)
    return nn.functional.nll_loss(values.log_softmax(1), torch.tensor([0, 1, 1])).grad_fn


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


def scheduled_step() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return vars(optimizer)["step"]


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


OBJECTS: dict[str, Callable[[], Any]] = {
    "Tensor": leaf,
    "SparseTensor": lambda: torch.eye(2).to_sparse(),
    "Module": lambda: nn.Linear(1, 1),
    "StateDict": lambda: Extra(1, 1).state_dict(),
    "Optimizer": lambda: torch.optim.SGD([leaf()], lr=0.1),
    "FusedAdam": lambda: torch.optim.Adam([leaf()], fused=True),
    "ScheduledStep": scheduled_step,
    "Node": lambda: leaf().sum().grad_fn,
    "LossNode": cross_entropy,
    "WhereNode": lambda: leaf().where(torch.ones(2) > 0, 0.0).grad_fn,
    "FillNode": lambda: leaf().masked_fill(torch.ones(2) > 0, 0.0).grad_fn,
    "ProductNode": lambda: (leaf() * torch.ones(2)).grad_fn,
    "SumNode": lambda: leaf().view(2, 1).sum(0).grad_fn,
    "IndexNode": lambda: leaf()[torch.tensor([1])].grad_fn,
    "OpOverload": lambda: torch.ops.aten.add.Tensor,
    "OpOverloadPacket": lambda: torch.ops.aten.add,
    "GroupOptions": lambda: torch_names.gloo_options(timedelta(seconds=1), None),
}
OF_KERAS: dict[str, Callable[[], Any]] = {
    "Layer": keras_model,
    "Model": keras_model,
    "Functional": lambda: keras_model()._functional,
    "CompileMetrics": lambda: keras_model()._compile_metrics,
    "Evaluated": lambda: inspect.getsource(keras.Model.fit),
    "MeanMetric": lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
    "Masked": masked,
    "DynamicBackend": lambda: keras_names.DynamicBackend("torch"),
    "Optimizer": lambda: keras_model().optimizer,
    "Backup": lambda: keras.callbacks.BackupAndRestore("backup"),
    "Iterator": lambda: reach("keras.src.trainers.epoch_iterator").EpochIterator,
}
OF_TORCHMETRICS: dict[str, Callable[[], Any]] = {"Metric": torchmetrics.MeanMetric}
OF_OPTUNA: dict[str, Callable[[], Any]] = {
    "FrozenTrial": lambda: optuna.trial.create_trial(value=1.0)
}


def check(name: str, objects: dict[str, Callable[[], Any]], why: str) -> None:
    owner, _, last = name.rpartition(".")
    if owner in objects:
        found = objects[owner]()
    else:
        try:
            importlib.import_module(name)
            return  # it is a module
        except ModuleNotFoundError:
            found = reach(owner)
    there = last in found if isinstance(found, dict | str) else hasattr(found, last)
    assert there, f"{name} is gone, which is needed for: {why}"


def reach(path: str) -> Any:
    """What a dotted path leads to, of which a part may be modules."""
    head, *rest = path.split(".")
    found = importlib.import_module(head)
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", torch_names.PRIVATE)
def test_torch_has(name: str) -> None:
    check(name, OBJECTS, torch_names.PRIVATE[name])


@pytest.mark.parametrize("name", keras_names.PRIVATE)
def test_keras_has(name: str) -> None:
    check(name, OF_KERAS, keras_names.PRIVATE[name])


@pytest.mark.parametrize("name", optuna_names.PRIVATE)
def test_optuna_has(name: str) -> None:
    check(name, OF_OPTUNA, optuna_names.PRIVATE[name])


@pytest.mark.parametrize("name", torchmetrics_names.PRIVATE)
def test_torchmetrics_has(name: str) -> None:
    check(name, OF_TORCHMETRICS, torchmetrics_names.PRIVATE[name])


def test_a_name_that_is_gone_is_named() -> None:
    with pytest.raises(AssertionError, match=r"Tensor\._gone is gone, which is needed for: a test"):
        check("Tensor._gone", OBJECTS, "a test")


# --- what is called does what it is called for ----------------------------------------------------


def test_writes_are_counted() -> None:
    tensor = torch.ones(2)
    before = tensor._version
    tensor.view(2, 1).add_(1)
    assert tensor._version > before


def test_reductions_have_their_numbers() -> None:
    """The numbers in loss_terms: 1 is a mean, 2 a sum."""
    for number, reduction in ((1, "mean"), (2, "sum")):
        node: Any = nn.functional.mse_loss(leaf(), torch.ones(2), reduction=reduction).grad_fn
        assert node._saved_reduction == number


def test_a_pass_that_adds_to_gradients_is_known() -> None:
    seen: list[Any] = []

    def look(grad: Tensor) -> None:
        torch_names.after_backward(lambda: seen.append("ended"))
        seen.append(torch_names.in_backward())
        try:
            seen.append(torch_names.will_run(torch_names.accumulator(weight)))
        except RuntimeError:
            seen.append("collects")

    weight = leaf()
    product = weight * 2
    product.register_hook(look)
    product.sum().backward(retain_graph=True)
    torch.autograd.grad(product.sum(), weight)
    assert seen == [True, True, "ended", True, "collects", "ended"]
    assert not torch_names.in_backward()


def test_hooks_on_every_module_are_seen() -> None:
    assert not torch_names.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert torch_names.has_global_hooks()
    finally:
        handle.remove()


def test_the_fused_adam_is_the_plain_one() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([1.0, -2.0, 3.0])
    fused, zeros = param.detach().clone(), [torch.zeros(3), torch.zeros(3)]
    lists = [[fused], [param.grad], zeros[:1], zeros[1:], [], [torch.tensor(1.0)]]
    how = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    torch_names.fused_adam(*lists, **how, amsgrad=False, maximize=False)
    torch.optim.Adam([param], lr=0.1).step()
    torch.testing.assert_close(fused, param.detach())


def test_many_tensors_at_once() -> None:
    tensors = [torch.ones(4), torch.full((2,), 3.0)]
    assert [float(norm) for norm in torch_names.norms(tensors, 1)] == [4.0, 6.0]
    targets = [torch.zeros(4), torch.zeros(2)]
    torch_names.copy_all(targets, tensors)
    assert all(map(torch.equal, targets, tensors))
