"""The cases: their data, model and loss, which every peer is given, and what is compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

RATE, MOMENTUM, FEATURES, CLASSES, WORDS, LENGTH = 0.2, 0.9, 6, 3, 11, 12
CLASS_WEIGHTS = (0.2, 1.0, 4.0)
IGNORED = -100

#: what a run hands back: weights, or metrics by name
Result = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A training of `epochs` over `rows` in global batches of `batch`; or one evaluation."""

    title: str
    rows: int = 24
    batch: int = 12
    epochs: int = 2
    task: str = "train"  # or "evaluate", "resume", "order"
    loss: str = "mean"  # or "sum", "weights", "ignored"
    accumulate: int = 1
    clip: float | None = None
    norm: str | None = None  # "local" or "synchronised"
    shuffle: bool = False
    drop_last: bool = False
    #: whether peers that differ here would show that the script is wrong
    must_be_equal: bool = False

    @property
    def tokens(self) -> bool:
        return self.loss == "ignored"

    @property
    def steps(self) -> int:
        """Global batches of an epoch."""
        return self.rows // self.batch if self.drop_last else -(-self.rows // self.batch)

    def data(self) -> Rows:
        draw = torch.Generator().manual_seed(1)
        if self.tokens:
            x = torch.randint(0, WORDS, (self.rows, LENGTH), generator=draw)
            lengths = torch.randint(1, LENGTH + 1, (self.rows, 1), generator=draw)
            return Rows(x, ((x + 1) % WORDS).where(torch.arange(LENGTH) < lengths, IGNORED))
        x = torch.randn(self.rows, FEATURES, generator=draw)
        if self.task == "evaluate":
            noise = torch.randn(self.rows, generator=draw)
            return Rows(x, ((x[:, 0] + noise) > 0).float().unsqueeze(1))
        return Rows(x, torch.randint(0, CLASSES, (self.rows,), generator=draw))

    def model(self) -> nn.Sequential:
        """The same first weights for everybody."""
        torch.manual_seed(0)
        if self.tokens:
            return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
        norm = [nn.BatchNorm1d(8)] if self.norm else []
        last = nn.Linear(8, 1 if self.task == "evaluate" else CLASSES)
        return nn.Sequential(nn.Linear(FEATURES, 8), *norm, nn.Tanh(), last)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.rate, momentum=MOMENTUM)

    @property
    def rate(self) -> float:
        return RATE / self.batch if self.loss == "sum" else RATE

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """One device's loss of a batch."""
        if self.task == "evaluate":
            return F.binary_cross_entropy_with_logits(output, target)
        if self.loss == "ignored":
            return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
        weight = torch.tensor(CLASS_WEIGHTS) if self.loss == "weights" else None
        reduction = "sum" if self.loss == "sum" else "mean"
        return F.cross_entropy(output, target, weight=weight, reduction=reduction)

    def summed(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the losses of all targets that count; their number is `counted`."""
        if self.tokens:
            output, target = output.flatten(0, 1), target.flatten()
        return F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets; `seen` are the numbers of the rows that were read, in their order."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.seen = x, y, list[int]()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.seen.append(int(index))
        return self.x[index], self.y[index]


def counted(target: Tensor) -> Tensor:
    return target.ne(IGNORED).sum()


def weights(model: nn.Module) -> Result:
    """Parameters, and the running statistics of BatchNorm."""
    state = model.state_dict()
    kept = [state[name].flatten() for name in state if not name.endswith("num_batches_tracked")]
    return {"weights": torch.cat(kept).tolist()}


def quality(output: Tensor, target: Tensor) -> Result:
    """Accuracy and the area under the ROC curve, of logits of one class."""
    output, target = output.flatten(), target.flatten() > 0.5
    pairs = output[target].unsqueeze(1) - output[~target]
    auc = ((pairs > 0).double() + (pairs == 0).double() / 2).mean()
    return {"accuracy": [((output > 0) == target).double().mean().item()], "auc": [auc.item()]}


@dataclass(frozen=True)
class Job:
    """A case as a peer is asked for it: the way is one of those that the peer lists."""

    case: Case
    way: str
    replicas: int
    folder: Path  # its own, the same for all processes
    data: Rows

    @property
    def share(self) -> int:
        """The batch of a process: the global batch stays the same."""
        return self.case.batch // self.replicas

    @property
    def synchronised(self) -> bool:
        return self.case.norm == "synchronised" and self.replicas > 1

    @property
    def stop(self) -> int:
        """Updates after which to stop and resume, in mid-epoch; one device is not interrupted."""
        return self.case.steps * 3 // 2 if self.case.task == "resume" and self.replicas > 1 else 0


CASES = {
    "divides": Case("batches that divide", must_be_equal=True),
    "short": Case("a short last batch", rows=29),
    "dropped": Case("that batch dropped, on one device too", rows=29, drop_last=True),
    "few": Case("fewer rows than processes in the last batch", rows=25),
    "odd": Case("an odd number of batches to deal out", rows=30),
    "ignored": Case("padding with `ignore_index`", loss="ignored"),
    "weighted": Case("class weights", loss="weights"),
    "accumulated": Case("accumulation, texts of unequal length", 48, loss="ignored", accumulate=2),
    "summed": Case("a summed loss", loss="sum"),
    "synchronised": Case("BatchNorm, synchronised", norm="synchronised"),
    "local": Case("BatchNorm, not synchronised", norm="local"),
    "clipped": Case("clipping by the norm", clip=0.05),
    "evaluation": Case("accuracy and AUC, uneven shares", 29, task="evaluate"),
    "resumed": Case("resume in mid-epoch", 48, task="resume", shuffle=True),
    "order": Case("the order of examples over epochs", 48, task="order", shuffle=True),
}
