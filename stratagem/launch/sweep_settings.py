"""What one sweep is: the file sweep.json of its folder, from which it can be gone on with."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.launch.search_space import Axis, grid, read

SAMPLERS = ("random", "grid", "tpe")
#: words that show how a script may read its flags
_READS_FLAGS = re.compile(r"argv|pars|click|fire|typer|absl|hydra|tyro|docopt", re.IGNORECASE)


@dataclass(frozen=True)
class SweepSettings:
    """Everything that decides which trials there are, and which are kept."""

    #: the interpreter and the script, or the interpreter, -m and the module
    command: tuple[str, ...]
    #: the script's arguments, ranges among them
    words: tuple[str, ...]
    metric: str
    larger: bool
    trials: int
    keep: int
    replicas: int
    sampler: str
    seed: int
    prune: bool
    #: where the script runs
    where: str
    #: options of `stratagem submit`, where trials are jobs
    submit: dict[str, Any] = field(default_factory=dict)

    @property
    def space(self) -> tuple[list[Axis], list[str]]:
        """What is tried, and the arguments that stay as they are."""
        return read(self.words)

    @property
    def script(self) -> str:
        """What is trained by, as messages name it."""
        if len(self.command) > 3:  # a function, in a file of its name
            return Path(self.command[-1]).stem
        return Path(self.command[1]).name if self.command[1] != "-m" else self.command[2]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> SweepSettings:
        """What `to_json` wrote."""
        try:
            found: dict[str, Any] = json.loads(text)
            made = cls(**found)
        except (ValueError, TypeError) as problem:
            raise UsageError(f"{path} is not what a sweep writes: {problem}") from None
        return replace(made, command=tuple(made.command), words=tuple(made.words))

    def check_same(self, begun: SweepSettings) -> None:
        """Only the number of trials may change when a sweep goes on."""
        for name, mine in asdict(self).items():
            there = asdict(begun)[name]
            if name != "trials" and mine != there:
                raise UsageError(
                    f"the sweep was begun with {name} {_shown(there)}, not {_shown(mine)}; only "
                    "--trials and --slots may change: leave the others out, or choose another --out"
                )


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple | list) else str(value)


def read_metric(text: str | None) -> tuple[str, bool]:
    """The name, and whether it is better the larger it is."""
    name, colon, way = (text or "").partition(":")
    if not name:
        raise UsageError("which metric decides? As in: --metric val_accuracy:max")
    if not colon and name.endswith(("loss", "error")):
        return name, False
    if way not in ("max", "min"):
        raise UsageError(f"say which way is better: --metric {name}:max, or {name}:min")
    return name, way == "max"


def count_trials(axes: Sequence[Axis], sampler: str, asked: int | None) -> int:
    """How many trials there will be: no more than a grid has."""
    if sampler != "grid":
        return asked or 10
    return min(asked or len(grid(axes)), len(grid(axes)))


def check_flags(script: Path, axes: Sequence[Axis]) -> None:
    """Refuse a range of which the script's text shows that nobody reads it."""
    if not script.is_file():
        return
    text = script.read_text(errors="replace")
    for axis in axes:
        words = "[-_]".join(map(re.escape, re.split("[-_]", axis.flag.lstrip("-"))))
        if re.search(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", text):
            continue
        if "ArgumentParser" in text or not _READS_FLAGS.search(text):
            raise UsageError(
                f"{script.name} has no flag {axis.flag}, so a range for it changes nothing; add "
                f'it to the script: parser.add_argument("{axis.flag}"), and read it there'
            )
