"""One set of a model's tensors in shared memory, of which every process writes its own part.

    parameters, buffers    in one table per type; the owner writes, all processes read
    optimizer state        the owner moves new state into a segment and announces it to the first
                           process, which sees the whole state at any time

So the first process has everything when a checkpoint is due, when a call ends, and also after
another process has died or the user has pressed Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import NotDistributable
from stratagem.state.optimizer_state import params_of
from stratagem.wire.freed_memory import return_freed_memory
from stratagem.wire.segment import Segment, aligned
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.tree import gather_tree

_LARGE = 1 << 20  # bytes of a tensor, from which its memory is given back at once
_FEW = 256  # elements of each tensor, at most, that tell whether it was written to


def _freed(moved: Tensor) -> None:
    """A tensor's own memory is free now that it lies in shared memory."""
    if moved.nbytes >= _LARGE:
        return_freed_memory()


def shared_views(
    tensors: Iterable[Tensor], collective: SharedMemoryCollective
) -> list[tuple[Tensor, Tensor, Segment]]:
    """Return each tensor with a shared view of its shape and type, and its segment. Collective."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    views: list[tuple[Tensor, Tensor, Segment]] = []
    for dtype, members in by_type.items():
        count = sum(t.numel() for t in members)
        table = collective.table(max(count, 1), dtype, rows=1)
        flat, at = table.rows[0], 0
        for tensor in members:
            view = flat[at : at + tensor.numel()].view(tensor.shape)
            views.append((tensor, view, table.segment))
            at += tensor.numel()
    return views


class SharedTensors:
    """Parameters, buffers and the like, with the first process' values. Made collectively."""

    def __init__(
        self,
        given: Iterable[Tensor],
        collective: SharedMemoryCollective,
        *,
        returns: bool = True,
        keeps: bool = True,
    ) -> None:
        """`given`: in the same order on all processes.

        returns   whether they get private memory again in the end, on the first process
        keeps     whether that is the old memory, kept until then. Else it is freed tensor by
                  tensor, and shared pages take no memory of a process until it uses them: a device
                  with some of the layers has no room for all.
        """
        self._collective = collective
        self._leads = collective.rank == 0
        self._strange: set[Tensor] = set()
        self._seen = False
        tensors = list(dict.fromkeys(given))
        #: on the first process: the tensors' old memory
        self._homes = [(t, t.data) for t in tensors] if self._leads and returns and keeps else []
        self._renews = self._leads and returns and not keeps
        self.views = shared_views(tensors, collective)
        with torch.no_grad():
            for tensor, view, segment in self.views:
                if self._leads:
                    view.copy_(tensor)
                tensor.data = view
                if self._leads and not keeps:
                    segment.let_go(view)
                    _freed(view)
        collective.barrier()

    def own(self, used: dict[Tensor, list[int]]) -> None:
        """Note which processes use each tensor."""
        self._strange = {t for t, users in used.items() if self._collective.rank not in users}
        self._seen = True

    def leave_home(self) -> None:
        """Free this process' pages of tensors that only other processes use."""
        if self._seen:
            self._seen = False
            for tensor, view, segment in self.views:
                if tensor in self._strange:
                    segment.let_go(view)

    def bring_home(self) -> None:
        """Note that tensors are about to be read, after which their pages take memory here."""
        self._seen = True

    def take_back(self, owned: Iterable[Tensor] | None = None) -> None:
        """Move tensors that were given other memory (`t.data = ...`) back, with their values: those
        that this process owns, or all."""
        mine = None if owned is None else set(owned)
        for tensor, view, _ in self.views:
            if tensor.data_ptr() == view.data_ptr() or (mine is not None and tensor not in mine):
                continue
            if tensor.shape != view.shape:
                raise NotDistributable(
                    f"a parameter or buffer of shape {tuple(view.shape)} has become "
                    f"{tuple(tensor.shape)} in training, and processes share its memory; keep its "
                    "shape, or train on one device."
                )
            tensor.data = view.copy_(tensor.detach())

    def close(self) -> None:
        """On the first process: move the tensors to their old memory, or to new private memory."""
        with torch.no_grad():
            for tensor, home in self._homes:
                if tensor.shape == home.shape:
                    home.copy_(tensor)
                    tensor.data = home
            for tensor, view, segment in self.views if self._renews else ():
                tensor.data = tensor.detach().clone()
                segment.let_go(view)


class WriteWatch:
    """Tells whether this process' code has written to shared tensors since the mark.

    By version and memory, and by some elements of those that are `owned` here: `p.data` has no
    version, but all processes see what one of them has written.
    """

    def __init__(self, shared: SharedTensors, owned: set[Tensor]) -> None:
        self._tensors = [tensor for tensor, _, _ in shared.views]
        flats: dict[torch.dtype, Tensor] = {}
        places: dict[torch.dtype, list[Tensor]] = {}
        for tensor, view, _ in shared.views:
            if (count := view.numel()) and tensor in owned:
                size = view.untyped_storage().nbytes() // view.element_size()
                flats[view.dtype] = view.as_strided((size,), (1,), 0)
                few = _of_each(len(view) if view.dim() else 1, count)
                places.setdefault(view.dtype, []).append(few + int(view.storage_offset()))
        self._samples = [(flats[dtype], torch.cat(at)) for dtype, at in places.items()]
        self.mark()

    def mark(self) -> None:
        """Remember the tensors as they are."""
        self._seen, self._few = self._look()

    def written(self) -> bool:
        """Return whether they have changed since the mark."""
        seen, few = self._look()
        return seen != self._seen or not all(map(torch.equal, few, self._few))

    def _look(self) -> tuple[list[tuple[int, int]], list[Tensor]]:
        few = [flat.take(at).view(torch.uint8) for flat, at in self._samples]  # NaN is itself
        return [(t._version, t.data_ptr()) for t in self._tensors], few


def _of_each(rows: int, count: int) -> Tensor:
    """Return the places of some elements: one of each row and each column, if these are few."""
    columns = count // rows
    longer = max(rows, columns)
    diagonal = torch.arange(0, longer, -(-longer // _FEW))
    return diagonal % rows * columns + diagonal % columns


class OwnedState:
    """The state of an optimizer of which every process steps some parameters.

    On the first process it stays in shared memory after training: no other process writes there
    then, and a copy may not fit.
    """

    def __init__(self, optimizer: Optimizer, owned: set[Tensor], *, leads: bool) -> None:
        self._optimizer, self._owned, self._leads = optimizer, owned, leads
        self._params = params_of(optimizer)
        #: shared memory of each state, by the number of its parameter and its name
        self._views: dict[tuple[int, str], Tensor] = {}
        self.renew()

    def renew(self) -> None:
        """Begin with other state, which the loop has loaded or cleared."""
        self._views.clear()
        for param in () if self._leads else self._params:
            if param not in self._owned:
                self._optimizer.state.pop(param, None)

    def share(self, collective: SharedMemoryCollective) -> None:
        """After a step: have the first process see every state. Collective."""
        everybody = gather_tree(collective, self._announcement())
        for each in everybody[1:] if self._leads else ():
            if each is not None:
                self._adopt(each)

    def _announcement(self) -> dict[str, Any] | None:
        """Move new state into shared memory; return the announcement of it, if any."""
        entries: list[tuple[int, str, Tensor]] = []
        numbers: list[list[Any]] = []
        for index, param in enumerate(self._params):
            if param not in self._owned:
                continue
            for name, value in self._optimizer.state.get(param, {}).items():
                if not isinstance(value, Tensor):
                    numbers.append([index, name, value])
                elif not self._is_home(index, name, value):
                    entries.append((index, name, value))
        if not entries and not numbers:
            return None
        news: dict[str, Any] = {"numbers": numbers}
        return news | self._moved(entries) if entries else news

    def _is_home(self, index: int, name: str, value: Tensor) -> bool:
        """Return whether a state has shared memory; if the optimizer replaced it, copy it back."""
        view = self._views.get((index, name))
        if view is None or view.shape != value.shape or view.dtype != value.dtype:
            return False
        if view.data_ptr() != value.data_ptr():
            self._optimizer.state[self._params[index]][name] = view.copy_(value)
        return True

    def _moved(self, entries: list[tuple[int, str, Tensor]]) -> dict[str, Any]:
        """Move states into a segment one by one, so that each frees its memory at once."""
        starts = [0]
        for *_, value in entries:
            starts.append(starts[-1] + aligned(value.nbytes))
        segment = Segment(starts[-1])
        outline = []
        for start in starts[:-1]:
            index, name, value = entries.pop(0)
            view = segment.tensor(value.dtype, value.shape, start).copy_(value)
            self._views[index, name] = self._optimizer.state[self._params[index]][name] = view
            del value
            _freed(view)
            kind = str(view.dtype).removeprefix("torch.")
            outline.append([index, name, kind, list(view.shape), start])
        self._segment = segment  # until the first process has mapped it
        return {"handle": segment.handle, "entries": outline}

    def _adopt(self, announced: dict[str, Any]) -> None:
        """On the first process: map the state that another process has announced."""
        for index, name, value in announced["numbers"]:
            self._optimizer.state[self._params[index]][name] = value
        if "handle" not in announced:
            return
        segment = Segment.attach(announced["handle"])
        for index, name, kind, shape, start in announced["entries"]:
            view = segment.tensor(getattr(torch, kind), shape, start)
            self._optimizer.state[self._params[index]][name] = view


class SharedModel:
    """A module's tensors and optimizer state, each process updating a part. Made collectively."""

    def __init__(
        self,
        tensors: Iterable[Tensor],
        optimizer: Optimizer,
        collective: SharedMemoryCollective,
    ) -> None:
        self._tensors = SharedTensors(tensors, collective, keeps=False)
        self._optimizer, self._collective = optimizer, collective
        self._state: OwnedState | None = None
        self._owned: list[Tensor] = []
        self.leave_home, self.bring_home = self._tensors.leave_home, self._tensors.bring_home

    def own(self, owned: set[Tensor], used: dict[Tensor, list[int]]) -> None:
        """Set the parameters stepped here, and the processes that use each tensor, its owner first.
        Collective."""
        rank = self._collective.rank
        self._owned = [t for t, users in used.items() if users[0] == rank]
        self._tensors.own(used)
        self._state = OwnedState(self._optimizer, owned, leads=rank == 0)
        self._state.share(self._collective)

    def updated(self) -> None:
        """After an update: share it, and wait until all processes have updated. Collective."""
        assert self._state is not None
        self._tensors.take_back(self._owned)
        self._state.share(self._collective)

    def take_back(self) -> None:
        """Move tensors that were given other memory back, with their values."""
        self._tensors.take_back()

    def close(self) -> None:
        """Have the first process own its memory again. Collective."""
        self._collective.barrier()
        self._tensors.close()
        self._collective.barrier()

    def leave(self) -> None:
        """Do the same after a failure, without the other processes."""
        self._tensors.close()
