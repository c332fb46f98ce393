"""Compares the results of a few rows as one batch and as shares, to rounding (row_check.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, StratagemError

LOSS = "the loss"
_OTHERWISE = "use one device, or skip this check (check=False) where that is meant."


class Advice(NamedTuple):
    """What a front end calls a mean, and a loss that counts its targets."""

    mean: str
    loss: str


TORCH = Advice("a mean", '"cross_entropy"')
KERAS = Advice(
    "a mean, such as self.add_loss(ops.mean(v)),",
    "SparseCategoricalCrossentropy(ignore_class=...)",
)


#: factor between observed rounding and tolerated differences
_MARGIN = 20


@dataclass
class Outcome:
    """What some rows, as one batch or as a share, gave. Copies: a dry run restores tensors."""

    outputs: list[Any] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    #: None if it was not computed
    loss: float | None = None
    #: the relative rounding of the coarsest dtype in the run
    epsilon: float = 0.0


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances of a tensor, of a gradient among larger ones, and of the loss."""

    own: float
    beside: float
    loss: float
    #: absolute tolerance of any gradient
    noise: float = 0.0

    @classmethod
    def of(cls, device: torch.device, runs: Iterable[Outcome]) -> Tolerance:
        """Choose by the coarsest dtype in any of the runs.

        Correct float32 models, untrained, differ between a batch and its shares by 1.2e-6
        at most on a CPU: 40 layers with norms; 12 of a transformer 4.4e-7, LSTMs over 256 steps,
        sums of 4096 and 12 convolutions less; gradients by 6e-7. Those of float64 by 1.6e-15.
        """
        epsilon = max(run.epsilon for run in runs)
        if epsilon > 1e-4:
            return cls(5e-2, 5e-2, 5e-2)
        if epsilon < 1e-12:
            return cls(1e-9, 1e-9, 1e-9)
        if device.type != "cpu" or torch.get_float32_matmul_precision() != "highest":
            return cls(1e-2, 1e-3, 1e-2)  # TF32 multiplies with 10 of a float's 23 bits
        return cls(3e-5, 1e-5, 3e-5)

    @property
    def floor(self) -> float:
        """Return the absolute tolerance of numbers near zero."""
        return min(1e-6, self.own / _MARGIN)

    def widened(self, plain: Outcome, disturbed: Outcome) -> Tolerance:
        """Widen by the observed rounding.

        `disturbed` is the plain result, computed with every intermediate value rounded otherwise.
        """
        outputs = [
            float(
                (_as_double(a) - _as_double(b)).abs().max()
                / _as_double(a).abs().max().clamp(min=1e-300)
            )
            for a, b in zip(plain.outputs, disturbed.outputs, strict=True)
            if isinstance(a, Tensor) and a.numel() and a.shape == b.shape
        ]
        pairs = list(zip(plain.gradients, disturbed.gradients, strict=True))
        gradients = [_norm(_difference(a, [] if b is None else [b])) for a, b in pairs]
        one, other = plain.loss or 0.0, disturbed.loss or 0.0
        return replace(
            self,
            own=max(self.own, *(_MARGIN * each for each in outputs), 0.0),
            loss=max(self.loss, _MARGIN * abs(one - other) / (abs(one) or 1.0)),
            noise=_MARGIN * max(gradients, default=0.0),
        )


def agree(
    compare: Callable[[Tolerance], None],
    tolerance: Tolerance,
    whole: Outcome,
    disturb: Callable[[], Outcome],
) -> None:
    """Compare; if that fails, compare again with a tolerance widened by the observed rounding.

    `disturb` is a run with other rounding. Near a minimum, for example, gradients are differences
    of almost equal numbers.
    """
    try:
        compare(tolerance)
    except NotDistributable:
        compare(tolerance.widened(whole, disturb()))


def copied(leaf: Any) -> Any:
    """Copy a tensor, since dry runs restore tensors that were written to."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def compare_outputs(
    verb: str, whole: list[Any], parts: list[list[Any]], tolerance: Tolerance, sizes: list[int]
) -> None:
    """Raise if the output of a row depends on the other rows."""
    told = f"rows of a batch go to several replicas, so they would {verb} something else than one"
    for leaf, *shares in zip(whole, *parts, strict=True):
        if not isinstance(leaf, Tensor) or not all(isinstance(each, Tensor) for each in shares):
            continue
        axes = _row_axes(leaf, shares)
        if len(axes) > 1 and leaf.shape[axes[0]]:
            raise NotDistributable(
                f"an output of the model compares rows with each other: it has the shape "
                f"{tuple(leaf.shape)} for {sum(sizes)} rows, and {tuple(shares[0].shape)} for "
                f"{sizes[0]} of them; {told} device; return what belongs to each row, and have "
                f"nothing look at other rows, {_OTHERWISE}"
            )
        apart = _excess(leaf, shares, axes[0], tolerance) if len(axes) == 1 else 0.0
        if apart:
            raise NotDistributable(
                f"the model's outputs for a row depend on the other rows of the batch (they differ "
                f"by up to {apart:.3g} between {sum(sizes)} rows at once and shares of "
                f"{' and '.join(map(str, sizes))}); {told} device; have layers look at each row by "
                "itself (BatchNorm is exact over replicas with sync_batchnorm=True), "
                f"{_OTHERWISE}"
            )


def _row_axes(leaf: Tensor, shares: Sequence[Tensor]) -> list[int]:
    """Return the axes along which the shares' lengths add up to the whole's."""
    if len({each.dim() for each in (leaf, *shares)}) > 1:
        return []
    lengths = [sum(each.shape[axis] for each in shares) for axis in range(leaf.dim())]
    return [axis for axis, length in enumerate(lengths) if length == leaf.shape[axis]]


def in_place(
    whole: Sequence[Tensor | None], parts: list[list[Tensor | None]]
) -> list[list[Tensor | None]]:
    """Pad the gradients of the shares' outputs to the whole output's shape, so they add up."""
    found: list[list[Tensor | None]] = [[] for _ in parts]
    for leaf, *shares in zip(whole, *parts, strict=True):
        given = [each for each in shares if each is not None]
        axes = _row_axes(leaf, given) if leaf is not None and len(given) == len(parts) else []
        start = 0
        for column, each in zip(found, shares, strict=True):
            if leaf is None or each is None or not axes:
                column.append(each)
                continue
            placed = torch.zeros_like(leaf)
            corner = placed.narrow(axes[0], start, each.shape[axes[0]])
            corner[tuple(slice(length) for length in each.shape)] = each
            column.append(placed)
            start += each.shape[axes[0]]
    return found


def _excess(leaf: Tensor, shares: list[Tensor], axis: int, tolerance: Tolerance) -> float:
    """Return by how much shares differ from the whole; 0 if it is only rounding."""
    start, worst, size = 0, 0.0, 0.0
    for each in shares:
        same = leaf.narrow(axis, start, each.shape[axis])
        start += each.shape[axis]
        for other in range(
            leaf.dim()
        ):  # padded to the longest row, which may be in the other share
            length = min(same.shape[other], each.shape[other])
            same, each = same.narrow(other, 0, length), each.narrow(other, 0, length)
        if same.numel():
            ours, theirs = _as_double(same), _as_double(each)
            worst = max(worst, float((ours - theirs).abs().max()))
            size = max(size, float(ours.abs().max()))
    if worst != worst or size in (float("inf"), float("nan")):
        return 0.0  # NaN or infinity, which is another problem
    return worst if worst > tolerance.own * size + tolerance.floor else 0.0


def _as_double(tensor: Tensor) -> Tensor:
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", kind)


def compare_loss(
    whole: float,
    together: float,
    size: float,
    tolerance: Tolerance,
    sizes: list[int],
    advice: Advice = TORCH,
) -> None:
    """Raise unless the shares' losses add up; `size`: the largest share's loss."""
    apart = abs(whole - together)
    if apart != apart or apart <= tolerance.loss * max(abs(whole), size) + tolerance.floor:
        return
    shares = " and ".join(map(str, sizes))
    seen = f"{whole:.6g} for {sum(sizes)} rows, {together:.6g} from shares of {shares}"
    raise _no_mean(LOSS, seen, advice)


def _no_mean(what: str, seen: str, advice: Advice) -> NotDistributable:
    return NotDistributable(
        f"{what} is not the mean over the rows ({seen}): it depends for a row on the other rows, "
        "adds rows up, or divides by something else than their number, so the shares of replicas "
        f"do not add up to the loss of one device; take {advice.mean} in place of a sum, return a "
        'value for each row (reduction="none") that depends on no other row, give outputs and '
        f"targets the same shape, use a loss that counts its targets, such as {advice.loss}, "
        f"{_OTHERWISE}"
    )


def compare_gradients(
    what: str,
    whole: Sequence[Tensor | None],
    parts: list[list[Tensor | None]],
    tolerance: Tolerance,
    sizes: list[int],
    advice: Advice = TORCH,
) -> None:
    """Raise unless the shares' gradients add up; `what` names their origin in the error."""
    norms = [sum(_norm(each) for each in column) for column in zip(*parts, strict=True)]
    everything = sum(norm**2 for norm in norms) ** 0.5
    for each, norm, *shares in zip(whole, norms, *parts, strict=True):
        given = [part for part in shares if part is not None]
        apart = _norm(_difference(each, given))
        rounding = tolerance.own * norm + tolerance.beside * everything + tolerance.noise
        if apart > rounding + 1e-30:
            shares_of = " and ".join(map(str, sizes))
            seen = f"{sum(sizes)} rows at once have another gradient than shares of {shares_of}"
            raise _no_mean(what, seen, advice)


def _difference(whole: Tensor | None, parts: list[Tensor]) -> Tensor | None:
    left = whole
    for part in parts:
        left = -part if left is None else left - part
    return left


def _norm(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    kind = torch.float32 if gradient.dtype.itemsize < 4 else None
    norm = float(torch.linalg.vector_norm(gradient.detach(), dtype=kind))
    return norm if norm < float("inf") else 0.0


# --- which batches are checked --------------------------------------------------------------------

log = logging.getLogger("stratagem")


class CheckSchedule:
    """Chooses the batches that are checked, for models of torch and of Keras.

    Of each verb these are the first batch since `compile` and, if a step runs code of the user, the
    2nd, 4th, 8th, ..., since a mask may come later.
    """

    def __init__(self) -> None:
        #: by verb: how many batches were checked or left out; one that is refused does not count
        self.passed: dict[str, int] = {}
        #: verbs of which a few rows could not be tried
        self._untried: set[str] = set()
        #: why, until the step has succeeded: one that fails, too, has a better error
        self._untold: str | None = None

    def is_due(self, verb: str, runs_user_code: Callable[[], bool]) -> bool:
        number = self.passed.get(verb, 0) + 1
        return number & (number - 1) == 0 and (number == 1 or runs_user_code())

    def count(self, verb: str) -> None:
        self.passed[verb] = self.passed.get(verb, 0) + 1

    def run(self, verb: str, check: Callable[[], None]) -> None:
        """Make a check; if that fails, have `after` warn, once."""
        if verb in self._untried:
            return
        try:
            check()
        except StratagemError:
            raise
        except Exception as error:
            self._untried.add(verb)
            self._untold = f"{type(error).__name__}: {error}"

    def after(self) -> None:
        """After the step: warn if its check could not be made."""
        why, self._untold = self._untold, None
        if why is not None:
            log.warning(
                "whether rows depend on each other cannot be tried on a part of a batch (%s), so "
                "that is taken on trust, unchecked.",
                why,
            )
