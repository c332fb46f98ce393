"""One training on one worker, from the chief's plan to the last values, for all front ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.codecs.compression import Compression
from stratagem.codecs.wire_choice import Wire
from stratagem.errors import NotDistributable, StratagemError, UsageError
from stratagem.rules.updates import Synchronous
from stratagem.servers.client import Client, FitOver
from stratagem.servers.running_statistics import PushResiduals, RunningStatistics, copy_into
from stratagem.servers.training_plan import Clip, TrainingPlan
from stratagem.state.optimizer_recipe import OptimizerRecipe, describe, elementwise, settings_of
from stratagem.state.partition import (
    Piece,
    assemble,
    assemble_values,
    cut,
    partition,
    state_dict,
    states_of,
)
from stratagem.training import fingerprint
from stratagem.training.elastic import PREPARED
from stratagem.training.fingerprint import Look
from stratagem.training.lossy_wire import check_pushes
from stratagem.training.settings import Served

_MIX = 0x9E3779B97F4A7C15


class Late(Exception):
    """The other workers have gone on: the gradient that is being computed would be dropped."""


class Session:
    """Base of the loops of all front ends. `over` is set if the training had already ended.

    A front end with other optimizers than torch's overrides the methods marked so.
    """

    params: list[nn.Parameter]
    #: tensors that are not trained; the same on all workers when the training begins and ends
    beside: list[Tensor]

    def __init__(
        self,
        worker: Client,
        module: nn.Module,
        optimizer: Any,
        served: Served,
        *,
        wire: Wire = None,
        clip: Clip = Clip(),  # noqa: B008
        told: Any = None,
        look: tuple[str, Look] | None = None,
        resumes: bool = False,
    ) -> None:
        """`told`: the chief's message to the other workers, whose sessions have it afterwards.
        `look`: the call and a fingerprint of its inputs, where every worker calls by itself.
        `resumes`: the training goes back to a checkpoint if a server is lost."""
        _end_prepared(worker, module)
        if look is not None:
            settings: Look = {
                "updates of the strategy": repr(served.updates),
                "wire of the strategy": repr(wire or "float32"),
            }
            look = look[0], look[1] | settings
        self.told, self._look, self._resumes = told, look, resumes
        self.worker, self.module, self.optimizer = worker, module, optimizer
        self._clip = clip
        self._wire = None if wire in (None, "float32") else wire
        self._find()
        self.number = worker.fits
        worker.fits += 1
        self.over: FitOver | None = None
        #: whether backward stops when its gradient is late
        self.cancels = False
        if worker.is_chief:
            self._open(self._plan(served))
        found = worker.enter(self.number)
        if isinstance(found, FitOver):
            self.over = found
            return
        self._handles: list[Any] = []
        self.plan, beside = found
        if not worker.is_chief:
            self.told, theirs, tensors = beside
            if look is not None and theirs is not None:
                fingerprint.compare(look[0], [["the chief", *theirs], [worker.name, *look]])
            self._arrive(tensors)
        self.residuals = PushResiduals(worker, self.plan)
        self.statistics = RunningStatistics(
            worker, module, self.beside, self.plan.workers, self.residuals
        )
        worker.at_failure = self._give_model_back
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.over = worker.join(self.number, self.params, names)
        if self.over is not None:
            worker.at_failure = None
            return
        self.cancels = isinstance(self.plan.updates, Synchronous) and self.plan.updates.spares > 0
        self._handles += [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self.params)
        ]

    def _give_model_back(self) -> None:
        """After a failure: give the model back to the user, with its present values."""
        for handle in self._handles:
            handle.remove()
        self.forget_gradients()

    def until_end(self, handle: Any) -> None:
        """Remove a hook when the training ends, also by a failure."""
        self._handles.append(handle)

    # --- overridden for other optimizers than torch's -------------------------------------------

    def _find(self) -> None:
        """Find the tensors that are trained, and those that are not."""
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        if not self.params:
            raise NotDistributable("the model has no parameter that requires a gradient.")
        fixed = [p for p in self.module.parameters() if not p.requires_grad]
        self.beside = [*fixed, *self.module.buffers()]

    def _arrive(self, beside: Sequence[Tensor]) -> None:
        """As another worker: take the chief's tensors, and seed the rng of this worker."""
        copy_into(self.beside, beside)
        torch.manual_seed((self.plan.seed + _MIX * self.worker.index) % 2**63)

    def _recipe(self) -> OptimizerRecipe:
        return describe(self.optimizer, self.params)

    def _states(self, plan: TrainingPlan) -> Mapping[int, Mapping[str, Any]] | None:
        """Return the optimizer's state by variable; None if there is none yet."""
        if not self.optimizer.state:
            return None
        return states_of(self.optimizer.state_dict(), _groups(self.optimizer, self.params))[0]

    def _take_states(self, by_variable: Mapping[int, Mapping[str, Any]]) -> None:
        mine, state = self.optimizer.param_groups, self.optimizer.state
        trained = {id(param) for param in self.params}
        frozen = {p: own for p, own in dict.items(state) if id(p) not in trained}
        self.optimizer.load_state_dict(
            state_dict(by_variable, _groups(self.optimizer, self.params))
        )
        self.optimizer.param_groups = mine  # schedulers may refer to them
        self.optimizer.state.update(frozen)

    def _read_last(self) -> None:
        """As the chief: read the last values and optimizer state into the user's objects."""
        self.read_state()

    def settings(self) -> list[dict[str, Any]]:
        """Return the optimizer's settings, as servers take them."""
        return [settings_of(group) for group in self.optimizer.param_groups]

    # --- the same for all -------------------------------------------------------------------------

    def _plan(self, served: Served) -> TrainingPlan:
        types = {p.dtype for p in self.params}
        if len(types) > 1:
            names = ", ".join(sorted(str(t) for t in types))
            raise NotDistributable(
                f"the trained parameters are of several types ({names}), and a server keeps one; "
                "convert the model to one type."
            )
        (dtype,) = types
        if isinstance(self._wire, Compression):
            check_pushes(self._wire, self.optimizer, dtype)
        recipe = self._recipe()
        shapes = tuple(tuple(p.shape) for p in self.params)
        pieces = partition(
            shapes,
            dtype.itemsize,
            served.servers,
            served.partitioner,
            whole=not elementwise(recipe),
        )
        seed = torch.initial_seed() & (2**62 - 1)
        return TrainingPlan(
            shapes,
            str(dtype).removeprefix("torch."),
            pieces,
            recipe,
            served.updates,
            served.workers,
            served.servers,
            self._clip,
            self._wire,
            seed,
            served.backups,
            self._resumes,
        )

    def _open(self, plan: TrainingPlan) -> None:
        whole = self._states(plan)
        states = None if whole is None else _by_server(whole, plan)
        look = self._look and list(self._look)
        beside = [self.told, look, [t.detach() for t in self.beside]]
        self.worker.open(self.number, plan, self.params, states, beside)

    def _hook(self, index: int) -> Any:
        def ready(_: Tensor) -> None:
            self.worker.memory.take(index)
            if self.cancels and self.worker.is_late:
                raise Late

        return ready

    def forget_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def send_state(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Send the servers changes of the optimizer's state, by variable."""
        _, _, states = self.worker.snapshot()
        whole = {**_by_variable(states, self.plan), **changes}
        self.worker.assign_states(_by_server(whole, self.plan))

    def read_state(self, *, values: bool = True) -> int:
        """Read one version of values and optimizer state into the user's objects."""
        return self._take_snapshot(*self.worker.snapshot(), values=values)

    def rescue(self) -> bool:
        """As the chief, after an error: `read_state`, if servers answer soon.

        It runs in another thread, since an interrupted request may wait for ever.
        """
        found: list[tuple[int, list[Tensor], list[Any]]] = []

        def ask() -> None:
            # LookupError: the answer belongs to an interrupted request. The caller reports it.
            with contextlib.suppress(OSError, StratagemError, LookupError):
                self.worker.finish_stream()
                found.append(self.worker.snapshot())

        asking = threading.Thread(target=ask, name="stratagem-rescue", daemon=True)
        asking.start()
        asking.join(5.0)
        if found:
            self._take_snapshot(*found[0])
        return bool(found)

    def _take_snapshot(
        self, version: int, found: list[Tensor], states: list[Any], *, values: bool = True
    ) -> int:
        plan = self.plan
        if values:
            whole = assemble_values(_pieces(plan), dict(enumerate(found)), plan.shapes)
            copy_into(self.params, whole)
        self._take_states(_by_variable(states, plan))
        return version

    def end(self, told: Any = None) -> None:
        """Leave with the last values; as the chief, end the training for all workers."""
        if self.over is not None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.worker.is_chief:
            self.worker.finish([told, [t.detach() for t in self.beside]])
            self._read_last()  # with all gradients that counted
        else:
            self.worker.refresh()
        self.worker.at_failure = None
        self.worker.memory.close()
        self.worker.ask("leave")
        self.forget_gradients()

    def take_last(self, over: FitOver) -> Any:
        """As another worker: take the tensors that the chief sent at the end."""
        told, beside = over.told if over.told is not None else (None, None)
        if beside is not None:
            copy_into(self.beside, beside)
        return told


def _end_prepared(worker: Client, module: Any) -> None:
    """Before another training: end that of a prepared loop, which must be done."""
    if worker.at_end is not None and worker.prepared.is_open:
        if worker.prepared.session.module is module:
            raise UsageError(PREPARED)
        raise UsageError(
            "another training was begun before the loop over the prepared loader was done, and "
            "servers train one model at a time; begin the second training after the first loop, "
            "or, for models that train in turn (a GAN), use MirroredStrategy."
        )
    worker.settle()


def _groups(optimizer: Any, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the numbers of their variables; None for frozen ones."""
    numbers = {id(param): i for i, param in enumerate(params)}
    return [
        {**settings_of(group), "variables": [numbers.get(id(p)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]


def _by_server(whole: Mapping[int, Mapping[str, Any]], plan: TrainingPlan) -> list[Any]:
    """Cut a state by variable into each server's pieces."""
    return [cut(whole, [e.piece for e in extents], plan.shapes) for extents in plan.layout.extents]


def _pieces(plan: TrainingPlan) -> list[Piece]:
    return [e.piece for extents in plan.layout.extents for e in extents]


def _by_variable(states: Sequence[Any], plan: TrainingPlan) -> dict[int, dict[str, Any]]:
    """Join the states of the servers' pieces by variable."""
    flat = [state for each in states for state in each]
    return assemble(_pieces(plan), flat, plan.shapes)
