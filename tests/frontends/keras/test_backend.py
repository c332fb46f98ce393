"""Which backend Keras gets when stratagem is imported before it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clock import PATIENCE

ROOT = Path(__file__).parents[3]
ASK = "import os, stratagem; print(os.environ.get('KERAS_BACKEND'))"


def ask(home: Path, code: str = ASK, **settings: str) -> str:
    """What a fresh interpreter prints whose user has nothing but this home."""
    environ = {name: value for name, value in os.environ.items() if "KERAS" not in name}
    environ |= {"HOME": str(home), "PYTHONPATH": f"{home}:{ROOT}", **settings}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def configure(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "keras.json").write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_keras_runs_on_torch_without_being_told(tmp_path: Path) -> None:
    """Twice: when it is first imported, Keras writes a file that names TensorFlow."""
    code = "import stratagem, keras; print(keras.backend.backend())"
    assert ask(tmp_path, code) == "torch"
    assert "tensorflow" in (tmp_path / ".keras" / "keras.json").read_text()
    assert ask(tmp_path) == "torch"


@pytest.mark.timeout(60)
def test_what_somebody_has_chosen_is_left_alone(tmp_path: Path) -> None:
    assert ask(tmp_path, KERAS_BACKEND="jax") == "jax"
    configure(tmp_path / "elsewhere", '{"backend": "jax"}')
    assert ask(tmp_path, KERAS_HOME=str(tmp_path / "elsewhere")) == "None"
    configure(tmp_path / ".keras", "not even JSON")
    assert ask(tmp_path) == "torch"
    (tmp_path / ".keras" / "keras.json").write_text('{"backend": "jax"}')
    assert ask(tmp_path) == "None"


@pytest.mark.timeout(60)
def test_tensorflow_is_keras_own_choice_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").touch()
    assert ask(tmp_path) == "None"


@pytest.mark.timeout(60)
def test_a_user_without_a_home(tmp_path: Path) -> None:
    """As containers start with a number that no user has."""
    nobody = "import os, pwd; del os.environ['HOME']; pwd.getpwuid = {}.__getitem__; "
    assert ask(tmp_path, nobody + ASK) == "torch"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("stub", "chosen"),
    [("types.ModuleType('tensorflow')", "None"), ("mock.MagicMock()", "None"), ("None", "torch")],
)
def test_a_stub_of_tensorflow(tmp_path: Path, stub: str, chosen: str) -> None:
    put = f"import sys, types, unittest.mock as mock; sys.modules['tensorflow'] = {stub}; "
    assert ask(tmp_path, put + ASK) == chosen
