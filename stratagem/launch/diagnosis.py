"""What a check found at one address, and what to do about it."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from stratagem.cluster.handshake import SECRET_VARIABLE, Stranger, WrongSecret
from stratagem.cluster.parsing import endpoint
from stratagem.errors import HandshakeError
from stratagem.launch.probe import Speed

UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass(frozen=True)
class Row:
    """One line of the table; `certain` means that trying again would not help."""

    task: str
    address: str
    state: str
    ok: bool = False
    speed: Speed | None = None
    remedy: str = ""
    certain: bool = False


def measured(task: str, address: str, speed: Speed) -> Row:
    """The row of a task that was reached and measured."""
    return Row(task, address, "reached", ok=True, speed=speed, certain=True)


def broke_off(task: str, address: str, problem: OSError) -> Row:
    """The row of a task that answered, and then did not."""
    remedy = f"the connection ended during the measurement ({problem}): is the check there over?"
    return Row(task, address, "broke off", remedy=remedy)


def answered(task: str, address: str, said: dict[str, object]) -> Row:
    """The row of a peer that belongs to the job, by what it says of itself."""
    if said.get("check") == task:
        return Row(task, address, "reached", ok=True, remedy="not measured in time")
    if said.get("training"):
        return Row(
            task,
            address,
            "reached: training",
            ok=True,
            remedy="the training itself waits there for its tasks, so nothing was measured",
            certain=True,
        )
    return Row(
        task,
        address,
        "another task",
        remedy=f"{said.get('check') or 'something'} answers there: two names or forwarded ports "
        "lead to one machine; correct the cluster",
        certain=True,
    )


def own(task: str, address: str, problem: Exception | None) -> Row:
    """The row of the task that runs the check."""
    if problem is None:
        return Row(task, address, "this task, listening", ok=True, certain=True)
    _, port = endpoint(address)
    cause = problem.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
        remedy = (
            f"port {port} of this machine is held by another process (by the training itself? by "
            "an earlier run? `ss -ltnp` names it): end it, or choose another port"
        )
        return Row(task, address, "port in use", remedy=remedy, certain=True)
    return Row(task, address, "cannot listen", remedy=str(problem), certain=True)


def diagnose(task: str, address: str, problem: OSError) -> Row:
    """The row of a task that was not reached."""
    state, remedy = _explain(address, problem)
    certain = isinstance(problem, Stranger | WrongSecret)
    return Row(task, address, state, remedy=remedy, certain=certain)


def _explain(address: str, problem: OSError) -> tuple[str, str]:
    host, port = endpoint(address)
    if isinstance(problem, socket.gaierror):
        return "unknown name", (
            f"{host} does not resolve on this machine: correct the cluster, or add the name to DNS "
            "or /etc/hosts"
        )
    if isinstance(problem, WrongSecret):
        return "handshake refused", (
            f"another job, or another secret: set the same {SECRET_VARIABLE} and give the same "
            "cluster on every task"
        )
    if isinstance(problem, Stranger):
        return "something else", (
            f"what answers at port {port} is not this version of stratagem: choose another port, "
            "or install the same version there"
        )
    if isinstance(problem, HandshakeError):
        return "no answer", (
            f"{host} accepts the connection but says nothing: another program on port {port}, or "
            "a check that is stopped"
        )
    if isinstance(problem, ConnectionRefusedError):
        return "refused", (
            f"the machine answers, but nothing listens on port {port}: start `stratagem check` "
            "there too"
        )
    if isinstance(problem, TimeoutError):
        return "timed out", (
            f"packets are dropped, by a firewall most likely: open TCP port {port} of {host} from "
            f"{socket.gethostname()}"
        )
    if problem.errno in UNREACHABLE:
        return "no route", (
            f"no network leads from here to {host}, or the machine is down: check its address, "
            "the route and that it runs"
        )
    return "failed", f"{problem.strerror or problem}: see the log of the other side"
