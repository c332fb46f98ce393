"""Error feedback: what a compression leaves out of a gradient, its residual, is sent later.

Gradients are weighted before they are compressed: their sum over replicas is what is applied. So
residuals may be summed as well, and divided anew when the number of replicas changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.compression import Compression
from stratagem.codecs.layout import Layout
from stratagem.codecs.reducer import Reducer
from stratagem.errors import NotDistributable, UsageError
from stratagem.wire.collective import HALF, Collective, Pending, apply_weight

#: tensors by what they are ("residual", "momentum", ...) and by parameter
Kept = dict[str, dict[str, Tensor]]


class Carried:
    """Numbers carried from step to step, in up to three buffers that change places.

                 before        kept          draft
        step n   after n-2     after n-1     being written
        settle   after n-1     after n       free             if the gradients were finite
                 after n-1     after n-1     free             if they were not
        undo     free          after n-1                      step n is to be done again

    `before` exists only after `remember`.
    """

    before: Tensor | None = None

    def __init__(self, zeros: Tensor) -> None:
        self.kept, self.draft = zeros, torch.zeros_like(zeros)

    def remember(self) -> None:
        """Keep what `undo` goes back to."""
        self.before = torch.zeros_like(self.kept)

    def settle(self, spoilt: bool) -> None:
        """End the step: the draft becomes what is kept, unless the step is spoilt."""
        if spoilt:
            if self.before is not None:
                self.before.copy_(self.kept)
        elif self.before is None:
            self.kept, self.draft = self.draft, self.kept
        else:
            self.before, self.kept, self.draft = self.kept, self.draft, self.before

    def undo(self) -> None:
        """Go back to what was kept before the last step."""
        assert self.before is not None
        self.kept, self.before = self.before, self.kept


class Memory:
    """What a reducer carries from step to step for one flat gradient."""

    def __init__(self, flat: Tensor, layout: Layout, names: Sequence[str]) -> None:
        self.flat, self.layout = flat, layout
        dtype = torch.float32 if flat.dtype in HALF else flat.dtype
        #: tensors of the gradient's length, by what they are
        self.by_name = {name: Carried(torch.zeros_like(flat, dtype=dtype)) for name in names}
        self.residual = self.by_name["residual"]
        #: all that `settle` and `undo` move
        self.carried = list(self.by_name.values())
        #: whether this step has brought a number that is not finite
        self.spoilt = False

    def settle(self, spoilt: bool) -> None:
        """End the step, which is spoilt if any replica had a number that is not finite."""
        if spoilt:
            self.flat.fill_(float("nan"))
        for each in self.carried:
            each.settle(spoilt)
        self.spoilt = False

    def remember(self) -> None:
        """Have `undo` go back a step."""
        for each in self.carried:
            each.remember()

    def undo(self) -> None:
        """Go back to the state before the last step."""
        for each in self.carried:
            each.undo()


class Feedback(Reducer):
    """A reducer with error feedback.

    If the collective has a thread for it, a bucket is compressed and sent as soon as its gradients
    are ready, beside the rest of backward; otherwise after backward.

    A NaN or infinity on any replica makes all gradients of the step NaN on all replicas, and the
    step leaves the residuals as they were.
    """

    lossy = True
    feeds_back = True
    #: what is carried for each number of a gradient
    keeps: tuple[str, ...] = ("residual",)
    #: whether the last step can be undone, which needs memory for one more gradient
    undoes = False

    def __init__(self, collective: Collective, record: Compression) -> None:
        self.collective, self.record = collective, record
        self.whole = not collective.runs_beside
        self.steps = 0
        self._memories: dict[int, Memory] = {}

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if dtype.is_complex:
            raise NotDistributable(
                f"wire={self.record!r} cannot carry gradients of complex parameters; leave it out."
            )
        return self.collective.buffer(count, dtype, device)

    def lay_out(self, flat: Tensor, layout: Layout) -> None:
        made = self._memories[flat.data_ptr()] = self.memory(flat, layout)
        if self.undoes:
            made.remember()

    def memory(self, flat: Tensor, layout: Layout) -> Memory:
        return Memory(flat, layout, self.keeps)

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        work = partial(self._reduce, self._memories[flat.data_ptr()], weight)
        if not self.whole and flat.device.type == "cpu":
            return self.collective.beside(work)
        work()
        return Pending()

    def _reduce(self, memory: Memory, weight: float) -> None:
        apply_weight(memory.flat, weight)
        dense = self.steps < self.record.dense_steps
        (self.send_dense if dense else self.send)(memory, not finite(memory.flat))

    def send_dense(self, memory: Memory, spoilt: bool) -> None:
        """All-reduce every number, the residual included."""
        memory.flat.add_(memory.residual.kept)
        self.collective.all_reduce(memory.flat).wait()
        memory.spoilt = not finite(memory.flat)
        memory.residual.draft.zero_()

    def send(self, memory: Memory, spoilt: bool) -> None:
        """Replace the flat gradient by the sum of what all replicas send, compressed."""
        raise NotImplementedError

    def end_step(self) -> None:
        spoilt = any(memory.spoilt for memory in self._memories.values())
        for memory in self._memories.values():
            memory.settle(spoilt)
        self.steps += 1

    # --- replicas that leave and join ------------------------------------------------------------

    def state_at(self, steps: int) -> dict[str, Any]:
        """Return the state after `steps` steps, the last or the one before; else nothing."""
        if steps == self.steps - 1:
            for memory in self._memories.values():
                memory.undo()
            self.steps = steps
        return self.state() if steps == self.steps else {}

    def rejoin(self, steps: int, mine: Kept, replicas: Sequence[Kept]) -> None:
        """Resume after `steps` steps, in another group of replicas.

        Residuals of sums are summed over the replicas that are left, and each takes its new slice.
        Factors are the same on all replicas and come from any of them.
        """
        self.steps = steps
        sums = [kept["of_sums"] for kept in replicas if "of_sums" in kept]
        total = {n: torch.stack([each[n] for each in sums]).sum(0) for n in (sums or [{}])[0]}
        factors = [kept["factors"] for kept in replicas if "factors" in kept]
        alike: Kept = {"of_sums": total, "factors": factors[0] if factors else {}}
        for memory in self._memories.values():
            self.restore(memory, {**mine, **alike})

    # --- checkpoints --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        kept: Kept = {}
        for memory in self._memories.values():
            for name, by_parameter in self.saved(memory).items():
                kept.setdefault(name, {}).update(by_parameter)
        return {"wire": repr(self.record), "steps": self.steps, "kept": kept}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        states = [state for state in states if state]
        if not states:
            return
        self.steps = int(states[0]["steps"])
        if len(states) == self.collective.size:
            kept: Kept = states[self.collective.rank]["kept"]
        else:
            kept = shared_out([state["kept"] for state in states], self.collective.size)
        known = {name for memory in self._memories.values() for name in memory.layout.names}
        gone = not known.intersection(kept.get("residual", {}))
        if gone and not states[0].get("refrozen"):
            raise UsageError(
                f"what wire={self.record!r} had kept when this was saved belongs to parameters "
                "with other names; go on with the model that was saved."
            )
        for memory in self._memories.values():
            self.restore(memory, kept)

    def saved(self, memory: Memory) -> Kept:
        return {name: memory.layout.split(each.kept) for name, each in memory.by_name.items()}

    def restore(self, memory: Memory, kept: Kept) -> None:
        for name, each in memory.by_name.items():
            memory.layout.join(kept.get(name, {}), each.kept)


def finite(flat: Tensor) -> bool:
    """Whether there is no NaN and no infinity."""
    if not flat.numel():
        return True
    low, high = flat.aminmax()
    return bool((high - low).isfinite()) or bool(flat.isfinite().all())


#: two parts of one sum: residuals of gradients, and of the sums of slices
_ADDED = ("residual", "of_sums")


def shared_out(replicas: Sequence[Kept], count: int) -> Kept:
    """Return what each of `count` replicas carries on: an equal part of the old replicas' sum."""
    total: Kept = {}
    for kept in replicas:
        for name, by_parameter in kept.items():
            alike = name == "factors"  # the same on all replicas
            into = total.setdefault("residual" if name in _ADDED else name, {})
            for parameter, values in by_parameter.items():
                if parameter not in into or alike:
                    into[parameter] = values if alike else values / count
                else:
                    into[parameter] = into[parameter] + values / count
    return total
