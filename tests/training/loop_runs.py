"""A custom loop that goes on, and processes that are killed in the middle of it.

`python -m tests.training.loop_runs <strategy> <folder> <batch>` trains with checkpoints and kills
itself, and with it everything that it has started, after so many batches (0: not at all). What
came of it is in `<folder>.pt`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import stratagem as sg
from tests.frontends.resume_runs import BATCH, ROWS, Rows, make

EPOCHS = 3
STEPS = -(-ROWS // BATCH)


def note(x: Any, log: Path) -> None:
    """Return the rows, without noise, that a loop was given."""
    known = {float(Rows(0.0, None)[i][0][0]): i for i in range(ROWS)}
    with open(log, "a") as file:
        file.write("".join(f"{known[float(row[0])]}\n" for row in x))


def loop(
    on: Any, plan: Any, draws: bool, accumulate: int, log: Path | None, after: int, end: int
) -> dict[str, Any]:
    """A user's loop, with all that it may draw, keep and schedule."""
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    parts: list[nn.Module] = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)]
    if draws:
        parts[1:1] = [nn.BatchNorm1d(16), nn.Dropout(0.2)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = DataLoader(Rows(0.1 * draws, None), batch_size=BATCH, shuffle=True)
    loader: Any
    model, optimizer, loader = on.prepare(model, optimizer, rows, resume=plan)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 9, 12], 0.5)
    loader.remember(steps=steps)
    losses, seen = {}, 0
    for epoch in loader.epochs(EPOCHS):
        for i, (x, y) in enumerate(loader, loader.seen):
            if log is not None:
                note(x, log)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == STEPS:
                optimizer.step()
                optimizer.zero_grad()
                steps.step()
            losses[epoch, i] = on.mean(loss.detach())
            seen += 1
            if seen == after and on.is_chief:
                os.kill(os.getpid(), end)
        losses[epoch, -1] = float(torch.rand(()))  # a loop draws between two epochs, too
    state = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    return {**state, "losses": losses, "drawn": torch.rand(4), "rate": steps.get_last_lr()}


def train(
    strategy: Any,
    folder: Path,
    *,
    draws: bool = True,
    accumulate: int = 1,
    log: Path | None = None,
    after: int = 0,
    end: int = signal.SIGKILL,
    **plan: Any,
) -> list[dict[str, Any]]:
    """Train to the end; return the result of every replica."""
    saved = sg.Checkpoints(folder, **{"every": 1, **plan})
    found: list[dict[str, Any]] = strategy.run(
        loop, strategy, saved, draws, accumulate, log, after, end
    )
    return found


def main() -> None:
    torch.set_num_threads(1)
    name, folder, after, *how = sys.argv[1:]
    end = signal.SIGTERM if how else signal.SIGKILL
    with contextlib.closing(make(name)) as strategy:
        found = train(strategy, Path(folder), after=int(after), end=end)
    torch.save(found, f"{folder}.pt")


if __name__ == "__main__":
    main()
