"""`save` and `save_weights` of Keras write beside an older file, and rename: a full disk, or a
process that ends, leaves it as it was."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from stratagem.state.file_pair import flush, told

_ENDINGS = (".weights.h5", ".h5", ".keras")


def whole_file(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a model that writes one file at its first argument, `filepath`."""

    @wraps(save)
    def save_whole(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        ending = next((each for each in _ENDINGS if str(filepath).endswith(each)), None)
        overwrite = args[0] if args else kwargs.get("overwrite", True)
        several = len(args) > 1 or kwargs.get("max_shard_size") or kwargs.get("zipped") is False
        if ending is None or "://" in str(filepath) or not overwrite or several:
            return save(filepath, *args, **kwargs)
        path = Path(os.path.realpath(filepath))
        part = path.with_name(f".{path.name[:80]}.part-{secrets.token_hex(8)}{ending}")
        left = "What was saved there before is as it was."
        try:
            with told(path.parent, f"{path} could not be saved", left, (OSError,)):
                result = save(str(part), *args, **kwargs)
                flush(part)
                os.replace(part, path)
                flush(path.parent)
                return result
        finally:
            part.unlink(missing_ok=True)

    return save_whole
