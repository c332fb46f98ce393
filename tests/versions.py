"""`make test-versions`: the core of the tests under the oldest, a middle and the newest versions.

    python tests/versions.py [oldest middle newest next]

Each has an environment of its own in .venv-versions/. One whose interpreter is not on this machine
is named, and is no failure; `next` is Keras from the wheel that KERAS_WHEEL names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-versions"

#: what fails here is not left to the run of the late ones, which has other versions
SECOND_TRIES = "STRATAGEM_SECOND_TRIES"

#: the version of Python, and what is installed beside the package's own requirements
ENVIRONMENTS = {
    "oldest": ("3.11", ["torch==2.11.*", "keras==3.12.*"]),
    "middle": ("3.12", ["torch==2.13.*", "keras==3.15.1"]),
    "newest": ("3.13", ["torch", "keras"]),
    "next": ("3.11", ["torch==2.13.*", os.environ.get("KERAS_WHEEL", "")]),
}

#: private names, the helper process, mirrored training, servers, Keras, a loop, saving and resuming
CORE = [
    "compat",
    "replicas/test_zygote.py",
    "strategies/test_same_answer.py::test_every_operation_equals_one_device",
    "strategies/test_same_answer.py::test_losses_metrics_and_validation",
    "strategies/test_same_answer.py::test_fewer_examples_than_replicas",
    "strategies/test_same_answer.py::test_accumulation",
    "servers/test_clients.py::test_a_client_for_each_worker",
    "servers/test_ticket_loop.py",
    "frontends/keras/test_data.py",
    "frontends/keras/test_saving.py",
    "training/test_custom_loop.py",
    "frontends/test_saving.py",
    "training/test_loop_resume.py",
]

#: with Keras 3.12 torch has no distribution, and steps with sparse classes are not captured
NEWER = ["frontends/keras/test_own_distribution.py", "frontends/keras/test_quiet_loop.py"]


def interpreter(version: str) -> str | None:
    """Return this version of Python, from PATH or from pyenv's folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    known = sorted(str(each) for each in pyenv.glob(f"{version}.*/bin/python"))
    for each in [shutil.which(f"python{version}"), *reversed(known)]:
        # pyenv's shim of a version that is not chosen is there, and fails
        ask = [each or "", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if each and subprocess.run(ask, capture_output=True, text=True).stdout.strip() == version:
            return each
    return None


def requirements() -> list[str]:
    """Return what the package and the core need, besides torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = project["optional-dependencies"]["dev"]
    return [
        *(each for each in project["dependencies"] if not each.startswith("torch>")),
        *(each for each in tools if re.match("pytest|hypothesis|scikit|optuna", each)),
    ]


def made(name: str, python: str, packages: list[str]) -> Path:
    """Return the interpreter of an environment, which is made unless it is there already."""
    folder, wanted = FOLDER / name, [*packages, *requirements()]
    ready, own = folder / ".ready", folder / "bin" / "python"
    if not ready.exists() or ready.read_text() != "\n".join(wanted):
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
        ready.write_text("\n".join(wanted))
    return own


def run(name: str) -> bool:
    """Run the core in an environment; False if a test fails."""
    version, packages = ENVIRONMENTS[name]
    python = interpreter(version)
    if python is None or not all(packages):
        why = f"no Python {version} on this machine" if python is None else "no KERAS_WHEEL given"
        print(f"== {name}: left out, {why}", flush=True)
        return True
    own = made(name, python, packages)
    say = "import sys, torch, keras as k; print(sys.version[:6], torch.__version__, k.__version__)"
    environ = {
        **{each: value for each, value in os.environ.items() if each != SECOND_TRIES},
        "PYTHONPATH": str(ROOT),
        "KERAS_BACKEND": "torch",
        "CUDA_VISIBLE_DEVICES": "",
    }
    said = subprocess.run([own, "-c", say], env=environ, capture_output=True, text=True, check=True)
    print(f"== {name}: Python, torch and Keras {said.stdout.strip()}", flush=True)
    tests = [str(ROOT / "tests" / each) for each in CORE + NEWER * (name != "oldest")]
    command = [own, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not exhaustive", *tests]
    return subprocess.run(command, env=environ, cwd=ROOT).returncode == 0


if __name__ == "__main__":
    failed = [name for name in sys.argv[1:] or ENVIRONMENTS if not run(name)]
    sys.exit(f"failed under {', '.join(failed)}" if failed else 0)
