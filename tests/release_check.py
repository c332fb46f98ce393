"""Check what `python -m build` made: the files inside, and that the wheel works with torch alone.

python tests/release_check.py dist [--torch FOLDER]

The wheel is installed in an empty environment, with what it depends on and no extra. With --torch,
torch is taken from that folder instead of being downloaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("huggingface", "keras", "tensorboard", "plots", "sweep", "quantize")
#: in an empty environment: two replicas train, and what needs an extra says which
USE = """
import importlib.util
import torch
import stratagem as sg
for absent in ("keras", "optuna", "onnx", "torchao", "matplotlib", "sklearn"):
    assert importlib.util.find_spec(absent) is None, absent
with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    model = sg.Model(torch.nn.Linear(4, 3), strategy)
    model.compile("adam", "cross_entropy")
    x, y = torch.randn(50, 4), torch.randint(0, 3, (50,))
    before = model.module.weight.detach().clone()
    model.fit(x, y, batch_size=16, verbose=0)
    assert not torch.equal(before, model.module.weight)
    assert strategy.run(lambda: sg.current_replica().index) == [0, 1]
try:
    sg.quantize(model, x, verbose=0)
except sg.UsageError as problem:
    assert "stratagem[quantize]" in str(problem), problem
else:
    raise AssertionError("quantised without onnx")
print("works with torch alone")
"""


def package() -> set[str]:
    """The files that belong into both."""
    found = [*(ROOT / "stratagem").rglob("*.py"), ROOT / "stratagem" / "py.typed"]
    return {str(file.relative_to(ROOT)) for file in found}


def check_wheel(file: Path) -> None:
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(about).decode()
    code = {name for name in names if ".dist-info/" not in name}
    assert code == package(), sorted(code ^ package())
    for extra in EXTRAS:
        assert f"Provides-Extra: {extra}\n" in metadata, extra
    version = next(line for line in metadata.splitlines() if line.startswith("Version: "))
    said = subprocess.run(
        [sys.executable, "-c", "import stratagem; print(stratagem.__version__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert version == f"Version: {said.stdout.strip()}", version


def check_sdist(file: Path) -> None:
    with tarfile.open(file) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    wanted = package() | {"pyproject.toml", "README.md", "LICENSE"}
    assert wanted <= names, sorted(wanted - names)


def check_alone(wheel: Path, torch_folder: str | None) -> None:
    """Install the wheel where nothing else is, and use it."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if torch_folder:
            (site,) = Path(folder).glob("lib/python*/site-packages")
            (site / "torch.pth").write_text(torch_folder + "\n")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        given = [] if torch_folder else ["torch"]
        constraints = ["-c", ROOT / "constraints.txt"]
        for command in (
            [*pip, *constraints, *given, wheel],
            [python, "-c", USE],
            [Path(folder, "bin", "stratagem"), "--version"],
            [Path(folder, "bin", "stratagem"), "sweep", "--help"],
        ):
            words = [str(word) for word in command]
            quiet = subprocess.DEVNULL if words[-1] == "--help" else None
            subprocess.run(words, check=True, cwd=folder, env=environ, stdout=quiet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--torch", metavar="FOLDER")
    args = parser.parse_args()
    (wheel,), (sdist,) = args.dist.glob("*.whl"), args.dist.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    check_alone(wheel.resolve(), args.torch)
    print(f"{wheel.name} and {sdist.name} are well")


if __name__ == "__main__":
    main()
