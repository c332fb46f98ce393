"""A gradient's way on one replica: from the backward hook, through the buckets, to the sum.

    backward fires the hook -> bucket -> reducer -> collective -> p.grad holds the global gradient

When `loss.backward()` has returned and `finish` has run, every `p.grad` is what one device would
have computed on the whole batch. Clipping, unscaling and the optimizer come after and need no
change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.capabilities import sentence
from stratagem.codecs.layout import layout
from stratagem.codecs.reducer import Reducer
from stratagem.compat.torch_names import after_backward
from stratagem.errors import NotDistributable, UsageError
from stratagem.state.factors import Factors
from stratagem.training import setup
from stratagem.training.committer import Commit
from stratagem.training.custom_loop import LossReader
from stratagem.training.loss_reading import AS_ROWS, NOTES, largest
from stratagem.training.lossy_wire import Keeper
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings
from stratagem.training.step_figures import figures_of
from stratagem.wire.buckets import WHOLE, Buckets
from stratagem.wire.collective import Collective, Pending

BUCKET_BYTES = 8 << 20
_READ_AT_ONCE = 3  # passes whose notes are looked at before the next one, on a GPU


def open_exchange(
    named: Sequence[tuple[str, nn.Parameter]], replica: Replica, settings: Settings, **options: Any
) -> GradientExchange:
    """Open the committer of a strategy, the all-reduce unless it has its own. Collective."""
    made = settings.committer or GradientExchange
    reducer = setup.choose_reducer([p for _, p in named], replica, settings)
    committer: GradientExchange = made(named, replica, reducer, **options)
    return committer


class GradientExchange(Keeper):
    """The committer that all-reduces: hooks on the parameters of one replica's module.

    The caller must keep a reference. A strategy of another kind overrides `finish` or `sync`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        replica: Replica,
        reducer: Reducer,
        *,
        notes: int = 0,
        every_backward: bool = False,
        reader: LossReader | None = None,
    ) -> None:
        self.replica = replica
        self.reducer = reducer
        #: reduce at the end of every backward pass, for custom loops
        self.every_backward = every_backward
        #: in custom loops: knows what losses are divided by
        self._reader = reader
        #: a copy of the gradients that an earlier pass has reduced, while a pass adds to them
        self._earlier: list[Tensor] | None = None
        #: on a GPU: the largest notes of the passes that were not checked yet
        self._unread: Tensor | None = None
        notes = notes if reader is None else NOTES
        self._switch = _Switch()
        params = [p for _, p in named if p.requires_grad]
        _refuse_odd([(n, p) for n, p in named if p.requires_grad])
        overlaps = replica.collective.overlaps and not reducer.whole
        self.buckets = Buckets(
            params,
            reducer.buffer,
            capacity=BUCKET_BYTES if overlaps else WHOLE,
            notes=notes,
            notes_apart=replica.collective.buffer if reducer.lossy else None,
            may_be_kept=every_backward,
        )
        _lay_out(self.buckets, reducer, [n for n, p in named if p.requires_grad], params)
        #: the notes of most passes of custom loops, and that all parameters have a gradient
        usual = torch.tensor([*AS_ROWS, *[1.0] * len(params)])
        self._usual_tail = usual.to(self.buckets.tail)
        self._overlaps = overlaps
        self._index = {p: i for i, p in enumerate(params)}
        self.fired = [False] * len(params)
        self._under_way: list[Pending] = []
        self._open = False
        #: how many reductions have been completed; what is called after each and after a loader
        self.finished = 0
        self.after: Callable[[], None] = lambda: None
        ready = _weakly(self._ready, self._switch)
        self._handles: list[Any] = [_on_gradient(p, ready) for p in params]
        if reader is not None:
            reader.prepared.serve(self)
        for name, p in named:
            if not p.requires_grad and _can_train(p):
                self._handles.append(_guard_frozen(name, p))
        flats = [bucket.flat for bucket in self.buckets.buckets]
        flats += [self.buckets.apart] if self.buckets.apart is not None else []
        #: gives the memory back; also when a prepared model is garbage-collected
        self._release = weakref.finalize(self, _release, replica.collective, flats)
        self._release.atexit = False

    @property
    def armed(self) -> bool:
        """Whether gradients are added up; not in backward passes that only accumulate."""
        return self._switch.on

    @armed.setter
    def armed(self, on: bool) -> None:
        self._switch.on = on

    def _ready(self, param: Tensor) -> None:
        """Copy a finished gradient into its bucket, and reduce the buckets that are full."""
        if not self._open:
            if self.reducer.moves:
                self._refuse_second_pass(param)
            self._begin()
        if param.grad is None:
            return  # the gradient comes in factors
        index = self._index[param]  # type: ignore[index]
        if param.grad.layout != torch.strided:
            raise NotDistributable(sentence("replicas", "sparse gradients"))
        self.fired[index] = True
        self.buckets.take(index, param)  # type: ignore[arg-type]
        if self._overlaps:
            self.send(self.buckets.full())

    def _is_reduced(self, index: int, param: Tensor) -> bool:
        """Whether an earlier pass has already been added up into this gradient."""
        grad = param.grad
        return grad is not None and grad.data_ptr() == self.buckets.views[index].data_ptr()

    def _refuse_second_pass(self, first: Tensor) -> None:
        """Refuse to add to gradients that the wire's momentum is in already."""
        for i, param in enumerate(self.buckets.params):
            kept = param is not first and self._is_reduced(i, param)
            if kept and bool(self.buckets.views[i].any()):
                raise NotDistributable(
                    "backward adds to gradients that were sent already, and the wire's momentum "
                    "would count them twice; call zero_grad before each backward, or leave the "
                    "momentum to the optimizer."
                )

    def _begin(self) -> None:
        self._open = True
        self.fired = [False] * len(self.fired)
        self.buckets.begin()
        if self.every_backward:
            after_backward(self._finish_by_itself)

    def _finish_by_itself(self) -> None:
        """End a backward pass; in a custom loop, divide by what the losses were divided by."""
        reader = self._reader
        if reader is None:
            self.finish([])
            return
        notes = self.finish(reader.reading.notes())
        figures_of(self.replica).step(self.replica.share.examples)
        if notes.is_cuda and self.finished > _READ_AT_ONCE:  # not to wait for the device
            self._unread = largest(notes, self._unread)
            self._divide(notes[0])
            return
        total = reader.settle(notes.tolist())
        if abs(total - 1.0) > (1e-6 if notes.dtype is torch.float32 else 1e-14):
            self._divide(torch.tensor(total, dtype=notes.dtype, device=notes.device))
        self._earlier = None

    def _divide(self, total: Tensor) -> None:
        """Divide what this pass has added to the gradients; zeros stay if nothing counts."""
        total = torch.where(total == 0, torch.ones_like(total), total)
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            self.buckets.scale(1.0 / total)
        else:
            for bucket, before in zip(self.buckets.buckets, earlier, strict=True):
                gradients = bucket.flat[: len(before)]
                gradients.sub_(before).div_(total).add_(before)
        self.after()  # once more: the gradients have been written

    def has(self, param: Tensor) -> bool:
        """Whether this exchange adds up the gradients of a parameter."""
        return param in self._index

    def keep_earlier(self) -> None:
        """Copy earlier gradients before a pass whose own sum alone may have to be divided."""
        self._earlier, buckets = None, self.buckets
        for param in buckets.params:
            if param.grad is not None:
                break
        else:
            return
        reduced = [self._is_reduced(i, param) for i, param in enumerate(buckets.params)]
        if any(reduced):
            self._earlier = [b.flat[: buckets.length(b)].clone() for b in buckets.buckets]
            for bucket, before in zip(buckets.buckets, self._earlier, strict=True):
                sizes = [buckets.params[i].numel() for i in bucket.members]
                for i, part in zip(bucket.members, torch.split(before, sizes), strict=True):
                    if not reduced[i]:  # the memory holds a gradient that the loop has dropped
                        part.zero_()

    def verify(self) -> None:
        """Check the readings of losses that have not been checked for a while."""
        if self._unread is not None and self._reader is not None:
            unread, self._unread = self._unread, None
            self._reader.settle(unread.tolist())

    def send(self, buckets: list[Any]) -> None:
        """Begin to reduce full buckets; `finish` waits for them."""
        weight = self.replica.share.weight
        for bucket in buckets:
            self._under_way.append(self.reducer.reduce(bucket.flat, weight))

    def stage(
        self, notes: Sequence[float | Tensor], factors: Mapping[int, Factors] | None = None
    ) -> None:
        """Complete the buckets: parameters without a gradient, and the notes.

        A gradient in `factors` may have a product besides, which `Factors.mark` records.
        """
        if not self._open:
            self._begin()
        buckets = self.buckets
        has = list(self.fired)
        for i, fired in enumerate(self.fired if factors or not all(has) else ()):
            grad = buckets.params[i].grad
            if not fired and grad is not None:
                has[i] = True
                if grad.data_ptr() != buckets.views[i].data_ptr():
                    buckets.spare(i)
                    buckets.views[i].copy_(grad)
            if factors and i in factors:
                factors[i].mark(has[i])
                has[i] |= factors[i].kept
            elif not has[i]:
                buckets.spare(i)
                buckets.views[i].zero_()
        self._open = False
        if notes is AS_ROWS and all(has):
            buckets.tail.copy_(self._usual_tail)
            return
        if notes:
            write_notes(buckets.notes, notes)
        if all(has):
            buckets.used.fill_(1.0)
        else:
            buckets.used.copy_(torch.tensor(has, dtype=torch.float32))

    def commit(self, notes: Sequence[float | Tensor]) -> Commit:
        return Commit(True, self.finish(notes))

    def sync(self) -> None:
        """Do nothing: every replica has made the same update."""

    def finish(self, notes: Sequence[float | Tensor]) -> Tensor:
        """All-reduce the remaining buckets and wait for all; return the sum of the notes."""
        self.stage(notes)
        buckets = self.buckets
        self.send(buckets.rest())
        if buckets.apart is not None:
            weight = self.replica.share.weight
            self._under_way.append(self.replica.collective.all_reduce(buckets.apart, weight))
        for pending in self._under_way:
            pending.wait()
        self._under_way.clear()
        self.reducer.end_step()
        return self.finished_with()

    def finished_with(self) -> Tensor:
        """End the step: the buckets hold the sums of all replicas; return the notes."""
        self.finished += 1
        if not all(self.fired):
            self.settle_unused(self.buckets.used.tolist())
        self.after()
        return self.buckets.notes

    def settle_unused(self, used: Sequence[float]) -> None:
        """Remove the gradient of parameters that no replica used: a zero still moves an optimizer.

        A lossy wire may send now what it left out of earlier gradients; that counts as one.
        """
        for i, fired in enumerate(self.fired):
            if not fired:
                late = self.reducer.feeds_back and bool(self.buckets.views[i].any())
                has = used[i] > 0 or late
                self.buckets.params[i].grad = self.buckets.gradient(i) if has else None

    def close(self) -> None:
        """Take the hooks away; gradients get memory of their own again."""
        for handle in self._handles:
            handle.remove()
        for param in self.buckets.params:
            param.grad = None
        self._release()


def write_notes(into: Tensor, notes: Sequence[float | Tensor]) -> None:
    """Write numbers, or tensors of one, into a committer's notes."""
    if into.device.type == "cpu" and into.dtype in (torch.float32, torch.float64):
        into.numpy()[:] = list(map(float, notes))  # a tenth of the time of copies between tensors
    elif any(isinstance(note, Tensor) for note in notes):
        for i, note in enumerate(notes):
            into[i] = note
    else:
        into.copy_(torch.tensor(notes, dtype=into.dtype))


def _release(collective: Collective, flats: list[Tensor]) -> None:
    for flat in flats:
        collective.release(flat)


@dataclass
class _Switch:
    """Whether an exchange is armed; outlives the exchange."""

    on: bool = True


def _weakly(ready: Callable[[Tensor], None], switch: _Switch) -> Callable[[Tensor], None]:
    """Return a hook that holds its exchange weakly: parameters would keep it alive for ever."""
    found = weakref.WeakMethod(ready)

    def hook(param: Tensor) -> None:
        exchange = found()
        if not switch.on:
            return
        if exchange is None:
            raise UsageError(
                "the model that was given to prepare is no more, but a parameter of it is still "
                "trained; keep the model as long as you train it."
            )
        exchange(param)

    return hook


def _on_gradient(param: Any, hook: Callable[[Tensor], None]) -> Any:
    return param.register_post_accumulate_grad_hook(hook)


def _lay_out(
    buckets: Buckets, reducer: Reducer, names: Sequence[str], params: Sequence[Tensor]
) -> None:
    for bucket in buckets.buckets:
        members = bucket.members
        inside = layout([names[i] for i in members], [params[i] for i in members])
        reducer.lay_out(bucket.flat, inside)


def _refuse_odd(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    if not named:
        raise NotDistributable("the model has no parameter that requires a gradient.")
    for name, param in named:
        if nn.parameter.is_lazy(param):
            raise NotDistributable(
                f"parameter {name!r} has no shape yet (a lazy module); run one batch through the "
                "model before it is distributed."
            )
        if param.device != named[0][1].device:
            raise NotDistributable(
                f"parameter {name!r} is on {param.device}, others on {named[0][1].device}; a "
                "replica lives on one device."
            )


def _guard_frozen(name: str, param: nn.Parameter) -> Any:
    """Refuse a gradient of a parameter that is unfrozen later: it would differ on each replica."""

    def refuse(_: Tensor) -> None:
        raise UsageError(
            f"parameter {name!r} was frozen when the model was distributed and has a gradient "
            "now. In fit, callbacks unfreeze at the beginning or the end of an epoch; in a loop of "
            "your own, unfreeze it first and call prepare again."
        )

    param.requires_grad_(True)
    handle = _on_gradient(param, refuse)
    param.requires_grad_(False)
    return handle


def _can_train(param: Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()
