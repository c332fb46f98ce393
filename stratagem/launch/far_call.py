"""A function of a notebook as a task elsewhere: python -m stratagem.launch.far_call FOLDER.

FOLDER/call was written by the process that started this one; FOLDER/result is the answer, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError


def as_json(value: Any) -> str:
    """What a function has returned, as text; raises for what Ray is not to carry."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"the function returned a {type(value).__name__}, and only numbers, text, lists and "
            "dicts of them come back from other machines: save the model to a folder that all "
            "machines share, and return its name."
        ) from None


def main(argv: list[str]) -> None:
    import cloudpickle

    folder = Path(argv[0])
    function, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
    (folder / "result").write_text(as_json(function(*args, **kwargs)))


if __name__ == "__main__":
    main(sys.argv[1:])
