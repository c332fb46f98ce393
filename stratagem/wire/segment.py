"""Anonymous shared memory: no name in any file system, so nothing is left behind by a crash.

On Linux a segment is a memfd; another process of the same user maps it through the creator's
/proc entry, so a handle is a short string that fits into any message. Elsewhere it is a temporary
file whose name disappears when the creator lets go of it.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence

import torch

from stratagem.errors import UsageError

_ALIGN = 64
_LINUX = sys.platform == "linux"


def aligned(size: int) -> int:
    """Round up to a cache line."""
    return -(-size // _ALIGN) * _ALIGN


class Segment:
    """A block of memory that several processes of one machine map."""

    def __init__(self, size: int) -> None:
        self.size = max(aligned(size), _ALIGN)
        if _LINUX:
            self._fd = os.memfd_create("stratagem", os.MFD_CLOEXEC)
            self.handle = f"/proc/{os.getpid()}/fd/{self._fd}:{self.size}"
        else:
            self._fd, path = tempfile.mkstemp(prefix="stratagem-")
            self.handle = f"{path}:{self.size}"
            weakref.finalize(self, _unlink, path)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, self.size)
        self.memory = mmap.mmap(self._fd, self.size)

    @classmethod
    def attach(cls, handle: str) -> Segment:
        """Map the segment that another process of this machine made."""
        path, _, size = handle.rpartition(":")
        self = cls.__new__(cls)
        self.size, self.handle = int(size), handle
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise UsageError(
                f"cannot map shared memory {handle}: {error.strerror}; its owner has ended, or "
                "runs as another user or in another container. Give both the same user and "
                "process namespace, or choose cross_device_ops=RingAllReduce()."
            ) from error
        try:
            self.memory = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        return self

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """A tensor that lives in the segment; it keeps the mapping alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def words(self, count: int, offset: int = 0) -> memoryview:
        """A view as 64-bit integers, for flags that Python itself reads and writes."""
        return memoryview(self.memory)[offset : offset + 8 * count].cast("q")


def _unlink(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


def host_identity() -> str:
    """Equal for two processes exactly when they can map each other's segments."""
    if not _LINUX:
        return os.uname().nodename
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
