"""State of one process's optimizer, taken over by another."""

from __future__ import annotations

import torch
from torch import nn

from stratagem.state.optimizer_state import optimizer_state, take_optimizer_state, take_state


def test_what_is_as_large_as_the_parameter_goes_to_its_device() -> None:
    """A counter stays: torch's Adam refuses one on a GPU, also of a parameter of one number."""
    param = nn.Parameter(torch.ones((), device="meta"))
    optimizer = torch.optim.Adam([param])
    take_state(optimizer, param, {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5)})
    kinds = {name: value.device.type for name, value in optimizer.state[param].items()}
    assert kinds == {"step": "cpu", "exp_avg": "meta"}


def test_a_copy_is_taken_over_and_stays_a_copy() -> None:
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    first, second = (torch.optim.Adam([{"params": [p]}], lr=0.1) for p in (one, other))
    one.grad = torch.tensor([1.0, 2.0])
    first.step()
    copied = optimizer_state(first)
    take_optimizer_state(second, copied)
    first.step()
    assert torch.equal(second.state[other]["exp_avg"], copied[0]["exp_avg"])
    assert float(second.state[other]["step"]) == 1.0 == float(copied[0]["step"])
    take_optimizer_state(second, [{}])  # nothing saved: it keeps its own
    assert float(second.state[other]["step"]) == 1.0
