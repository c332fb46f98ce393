"""Everything stratagem raises on purpose.

StratagemError
├── ClusterError            the cluster's description is wrong (spec, TF_CONFIG, Slurm, ...)
├── DeviceError             a device is unknown, absent or named twice
├── UsageError              the API was called in a way that cannot work
├── NotDistributable        this model, loss or dataset cannot be spread exactly
├── HandshakeError          a peer did not prove that it belongs to the job
└── ReplicaError            something happened to one replica or task
    ├── ReplicaFailed       it raised; its own traceback is in the message
    ├── ReplicaLost         its process died
    ├── ReplicaStalled      it lives but stopped answering
    └── ReplicaMissing      it never arrived

Every message says what happened, to which task, and what to do next.
"""

from __future__ import annotations


class StratagemError(Exception):
    """Root of the tree."""

    #: the replica or task that it is about, or that raised it if another did; else ""
    who: str = ""


class ClusterError(StratagemError, ValueError):
    """The description of the cluster is wrong."""


class DeviceError(StratagemError, ValueError):
    """A device is unknown, absent or named twice."""


class UsageError(StratagemError, RuntimeError):
    """The API was called in a way that cannot work."""


class NotDistributable(StratagemError, TypeError):
    """This model, loss or dataset cannot be spread with the result of one device."""


class HandshakeError(StratagemError, ConnectionError):
    """A peer did not prove that it belongs to the job."""


class ReplicaError(StratagemError, RuntimeError):
    """Something happened to one replica; `who` names it."""

    def __init__(self, message: str, who: str = "") -> None:
        super().__init__(message)
        self.who = who

    def __reduce__(self) -> tuple[type[ReplicaError], tuple[str, str]]:
        return type(self), (str(self), self.who)


class ReplicaFailed(ReplicaError):
    """A replica raised an exception."""


class ReplicaLost(ReplicaError):
    """A replica's process died."""


class ReplicaStalled(ReplicaError):
    """A replica stopped answering."""


class ReplicaMissing(ReplicaError):
    """A replica never arrived."""
