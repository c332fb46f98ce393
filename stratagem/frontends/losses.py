"""Losses as numerator and denominator, so that the shares of replicas add up exactly.

A loss of the global batch is  sum over replicas of numerator / sum over replicas of denominator.
For most losses the denominator is the number of rows. Cross entropy skips ignored targets and
weighs classes, so its denominator depends on the targets; a summed loss has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.compat.torch_names import MODULE_HOOKS
from stratagem.data.shares import count_rows
from stratagem.errors import NotDistributable, UsageError

_ALIASES = {
    "mse": "mse_loss",
    "mean_squared_error": "mse_loss",
    "mae": "l1_loss",
    "mean_absolute_error": "l1_loss",
    "huber": "huber_loss",
    "nll": "nll_loss",
    "binary_crossentropy": "binary_cross_entropy_with_logits",
    "sparse_categorical_crossentropy": "cross_entropy",
}
_COUNTED = (F.cross_entropy, F.nll_loss)
#: losses of probabilities and of log probabilities, so that outputs are no logits
_NO_LOGITS = (F.binary_cross_entropy, F.nll_loss)
#: losses that compare output and target elementwise, and broadcast either
_NUMBER_BY_NUMBER = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.kl_div,
    F.poisson_nll_loss,
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
)


class Loss(Protocol):
    """A loss as the training loop sees it."""

    #: whether the denominator of `terms` depends on the targets
    counted: bool
    #: whether it runs user code
    own: bool

    def mean(self, output: Any, target: Any, weight: Tensor | None) -> Tensor:
        """Return the loss of a whole batch on one device."""

    def terms(
        self, output: Any, target: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Any]:
        """Return numerator and denominator of one share of `examples` rows."""


class Meaning(NamedTuple):
    """How a loss interprets the model's outputs; named metrics interpret them likewise."""

    #: whether outputs are logits, which metrics turn into probabilities; None if unknown
    logits: bool | None = None
    #: whether a row has a value for each class, even if its target has one, too
    classes: bool = False
    #: the class number of targets that do not count
    ignored: int | None = None


def examples(output: Any, target: Any) -> int:
    """Return the number of rows of the targets, or of the outputs if there are no targets."""
    count = count_rows(target)
    return count if count >= 0 else count_rows(output)


def _flat_weights(weight: Tensor) -> Tensor:
    """Return sample weights as one number for each example."""
    if weight.dim() != 1 and weight.numel() != len(weight):
        raise UsageError(
            f"the sample weights of a batch have the shape {tuple(weight.shape)}; give one number "
            "for each example."
        )
    return weight.reshape(-1)


def _check_given(target: Any) -> None:
    """Raise if there are no targets, which torch's losses need."""
    if target is None:
        raise UsageError(
            "the loss needs targets, and there are none: y is missing, or the data yields x alone; "
            "give x and y, data that yields (x, y), or a loss of your own that takes None."
        )


def _check_even(target: Any, examples: int) -> None:
    """Raise if examples differ in their number of targets, so that shares' means do not add up."""
    if not isinstance(target, Tensor) or target.dim() == 0 or examples in target.shape:
        return
    if len(target) % max(examples, 1):
        raise NotDistributable(
            f"the targets of a share have {len(target)} rows for {examples} examples, so some "
            "examples have more than others, and the mean over all rows is not that of the shares' "
            'means; pad them, or use a loss that counts its targets, such as "cross_entropy".'
        )


def _check_alike(output: Any, target: Any) -> None:
    """Raise if torch would broadcast targets along the rows, which mixes rows of all shares."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return
    by_row = output.dim() == target.dim() > 0 and len(output) == len(target)
    if output.shape == target.shape or by_row:
        return
    raise NotDistributable(
        f"the loss compares outputs of shape {tuple(output.shape)} with targets of shape "
        f"{tuple(target.shape)}, and torch repeats one of them so that every row meets every "
        "other, also those of other replicas; give both the same shape, as with y[:, None] or "
        "output.squeeze(1)."
    )


class RowLoss:
    """A callable that returns the mean over the rows, or one value per row."""

    counted = False

    def __init__(
        self, function: Callable[..., Tensor], per_row: Callable[..., Tensor] | None = None
    ) -> None:
        self.function = function
        self.per_row = per_row
        #: whether it is user code, whose single number may not be a mean over the rows
        self.own = _is_own(function)
        self._by_number = function in _NUMBER_BY_NUMBER or type(function) in _NUMBER_BY_NUMBER

    def mean(self, output: Any, target: Any, weight: Tensor | None) -> Tensor:
        if weight is not None:
            return self._weighted(output, target, weight) / len(weight)
        if not self.own:
            _check_given(target)
        value = self.function(output, target)
        return value if value.dim() == 0 else value.mean()

    def terms(
        self, output: Any, target: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Any]:
        if weight is not None:
            return self._weighted(output, target, weight), float(len(weight))
        if self._by_number:
            _check_alike(output, target)
        _check_even(target, examples)
        return self.mean(output, target, None) * examples, float(examples)

    def _weighted(self, output: Any, target: Any, weight: Tensor) -> Tensor:
        if not self.own:
            _check_given(target)
        weight = _flat_weights(weight)
        values = (self.per_row or self.function)(output, target)
        if values.dim() == 0:
            raise UsageError(
                "sample weights need a loss with a value for each example, and this one returns "
                'a single number; use reduction="none" or a named loss such as "mse".'
            )
        return (values.reshape(len(weight), -1).mean(1) * weight).sum()


class SummedLoss:
    """A loss that sums over the rows, so that its gradient grows with the batch."""

    counted = False

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.own = _is_own(function)

    def mean(self, output: Any, target: Any, weight: Tensor | None) -> Tensor:
        if weight is not None:
            raise UsageError('sample weights need a loss with reduction="mean" or "none".')
        if not self.own:
            _check_given(target)
        return self.function(output, target)

    def terms(
        self, output: Any, target: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Any]:
        return self.mean(output, target, weight), None


class CountedLoss:
    """Cross entropy and NLL loss: a mean over the targets that count, weighted by class."""

    counted = True
    own = False

    def __init__(self, function: Callable[..., Tensor], module: nn.Module | None = None) -> None:
        """`module`: the loss module, whose settings are read at every call."""
        #: the user's loss
        self.function: Any = function if module is None else module
        self._torch_loss = function
        self._module: Any = module
        #: class weights, their version, and a copy of them on the outputs' device
        self._moved: tuple[Tensor, int, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_moved": None}

    @property
    def class_weight(self) -> Tensor | None:
        return None if self._module is None else self._module.weight

    @property
    def ignore_index(self) -> int:
        return -100 if self._module is None else self._module.ignore_index

    @property
    def options(self) -> dict[str, Any]:
        smoothing = getattr(self._module, "label_smoothing", None)
        return {} if smoothing is None else {"label_smoothing": smoothing}

    def _unweighted(self, output: Any, target: Any) -> Tensor:
        _check_given(target)
        if self._module is None:
            return self._torch_loss(output, target)
        weight = self._weight_on(output.device)
        if weight is None and self.ignore_index == -100 and not any(self.options.values()):
            return self._torch_loss(output, target)  # torch's defaults, which are faster
        return self._value(output, target, weight, "mean")

    def _value(self, output: Any, target: Any, by_class: Tensor | None, reduction: str) -> Tensor:
        value: Tensor = self._torch_loss(
            output,
            target,
            weight=by_class,
            reduction=reduction,
            **_only_integers(target, ignore_index=self.ignore_index),
            **self.options,
        )
        return value

    def _weight_on(self, device: torch.device) -> Tensor | None:
        """Return the class weights on a device; they are copied again only after a change."""
        weight = self.class_weight
        if weight is None or weight.device == device:
            return weight
        before = self._moved
        if before is None or before[0] is not weight or before[1] != weight._version:
            before = self._moved = (weight, weight._version, weight.to(device))
        return before[2]

    def mean(self, output: Any, target: Any, weight: Tensor | None) -> Tensor:
        if weight is None:
            return self._unweighted(output, target)
        numerator, denominator = self.terms(output, target, weight, len(weight))
        ratio: Tensor = numerator / denominator
        return ratio

    def terms(
        self, output: Any, target: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Any]:
        _check_given(target)
        by_class = self._weight_on(output.device)
        if weight is not None:
            weight = _flat_weights(weight)
            values = self._value(output, target, by_class, "none")
            return (values.reshape(len(weight), -1).mean(1) * weight).sum(), float(len(weight))
        value = self._value(output, target, by_class, "sum")
        return value, self._count(output, target, by_class)

    def count(self, target: Any) -> float:
        """Return the denominator of a batch, computed from its targets alone."""
        _check_given(target)
        return float(self._count(target, target, self._weight_on(target.device)))

    def _count(self, output: Tensor, target: Tensor, by_class: Tensor | None) -> Any:
        if target.is_floating_point():
            return float(output.numel() / output.shape[1 if output.dim() > 1 else 0])
        counts = target != self.ignore_index
        if by_class is None:
            return counts.sum()
        return (by_class[target.where(counts, 0)] * counts).sum()


def _is_own(function: Any) -> bool:
    """Return whether a loss is user code, or has hooks."""
    torchs = str(getattr(function, "__module__", "")).startswith("torch.nn.")
    return not torchs or _is_hooked(function)


def _is_hooked(function: Any) -> bool:
    hooks = ("forward", *MODULE_HOOKS)
    return isinstance(function, nn.Module) and any(vars(function).get(name) for name in hooks)


def _only_integers(target: Tensor, **options: Any) -> dict[str, Any]:
    return {} if target.is_floating_point() else options


def resolve(loss: Any) -> Loss:
    """Return the loss for a name ("cross_entropy"), a torch function or module, or any callable."""
    if isinstance(loss, str):
        loss = _by_name(loss)
    if isinstance(loss, type):
        raise UsageError(
            f"loss={loss.__name__} is a class; give an instance of it: {loss.__name__}()."
        )
    if loss in _COUNTED:
        return CountedLoss(loss)
    kind = getattr(type(loss), "forward", None)
    plain = kind in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward) and not _is_hooked(loss)
    if plain and loss.reduction == "mean":
        by_classes = kind is nn.CrossEntropyLoss.forward
        return CountedLoss(F.cross_entropy if by_classes else F.nll_loss, loss)
    if getattr(loss, "reduction", None) == "sum":
        return SummedLoss(loss)
    if not callable(loss):
        raise UsageError(
            f'loss={loss!r} is not callable; give a name such as "cross_entropy", a torch loss, '
            "or a function of (output, target)."
        )
    return RowLoss(loss, _unreduced(loss))


def meaning(loss: Any, from_logits: bool | None = None) -> Meaning:
    """Return how a loss interprets outputs; `from_logits` is for losses other than torch's."""
    if isinstance(loss, str):
        loss = _by_name(loss)
    by_label = loss is F.binary_cross_entropy_with_logits or isinstance(loss, nn.BCEWithLogitsLoss)
    by_class = loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
    if from_logits is None and (by_label or by_class):
        from_logits = True
    elif from_logits is None and (loss in _NO_LOGITS or isinstance(loss, nn.BCELoss | nn.NLLLoss)):
        from_logits = False
    return Meaning(from_logits, by_class, _ignored(loss))


def _ignored(loss: Any) -> int | None:
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.ignore_index
    return -100 if loss in _COUNTED else None


def _unreduced(loss: Any) -> Callable[..., Tensor] | None:
    """Return the loss with one value per row; None if torch has no such form."""
    if getattr(loss, "__module__", None) == F.__name__:
        return lambda output, target: loss(output, target, reduction="none")
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", None) == "mean":

        def each(output: Any, target: Any) -> Tensor:
            rowwise: Any = loss
            rowwise.reduction = "none"
            try:
                value: Tensor = rowwise(output, target)
            finally:
                rowwise.reduction = "mean"
            return value

        return each
    return None


def _by_name(name: str) -> Callable[..., Tensor]:
    function = getattr(F, _ALIASES.get(name, name), None)
    if not callable(function):
        raise UsageError(
            f'there is no loss "{name}"; the names are those of torch.nn.functional '
            '("cross_entropy", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits", ...) '
            f"and {', '.join(sorted(_ALIASES))}."
        )
    return function  # type: ignore[no-any-return]
