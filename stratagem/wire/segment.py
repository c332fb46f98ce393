"""Anonymous shared memory, without a file system name that a crash would leave behind.

On Linux a segment is a memfd; another process of the same user maps it through the creator's
/proc entry, so a handle is a short string that fits into any message. Elsewhere it is a temporary
file whose name disappears when the creator frees it.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import sys
import tempfile
import weakref
from collections.abc import Sequence

import torch

from stratagem.errors import UsageError

_ALIGN = 64
_LINUX = sys.platform == "linux"
_NAME = "stratagem"
_IS_OURS = re.compile(
    r"/proc/\d+/fd/\d+" if _LINUX else rf"{re.escape(tempfile.gettempdir())}/{_NAME}-\w+"
)


def aligned(size: int) -> int:
    """Round a size up to whole cache lines."""
    return -(-size // _ALIGN) * _ALIGN


class Segment:
    """A block of memory that several processes of one machine map."""

    def __init__(self, size: int) -> None:
        self.size = max(aligned(size), _ALIGN)
        if _LINUX:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            self.handle = f"/proc/{os.getpid()}/fd/{self._fd}:{self.size}"
        else:
            self._fd, path = tempfile.mkstemp(prefix=f"{_NAME}-")
            self.handle = f"{path}:{self.size}"
            weakref.finalize(self, _unlink, path)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, self.size)
        self.memory = mmap.mmap(self._fd, self.size)

    @classmethod
    def attach(cls, handle: str) -> Segment:
        """Map a segment that another process of this machine made.

        A handle may come over the network, so it must not open any other file.
        """
        path, _, size = handle.rpartition(":")
        if not _IS_OURS.fullmatch(path) or not size.isdecimal():
            raise UsageError(f"{handle!r} is no handle of shared memory")
        self = cls.__new__(cls)
        self.size, self.handle = int(size), handle
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise UsageError(
                f"cannot map shared memory {handle}: {error.strerror}; its owner has ended, or "
                "runs as another user or in another container. Give both the same user and "
                "process namespace, or do without: cross_device_ops=RingAllReduce() for replicas, "
                "STRATAGEM_SHARED_MEMORY=0 for parameter servers."
            ) from error
        try:
            if not _is_segment(fd, self.size):
                raise UsageError(f"{handle!r} is no shared memory of stratagem, or of another size")
            self.memory = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        return self

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Return a tensor in the segment; the tensor keeps the mapping alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))

    def let_go(self, tensor: torch.Tensor) -> None:
        """Unmap the whole pages of a tensor of this segment, so that they no longer count as this
        process's memory until it touches them again; the shared memory keeps their content."""
        if not _LINUX or tensor.numel() == 0:
            return
        base = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()
        start, page = tensor.data_ptr() - base, mmap.PAGESIZE
        assert 0 <= start <= start + tensor.nbytes <= self.size
        first, end = -(-start // page) * page, (start + tensor.nbytes) // page * page
        if first < end:
            self.memory.madvise(mmap.MADV_DONTNEED, first, end - first)

    def unmap(self) -> None:
        """Unmap the segment here; no tensor of it may be left in this process."""
        self.memory.close()

    def words(self, count: int, offset: int = 0) -> memoryview:
        """Return a view as 64-bit integers, for flags that Python reads and writes."""
        return memoryview(self.memory)[offset : offset + 8 * count].cast("q")


def _is_segment(fd: int, size: int) -> bool:
    """Whether the open file is a segment of that size."""
    if _LINUX and os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{_NAME} (deleted)":
        return False
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_size == size > 0


def _unlink(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)


def host_identity() -> str:
    """Return an identity that is equal for processes that can map each other's segments."""
    if not _LINUX:
        return os.uname().nodename
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
