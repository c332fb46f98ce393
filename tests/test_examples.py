"""What the pages and examples show is what happens: they are run, compared and compiled here."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file
from torch import nn

from stratagem.cluster.spec import ClusterSpec, Task
from tests.clock import SLOWER
from tests.ports import free_ports

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = sorted([*ROOT.glob("*.md"), *EXAMPLES.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: pages whose Python blocks run one after the other
LIVE = [
    ROOT / name
    for name in (
        "README.md",
        "docs/first-hour.md",
        "docs/migration.md",
        "docs/guide.md",
        "docs/own-loop.md",
        "docs/keras.md",
        "docs/transformers.md",
        "docs/parameter-servers.md",
        "docs/model-parallel.md",
        "docs/sharded.md",
        "docs/simulating.md",
    )
]
LAUNCHER = [sys.executable, "-m", "stratagem", "run"]

Plainly = Callable[..., str]

_RUN_PAGES = """
import sys
for path in sys.argv[1:]:
    print("page", path, flush=True)
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
"""


def start(*command: object, cwd: Path, **environ: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ},
    )


def outputs(*processes: subprocess.Popen[str], seconds: float = 170) -> list[str]:
    """What each printed; all of them must end well."""
    try:
        printed = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, f"{process.args}\n{text}"
    return printed


def python(script: str, *arguments: object) -> list[object]:
    return [sys.executable, EXAMPLES / script, *arguments]


def numbers(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


# --- scripts -------------------------------------------------------------------------------------


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plainly:
    """Run a script of one device right here, which spares another import of torch."""

    def run(script: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_loop_by_hand_gives_the_same_however_it_is_started(
    tmp_path: Path, plainly: Plainly
) -> None:
    replicas = ["--epochs", 2, "--devices", "cpu:0", "cpu:1"]
    own, launched = outputs(
        start(*python("digits_mirrored.py", *replicas), cwd=tmp_path),
        start(
            *LAUNCHER,
            "--replicas",
            2,
            *python("digits_mirrored.py", "--epochs", 2)[1:],
            cwd=tmp_path,
        ),
    )
    accuracy, weight = numbers(plainly("digits_plain.py", "--epochs", 2))
    assert 0.1 < accuracy <= 1
    assert numbers(own)[-2:] == pytest.approx([accuracy, weight], abs=1e-5)
    assert numbers(launched)[-2:] == pytest.approx([accuracy, weight], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_model_gives_the_same_on_two_replicas(tmp_path: Path, plainly: Plainly) -> None:
    (mirrored,) = outputs(start(*python("model_mirrored.py", "--epochs", 1), cwd=tmp_path))
    alone = plainly("model_plain.py", "--epochs", 1)
    loss, accuracy = numbers(alone.splitlines()[-1])
    assert 0 < accuracy <= 1
    assert numbers(mirrored.splitlines()[-1]) == pytest.approx([loss, accuracy], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_keras_gives_the_same_on_two_replicas(tmp_path: Path, plainly: Plainly) -> None:
    (mirrored,) = outputs(start(*python("keras_mirrored.py", "--epochs", 2), cwd=tmp_path))
    alone = plainly("keras_plain.py", "--epochs", 2)
    loss, accuracy = numbers(alone.splitlines()[-1])
    assert 0.5 < accuracy <= 1
    assert numbers(mirrored.splitlines()[-1]) == pytest.approx([loss, accuracy], abs=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_workers_by_tf_config(tmp_path: Path) -> None:
    spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]})
    workers = [
        start(
            *python("multi_worker.py", "--epochs", 1, "--save", "digits"),
            cwd=tmp_path,
            TF_CONFIG=spec.tf_config(Task("worker", index)),
        )
        for index in range(2)
    ]
    chief, other = outputs(*workers)
    assert "2 replicas: test accuracy" in chief
    assert "test accuracy" not in other, "only the chief reports"
    assert len(load_file(tmp_path / "digits.safetensors")) == 6


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("--keras",)], ids=["torch", "keras"])
def test_a_pipeline_over_two_workers(tmp_path: Path, options: tuple[str, ...]) -> None:
    name = "digits.keras" if options else "digits"
    script = python("pipeline_workers.py", "--epochs", 4, "--save", name, *options)
    (printed,) = outputs(start(*LAUNCHER, "--workers", 2, *script[1:], cwd=tmp_path))
    accuracies = re.findall(r"test accuracy (\S+)", printed)
    assert len(accuracies) == 1 and float(accuracies[0]) > 0.8, printed
    assert (
        "hands on" in printed and (tmp_path / (name if options else f"{name}.safetensors")).exists()
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_pipeline_notebook_runs() -> None:
    notebook = nbformat.read(EXAMPLES / "pipeline.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "strip the outputs"
    NotebookClient(notebook, timeout=int(120 * SLOWER), kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    accuracies = re.findall(r"test accuracy (\S+)", printed)
    assert len(accuracies) == 2 and min(map(float, accuracies)) > 0.7, printed


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_notebook_runs() -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "strip the outputs"
    NotebookClient(notebook, timeout=int(60 * SLOWER), kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert "[replica 1] the last share had 18 images" in printed


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_keras_notebook_runs() -> None:
    """A subclassed model and its training step, defined in cells of a real kernel."""
    notebook = nbformat.read(EXAMPLES / "keras.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "strip the outputs"
    NotebookClient(notebook, timeout=int(120 * SLOWER), kernel_name="python3").execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert float(re.findall(r"test accuracy (\S+)", printed)[0]) > 0.7


# --- the demo ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_demo(tmp_path: Path) -> None:
    (printed,) = outputs(start(*python("demo.py", "--epochs", 5), cwd=tmp_path))
    rows = [line for line in printed.splitlines() if re.match(r"│ \w+ (device|replicas) ", line)]
    assert len(rows) > 1
    for row in rows[1:]:
        accuracy, difference = numbers(row)[-2:]
        assert accuracy >= 0.9
        assert 0 < difference < 1e-5


def test_the_demo_says_when_something_is_wrong() -> None:
    demo = load("demo")

    def arm(accuracy: float, moved: float) -> object:
        module = nn.Linear(2, 2)
        with torch.no_grad():
            module.weight.fill_(1.0)
            module.bias.fill_(0.0)
            module.weight[1, 1] += moved
        return demo.Arm("an arm", 2, 1, 0.0, 1.0, accuracy, module)

    good = arm(0.95, 0.0)
    assert demo.verdict([good, arm(0.95, 1e-6)]) == []
    assert "1.0e-03 away" in demo.verdict([good, arm(0.95, 1e-3)])[0]
    assert "0.850 is below" in demo.verdict([good, arm(0.85, 0.0)])[0]
    assert len(demo.verdict([good, arm(float("nan"), float("nan"))])) == 2


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


# --- pages ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_blocks_of_live_pages_run(tmp_path: Path) -> None:
    """One process for all of them, each page with names of its own."""
    scripts = []
    for page in LIVE:
        assert blocks(page, "python"), f"{page} has no block to run"
        scripts.append(tmp_path / f"page_{page.stem}.py")
        scripts[-1].write_text("\n".join(blocks(page, "python")))
    running = start(sys.executable, "-c", _RUN_PAGES, *scripts, cwd=tmp_path)
    (printed,) = outputs(running, seconds=280)
    assert printed.count("page ") == len(LIVE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for language in ("python", "py"):
        for number, block in enumerate(blocks(page, language)):
            compile(block, f"{page.name}, {language} block {number}", "exec")


@pytest.mark.parametrize(
    ("number", "plain", "distributed"),
    [(0, "digits_plain.py", "digits_mirrored.py"), (1, "model_plain.py", "model_mirrored.py")],
)
def test_the_diffs_shown_are_those_of_the_files(number: int, plain: str, distributed: str) -> None:
    shown = blocks(EXAMPLES / "README.md", "diff")[number].splitlines()
    for sign, name, other in (("-", plain, distributed), ("+", distributed, plain)):
        marked = [line[1:] for line in shown if line.startswith(sign) and line[1:].strip()]
        assert marked
        assert missing(marked, name) == [], name
        assert missing(marked, other) == marked, other


def missing(lines: Sequence[str], name: str) -> list[str]:
    present = set((EXAMPLES / name).read_text().splitlines())
    return [line for line in lines if line not in present]
