"""The tasks of a job, the cluster that they form, and this process's place in it.

>>> spec = ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"], "ps": ["10.0.0.1:2223"]})
>>> print(spec.chief)  # no chief is named
worker 0
>>> [str(task) for task in spec.training_tasks()]  # their order is their rank
['worker 0', 'worker 1']
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stratagem.cluster.parsing import Fail, endpoint, quote, read_object, wrong

ROLES = ("chief", "worker", "ps", "evaluator")
SINGLE = ("chief", "evaluator")  # roles of at most one task
EXAMPLE = '{"chief": ["10.0.0.1:2222"], "worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}'


@dataclass(frozen=True)
class Task:
    """A process of the job: its role, and its index in that role."""

    type: str
    index: int = 0

    def __post_init__(self) -> None:
        fail = partial(wrong, where="Task", example='Task("worker", 0)')
        if self.type not in ROLES:
            raise fail(f"{quote(self.type)} is not a role ({', '.join(ROLES)})")
        if self.index < 0:
            raise fail(f"the index {self.index} is below 0")

    def __str__(self) -> str:
        return self.type if self.type in SINGLE else f"{self.type} {self.index}"


@dataclass(frozen=True, init=False, repr=False)
class ClusterSpec:
    """The tasks of a job and their addresses; a value, equal and hashed by its content.

    `where` and `example` are for errors: the variable or file that the jobs came from, and what it
    should hold.
    """

    _jobs: tuple[tuple[str, tuple[str, ...]], ...]

    def __init__(
        self,
        jobs: Mapping[str, Sequence[str]],
        *,
        where: str = "ClusterSpec",
        example: str = EXAMPLE,
    ) -> None:
        fail = partial(wrong, where=where, example=example)
        _check_roles(jobs, fail)
        _check_addresses(jobs, fail)
        ordered = tuple((role, tuple(jobs[role])) for role in ROLES if jobs.get(role))
        object.__setattr__(self, "_jobs", ordered)

    @classmethod
    def from_json(cls, text: str, where: str = "the cluster's JSON") -> ClusterSpec:
        """Parse what `to_json` wrote."""
        return cls(read_object(text, partial(wrong, where=where, example=EXAMPLE)), where=where)

    def to_json(self) -> str:
        """Return a JSON object of roles, each a list of addresses."""
        return json.dumps(self.jobs)

    def tf_config(self, task: Task, hub: str | None = None) -> str:
        """Return TF_CONFIG for one task; the evaluator need not be in the spec."""
        self._admit(task, "tf_config")
        more = {} if hub is None else {"hub": hub}
        mine = {"type": task.type, "index": task.index}
        return json.dumps({"cluster": self.jobs, "task": mine, **more})

    @property
    def jobs(self) -> dict[str, tuple[str, ...]]:
        """The addresses by role; roles without a task are left out."""
        return dict(self._jobs)

    def tasks(self) -> tuple[Task, ...]:
        """Return every task: the chief, the workers, the parameter servers, the evaluator."""
        return tuple(Task(role, i) for role, listed in self._jobs for i in range(len(listed)))

    def training_tasks(self) -> tuple[Task, ...]:
        """Return the tasks that hold a replica, by rank: the chief, then the other workers."""
        return tuple(task for task in self.tasks() if task.type in ("chief", "worker"))

    @property
    def chief(self) -> Task:
        """The named chief, else worker 0."""
        return Task("chief") if "chief" in self.jobs else Task("worker", 0)

    def is_chief(self, task: Task) -> bool:
        """Whether the task also writes the logs and checkpoints."""
        return task == self.chief

    def address(self, task: Task) -> str:
        """Return host:port of a task."""
        if task not in self:
            raise self._stranger(task, "ClusterSpec")
        return self.jobs[task.type][task.index]

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and task.index < len(self.jobs.get(task.type, ()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.jobs!r})"

    def _admit(self, task: Task, where: str) -> None:
        # An evaluator watches the checkpoints from outside: the spec need not list it.
        if task not in self and task.type != "evaluator":
            raise self._stranger(task, where)

    def _stranger(self, task: Task, where: str) -> Exception:
        listed = ", ".join(f"{len(addresses)} x {role}" for role, addresses in self._jobs)
        near = task.type if task.type in self.jobs else self.chief.type
        return wrong(
            f"{task.type} {task.index} is not in the cluster ({listed}; indices count from 0)",
            where,
            json.dumps({"type": near, "index": 0}),
        )


@dataclass(frozen=True)
class Place:
    """This process's place: the cluster, its own task, and the source of both.

    `local_rank` is the device to use when a launcher started several processes on this machine;
    None if the process may use every device it sees. `hub` is the address at which the launcher
    forms the generations of an elastic job; without one the chief forms them.
    """

    spec: ClusterSpec
    task: Task
    source: str
    local_rank: int | None = None
    hub: str | None = None

    def __post_init__(self) -> None:
        self.spec._admit(self.task, self.source)

    @property
    def rank(self) -> int:
        """Position among the tasks that train."""
        ranks = self.spec.training_tasks()
        if self.task not in ranks:
            raise wrong(
                f"{self.task} has no rank, for it does not train",
                self.source,
                f"the rank of {' or '.join(map(str, ranks[:2]))}",
            )
        return ranks.index(self.task)

    @property
    def size(self) -> int:
        """The number of tasks that train."""
        return len(self.spec.training_tasks())

    @property
    def is_chief(self) -> bool:
        """Whether this process also writes the logs and checkpoints."""
        return self.spec.is_chief(self.task)

    @property
    def chief_address(self) -> str:
        """host:port of the chief."""
        return self.spec.address(self.spec.chief)


def _check_roles(jobs: Mapping[str, object], fail: Fail) -> None:
    """Check that roles are known, have a list of allowed length, and that some task trains."""
    if not isinstance(jobs, Mapping):
        raise fail(f"{quote(jobs)} is not a mapping of roles to addresses")
    for role, listed in jobs.items():
        if role not in ROLES:
            raise fail(f"{quote(role)} is not a role ({', '.join(ROLES)})")
        # A lone string is a sequence of strings too, one per letter.
        if isinstance(listed, str) or not isinstance(listed, Sequence):
            raise fail(f"{role} must be a list of addresses, not {quote(listed)}")
        if role in SINGLE and len(listed) > 1:
            raise fail(f"{len(listed)} tasks are {role}; at most one may be")
    if not jobs.get("chief") and not jobs.get("worker"):
        raise fail("there is neither a chief nor a worker")


def _check_addresses(jobs: Mapping[str, Sequence[object]], fail: Fail) -> None:
    """Check that every task has a valid host:port, no two the same."""
    owners: dict[tuple[str, int], Task] = {}
    for role, listed in jobs.items():
        for index, address in enumerate(listed):
            task = Task(role, index)
            if not isinstance(address, str):
                raise fail(f"the address of {task}, {quote(address)}, is not a string")
            try:
                owner = owners.setdefault(endpoint(address), task)
            except ValueError as flaw:
                raise fail(f"the address of {task}, {quote(address)}, {flaw}") from None
            if owner != task:
                raise fail(
                    f"{owner} and {task} have the same address, {quote(address)} "
                    "(on one machine give each its own port)"
                )
