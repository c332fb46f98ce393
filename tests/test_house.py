"""The house: imports go down the floors only, never in circles; the public names are these."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import stratagem

ROOT = Path(stratagem.__file__).parent
FLOORS = {
    "errors": 0, "cluster": 1, "wire": 2, "codecs": 3, "rules": 3, "state": 4, "data": 4,
    "replicas": 4, "strategies": 5, "frontends": 6, "plan": 6, "launch": 7,
}  # fmt: skip
#: doors of the house: they may look into every room
DOORS = {"__init__", "__main__", "ps"}


def modules() -> dict[str, Path]:
    return {_name(path): path for path in ROOT.rglob("*.py")}


def _name(path: Path) -> str:
    """A folder's __init__ goes by the folder's name, as those do who import from it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    folder = len(parts) > 1 and parts[-1] == "__init__"
    return ".".join(("stratagem", *(parts[:-1] if folder else parts)))


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, lazy imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path}: relative imports hide the floor they go to")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    known = modules()
    return {name for name in found if name in known}


def room(module: str) -> str:
    return module.split(".")[1]


GRAPH = {name: imports(path) for name, path in modules().items()}


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_go_down(module: str) -> None:
    if room(module) in DOORS:
        return
    assert room(module) in FLOORS, f"{module} stands in a room that is not on the plan"
    for other in GRAPH[module]:
        if room(other) != room(module):
            assert FLOORS[room(other)] < FLOORS[room(module)], f"{module} imports {other}"


def test_no_circles() -> None:
    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for other in GRAPH[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        return seen

    assert [name for name in GRAPH if name in reach(name)] == []


def test_rules_are_pure() -> None:
    for name, path in modules().items():
        if room(name) == "rules":
            tree = ast.parse(path.read_text())
            used = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            used |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            assert not used & {"time", "socket", "threading", "torch.distributed"}, name


PUBLIC = [
    "Asynchronous", "CentralStorageStrategy", "ClusterError", "ClusterSpec", "CrossDeviceOps",
    "DelayCompensated", "DeviceError", "Drop", "FixedShards", "GapAware", "HandshakeError",
    "HierarchicalCopyAllReduce", "LocalCluster", "LowerRate", "MaxSize", "MinSize",
    "MirroredStrategy", "Model", "MultiWorkerMirroredStrategy", "NcclAllReduce", "NotDistributable",
    "ParameterServerStrategy", "Patience", "Place", "Policy", "Ramp", "ReductionToOneDevice",
    "Replica", "ReplicaError", "ReplicaFailed", "ReplicaLost", "ReplicaMissing", "ReplicaStalled",
    "RingAllReduce", "ScaleDown", "SharedMemoryAllReduce", "Stats", "StratagemError", "Strategy",
    "Synchronous", "Task", "UsageError", "__version__", "callbacks", "current_replica",
    "get_strategy", "plan",
]  # fmt: skip


def test_public_names() -> None:
    assert sorted(stratagem.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(stratagem, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        stratagem.nonsense  # noqa: B018


@pytest.mark.timeout(60)
def test_importing_does_nothing_but_import() -> None:
    """No torch, no logging configured, no thread, until a name is used."""
    code = (
        "import sys, logging, threading, stratagem, stratagem.launch.cli\n"
        "assert 'torch' not in sys.modules\n"
        "assert not logging.getLogger().handlers\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


AROUND = sorted(
    path for folder in ("benchmarks", "examples", "studies")
    for path in (ROOT.parent / folder).rglob("*.py")
)  # fmt: skip


@pytest.mark.parametrize("path", AROUND, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_what_is_built_around_finds_its_doors(path: Path) -> None:
    """Scripts that no test starts still import names that exist."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stratagem"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                there = hasattr(module, alias.name) or f"{node.module}.{alias.name}" in GRAPH
                assert there, f"{path} imports {alias.name} from {node.module}"
