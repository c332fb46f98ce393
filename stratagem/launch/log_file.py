"""What a task of a submitted job prints, in a file: a time before each line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from stratagem.launch.job_folder import now
from stratagem.launch.output import Sink


class LogFile(Sink):
    """A sink for whole lines; readers may be on other machines, so each write is at once there."""

    def __init__(self, path: Path) -> None:
        self.colour = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def prefix(self, name: str, number: int) -> bytes:
        """None: the file has the name of the task."""
        return b""

    def write(self, data: bytes) -> None:
        stamp = f"{now()} ".encode()
        data = b"".join(stamp + line + b"\n" for line in data.split(b"\n")[:-1])
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
