"""Which backend Keras will run on, decided before it is imported; torch is not imported here."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

_VARIABLE = "KERAS_BACKEND"
_DEFAULT = "tensorflow"


def choose() -> None:
    """Choose torch where Keras would take TensorFlow, which is not there, and fail to import.

    A variable, or a configuration that names another backend, is left alone.
    """
    if _VARIABLE in os.environ or "keras" in sys.modules or _configured() != _DEFAULT:
        return
    if not _present():
        os.environ[_VARIABLE] = "torch"


def _present() -> bool:
    """Whether TensorFlow can be imported, or something has been put in its place."""
    try:
        return find_spec(_DEFAULT) is not None
    except ValueError:  # a stub in sys.modules that does not say where it is from
        return True


def _configured() -> str:
    """What Keras' file names. Keras itself writes one with its default when it is first imported,
    so that name is nobody's choice."""
    folder = os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    try:
        found = json.loads((Path(folder) / "keras.json").read_text())
        return str(found.get("backend", _DEFAULT))
    except (OSError, ValueError, AttributeError):
        return _DEFAULT  # as Keras takes it
