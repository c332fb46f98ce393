"""What can go wrong with a member, as notes and as errors that name the member and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stratagem import errors
from stratagem.errors import (
    ReplicaError,
    ReplicaFailed,
    ReplicaLost,
    ReplicaStalled,
    StratagemError,
    UsageError,
)

Kind = Literal["died", "stalled", "late", "failed", "joined"]

#: kinds after which a member is gone, though an elastic job goes on without it
DEPARTURES = ("died", "stalled", "late")

DETAIL_BYTES = 64 << 10

_TRACE = "Its traceback:"


@dataclass(frozen=True)
class Member:
    """One member: ("worker 1", "10.0.0.2:2222") or ("replica 1", "cpu:1, pid 4711")."""

    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name} ({self.where})"


@dataclass(frozen=True)
class Failure:
    """What happened to a member; `rank` is its rank, or that of the worker it belongs to.

    A task that joins an elastic job is announced the same way, since it interrupts a step too.
    """

    rank: int
    member: Member
    kind: Kind
    detail: str
    #: the class of the refusal that it raised, whose sentence is the detail; "" for other errors
    refusal: str = ""

    def error(self) -> StratagemError:
        """Return the exception to raise on every member."""
        if self.refusal:
            return refused_by(self.member.name, self.refusal, self.detail)
        make, text = _WORDS[self.kind]
        return make(text.format(who=self.member, detail=self.detail), self.member.name)

    def of_earlier_call(self) -> StratagemError:
        """Return the exception of a call that comes after one that raised, and was caught."""
        return ReplicaFailed(
            "an earlier call raised an exception, and a job of several tasks ends by that, even if "
            "the script catches it: the tasks no longer know of each other where they are. (In one "
            f"process it goes on.) Mend the cause, or leave that call out. What {self.member} "
            f"raised:\n\n{self.detail}",
            self.member.name,
        )

    def to_note(self) -> dict[str, object]:
        """Write the message for the other members."""
        return {
            "t": "trouble",
            "rank": self.rank,
            "name": self.member.name,
            "where": self.member.where,
            "kind": self.kind,
            "detail": shorten(self.detail),
            "refusal": self.refusal,
        }

    @classmethod
    def from_note(cls, note: Mapping[str, object]) -> Failure:
        """Read another member's message; ValueError if it is malformed."""
        rank, kind = note["rank"], note["kind"]
        if not isinstance(rank, int) or kind not in _WORDS:
            raise ValueError(f"no trouble of rank {rank!r} and kind {kind!r} is known")
        member = Member(str(note["name"]), str(note["where"]))
        return cls(rank, member, kind, shorten(str(note["detail"])), str(note["refusal"]))


def shorten(detail: str) -> str:
    """Keep the last 64 KiB; the end of a traceback says what was raised."""
    data = detail.encode("utf-8", "replace")
    if len(data) <= DETAIL_BYTES:
        return data.decode()
    return "[...]" + data[-DETAIL_BYTES:].decode("utf-8", "ignore")


_WORDS: dict[Kind, tuple[type[ReplicaError], str]] = {
    "died": (
        ReplicaLost,
        "{who} died: {detail}. The last lines of its own output say why; if there are none, it "
        "was killed (out of memory? see `dmesg` there). Then start the job again.",
    ),
    "stalled": (
        ReplicaStalled,
        "{who} stopped answering: {detail}. Its process may be stopped (`kill -CONT` wakes it), "
        "its machine swapping or down, or the network cut. Then start the job again.",
    ),
    "late": (
        ReplicaStalled,
        "{who} has not come to the step where others wait for it, {detail}, though it lives: a "
        "loop of another length, slow data or a breakpoint there. `py-spy dump` shows where it is; "
        "if it only needs longer, give the strategy patience=sg.Patience(step=...).",
    ),
    "joined": (
        ReplicaLost,
        "{who} joins the job: {detail}. The step is done again with it.",
    ),
    "failed": (
        ReplicaFailed,
        "{who} raised an exception, so the job ended everywhere. Mend the cause and start the job "
        "again. What it raised there:\n\n{detail}",
    ),
}


# --- errors of a job with servers ---------------------------------------------------------------

_AGAIN = (
    "Start the job again: fit(..., checkpoint=, resume=True) goes on from its last checkpoint, "
    "without one it begins anew."
)


def server_lost(name: str, why: str = "") -> ReplicaLost:
    """Return the error that ends a job whose server has died."""
    seen = f" ({why})" if why else ""
    return ReplicaLost(
        f"{name} is gone{seen}, and a share of the parameters with it, so the job ends. Its own "
        f"output says why. {_AGAIN}",
        name,
    )


def job_over() -> ReplicaLost:
    """Return the error to raise in a worker that needs servers after the job has ended well."""
    return ReplicaLost(
        "run the same script on every task: the chief has ended its own, the job is done and the "
        "servers have ended with it, and this worker still needs them.",
        "chief",
    )


def chief_lost(name: str, why: str) -> ReplicaLost:
    """Return the error that ends a job whose chief has died."""
    return ReplicaLost(
        f"{name}, the chief, is gone ({why}), so the job ends. {_AGAIN}",
        name,
    )


def hangs(name: str, text: str) -> ReplicaStalled:
    """Return the error that ends a job in which a task that it needs is silent; `text` says it."""
    return ReplicaStalled(
        f"{text}: its machine, or the network between, hangs. {_AGAIN}",
        name,
    )


def left_behind(name: str, text: str, kind: type[ReplicaError]) -> ReplicaError:
    """Return the error to raise in a task that the job goes on without; `text` is the reason."""
    return kind(f"{text} the others have gone on without it. Start it again to take part.", name)


def is_server_lost(error: BaseException | None) -> bool:
    """Whether an error says that a server is gone or silent."""
    return isinstance(error, ReplicaLost | ReplicaStalled) and error.who.startswith("ps ")


def failed(name: str, text: str, refusal: str = "") -> ReplicaFailed:
    """Return the error that ends a job in which a task raised: `text` is its traceback, if any, or
    the sentence of a refusal of this class."""
    if refusal:
        said = f"{name} raised {refusal}; the others were stopped.\n\n{text}"
        return ReplicaFailed(said, name)
    seen = f"{_TRACE}\n\n{text}" if text.strip() else "See its output for the reason."
    return ReplicaFailed(f"{name} raised an exception; the others were stopped. {seen}", name)


def headline(error: ReplicaError) -> str:
    """Return the line to log for an error that is raised too, which shows the traceback."""
    return str(error).partition("\n")[0].removesuffix(f" {_TRACE}")


def error_note(error: StratagemError) -> dict[str, str]:
    """Write an error for another task."""
    return {"error": type(error).__name__, "text": str(error), "who": getattr(error, "who", "")}


def error_of(note: Mapping[str, object]) -> StratagemError:
    """Read the error that another task wrote."""
    kind, text, who = str(note["error"]), str(note["text"]), str(note.get("who", ""))
    return refused_by(who, kind, text)


def refused_by(who: str, kind: str, text: str) -> StratagemError:
    """Return the error to raise where another task has raised one of this class."""
    make = getattr(errors, kind, UsageError)
    if not (isinstance(make, type) and issubclass(make, StratagemError)):
        make = UsageError
    return pass_on(make(text), who)


def pass_on(error: StratagemError, who: str) -> StratagemError:
    """Name the task that raised an error, which is raised here too; its sentence stays."""
    if not isinstance(error, ReplicaError) and who and not error.who:
        error.add_note(f"(It was raised on {who}.)")
    error.who = error.who or who
    return error
