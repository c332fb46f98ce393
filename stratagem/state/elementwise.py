"""Which of torch's optimizers treat every element by itself.

Such an optimizer may step on any part of a parameter alone, and the parts put together are what it
would have made of the whole. One that looks at a whole tensor (Adafactor's row and column means,
Muon's orthogonalisation) may not.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

#: may be cut anywhere
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
)  # fmt: skip

#: may be cut between rows: those above, one that wants rows, and two whose step size is state
ROW_WISE: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE, torch.optim.SparseAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip
