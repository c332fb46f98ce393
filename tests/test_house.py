"""The house: imports go down the floors only, never in circles; the public names are these."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import stratagem
from tests.clock import PATIENCE
from tests.sources import ROOT, nodes

FLOORS = {
    "errors": 0,
    "capabilities": 0,
    "arguments": 1,
    "tracebacks": 1,
    "cluster": 1,
    "compat": 1,
    "figures": 1,
    "wire": 2,
    "codecs": 3,
    "rules": 3,
    "state": 4,
    "data": 4,
    "replicas": 4,
    "training": 5,
    "servers": 6,
    "strategies": 7,
    "frontends": 8,
    "plan": 8,
    "launch": 9,
}
#: doors of the house: they may look into every room
DOORS = {"__init__", "__main__", "experimental", "ps"}


#: where the public names are defined, which anybody can import from the package itself
FRONT_DOOR: dict[str, str] = stratagem._WHERE | stratagem._MODULES


@cache
def modules() -> dict[str, Path]:
    return {_name(path): path for path in ROOT.rglob("*.py")}


def _name(path: Path) -> str:
    """A folder's __init__ goes by the folder's name, as those do who import from it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    folder = len(parts) > 1 and parts[-1] == "__init__"
    return ".".join(("stratagem", *(parts[:-1] if folder else parts)))


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports: lazily, by name, and through the front door, too."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path}: relative imports hide the floor they go to")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) == "import_module":
            found.update(arg.value for arg in node.args if isinstance(arg, ast.Constant))
    known = modules()
    homes = {f"stratagem.{name}": home for name, home in FRONT_DOOR.items()}
    return {homes.get(name, name) for name in found if name in known or name in homes}


def _called(function: ast.expr) -> str | None:
    return getattr(function, "attr", getattr(function, "id", None))


def opens_the_door(path: Path) -> bool:
    """Whether a file imports the package as a whole: that reaches every floor."""
    for node in nodes(path):
        if isinstance(node, ast.Import) and any(a.name == "stratagem" for a in node.names):
            return True
    return False


def room(module: str) -> str:
    return module.split(".")[1]


@cache
def graph() -> dict[str, set[str]]:
    return {name: imports(path) for name, path in modules().items()}


def test_imports_go_down() -> None:
    inside = {module: others for module, others in graph().items() if room(module) not in DOORS}
    assert {room(module) for module in inside} <= FLOORS.keys(), "a room is not on the plan"
    arrows = [(a, b) for a, others in inside.items() for b in others if room(a) != room(b)]
    assert [f"{a} imports {b}" for a, b in arrows if FLOORS[room(b)] >= FLOORS[room(a)]] == []


def test_nobody_inside_comes_by_the_front_door() -> None:
    """`import stratagem as sg` reaches every floor, wherever it stands."""
    inside = {name: path for name, path in modules().items() if room(name) not in DOORS}
    assert [name for name, path in inside.items() if opens_the_door(path)] == []


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("from stratagem import Model", {"stratagem.frontends.model"}),
        ("def f():\n    from stratagem import Model as M", {"stratagem.frontends.model"}),
        ("importlib.import_module('stratagem.launch.run')", {"stratagem.launch.run"}),
        ("from stratagem import errors, __version__", {"stratagem.errors"}),
        ("def f():\n    import stratagem as sg", None),
        ("import stratagem", None),
        ("import stratagem.errors", {"stratagem.errors"}),
    ],
)
def test_every_way_to_import_is_seen(line: str, seen: set[str] | None, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(line)
    assert opens_the_door(tmp_path / "file.py") == (seen is None)
    assert imports(tmp_path / "file.py") == (seen or set())


def test_no_circles() -> None:
    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in graph()[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    assert [name for name in graph() if name in reach(name)] == []


def test_what_data_is_is_asked_at_the_door() -> None:
    """Kinds of datasets are told apart where data comes in, and kinds of sources nowhere else."""
    door = {"stratagem.frontends.inputs", "stratagem.frontends.sources", "stratagem.data.loader"}
    kinds = {"Dataset", "IterableDataset", "ArraySource", "DatasetSource", "StreamSource"}
    for name, path in modules().items():
        for node in nodes(path) if name not in door else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not asked & kinds, f"{name} asks: {ast.unparse(node)}"


def test_rules_are_pure() -> None:
    for name, path in modules().items():
        if room(name) == "rules":
            found = nodes(path)
            used = {a.name for n in found if isinstance(n, ast.Import) for a in n.names}
            used |= {str(n.module) for n in found if isinstance(n, ast.ImportFrom)}
            assert not used & {"time", "socket", "threading", "torch.distributed"}, name


# --- sizes and names ------------------------------------------------------------------------------


@cache
def _classes() -> list[tuple[str, ast.ClassDef]]:
    every = ((name, node) for name, path in modules().items() for node in nodes(path))
    return [(name, node) for name, node in every if isinstance(node, ast.ClassDef)]


def repeated_classes() -> set[str]:
    names = Counter(node.name for _, node in _classes())
    return {name for name, times in names.items() if times > 1}


def repeated_files() -> set[str]:
    """But for the same role in the two front ends, which are sisters."""
    places: dict[str, set[Path]] = {}
    for path in modules().values():
        places.setdefault(path.stem, set()).add(path.parent)
    sisters = {ROOT / "frontends", ROOT / "frontends" / "keras"}
    return {
        name
        for name, folders in places.items()
        if len(folders) > 1 and folders != sisters and name != "__init__"
    }


def long_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in modules().values()
        if len(path.read_text().splitlines()) > 400
    }


def large_classes() -> set[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        f"{name}.{node.name}"
        for name, node in _classes()
        if sum(isinstance(each, functions) for each in node.body) > 20
    }


def unformatted_files() -> set[str]:
    """Those with a line that `ruff format` leaves as it is."""
    return {name for name, path in modules().items() if "# fmt:" in path.read_text()}


def long_functions() -> set[str]:
    """Those of more than 60 lines, without their docstrings."""
    found = set()
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False) or ""
                lines = (node.end_lineno or 0) - node.lineno - text.count("\n")
                if lines > 60:
                    found.add(f"{name}.{node.name}")
    return found


def unnamed_files() -> set[str]:
    """Those that docs/architecture.md does not mention."""
    words = set(re.findall(r"\w+", (ROOT.parent / "docs" / "architecture.md").read_text()))
    paths = {str(path.relative_to(ROOT)): path for path in modules().values()}
    return {at for at, path in paths.items() if path.stem not in words | {"__init__"}}


@pytest.mark.parametrize(
    "find",
    [
        repeated_classes,
        repeated_files,
        long_files,
        long_functions,
        large_classes,
        unformatted_files,
        unnamed_files,
    ],
)
def test_nothing_is_too_large_or_named_twice(find: Callable[[], set[str]]) -> None:
    assert find() == set()


PUBLIC = [
    "Asynchronous",
    "CentralStorageStrategy",
    "Checkpoints",
    "ClusterError",
    "ClusterSpec",
    "CrossDeviceOps",
    "DelayCompensated",
    "DeviceError",
    "DiLoCo",
    "Drop",
    "Ensemble",
    "EveryStep",
    "FixedShards",
    "GapAware",
    "Gossip",
    "HandshakeError",
    "HierarchicalCopyAllReduce",
    "Int8",
    "LocalCluster",
    "LocalSteps",
    "LowerRate",
    "MaxSize",
    "Mesh",
    "MinSize",
    "MirroredStrategy",
    "Model",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "NotDistributable",
    "Outer",
    "ParameterServerStrategy",
    "Patience",
    "PipelineStrategy",
    "Place",
    "Policy",
    "PowerSGD",
    "Ramp",
    "RayCluster",
    "ReductionToOneDevice",
    "Replica",
    "ReplicaError",
    "ReplicaFailed",
    "ReplicaLost",
    "ReplicaMissing",
    "ReplicaStalled",
    "RingAllReduce",
    "ScaleDown",
    "ShardedStrategy",
    "Sign",
    "SharedMemoryAllReduce",
    "Stats",
    "StratagemError",
    "Strategy",
    "Synchronous",
    "TPUClusterResolver",
    "TPUStrategy",
    "Task",
    "TensorParallelStrategy",
    "TopK",
    "UsageError",
    "__version__",
    "callbacks",
    "current_replica",
    "experimental",
    "get_strategy",
    "plan",
    "quantize",
    "sweep",
]


def test_public_names() -> None:
    assert sorted(stratagem.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(stratagem, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        stratagem.nonsense  # noqa: B018


def test_names_of_the_book() -> None:
    """What tf.distribute has under `experimental`."""
    names = stratagem.experimental
    assert sorted(dir(names)) == [
        "CentralStorageStrategy",
        "CollectiveCommunication",
        "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    ]
    for name in dir(names):
        if name != "CollectiveCommunication":
            assert getattr(names, name) is getattr(stratagem, name)
    assert {"RING", "NCCL", "AUTO"} <= set(names.CollectiveCommunication.__members__)
    with pytest.raises(AttributeError, match="nonsense"):
        names.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.timeout(60)
def test_importing_does_nothing_but_import() -> None:
    """No torch, no logging configured, no thread, until a name is used."""
    code = (
        "import sys, logging, threading, stratagem, stratagem.launch.cli\n"
        "assert 'torch' not in sys.modules\n"
        "assert not logging.getLogger().handlers\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


AROUND = sorted(
    path
    for folder in ("benchmarks", "examples", "studies")
    for path in (ROOT.parent / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", AROUND, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_what_is_built_around_finds_its_doors(path: Path) -> None:
    """Scripts that no test starts still import names that exist."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stratagem"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                there = hasattr(module, alias.name) or f"{node.module}.{alias.name}" in graph()
                assert there, f"{path} imports {alias.name} from {node.module}"
