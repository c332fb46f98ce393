"""What messages cost: the arithmetic. Real ones are measured in tests/studies/test_sparse.py."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.plan import overhead
from stratagem.plan.simulation.scenario import Overhead


def test_costs_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with known costs, its own computing and updating included, is found again."""
    true = Overhead(2e-4, 3e-4, 2e-10, 1e-10, 1e-3, 6e-4)
    idle = np.array([5e-5, 7e-5])

    def served(count: int, servers: int, steps: int) -> overhead.Clocks:
        size = 2 * 4 * count
        worker = true.worker_step + (2 * servers - 1) * true.worker_message
        lead = true.server_step + (1 + (servers - 1) / 2) * true.server_message
        ends = np.array([worker + size * true.worker_byte, lead + size * true.server_byte]) + idle
        return np.array([*ends, *[2.5 * true.server_message + idle[1]] * (servers - 1)])

    monkeypatch.setattr(overhead, "_served", served)
    monkeypatch.setattr(overhead, "_beside", lambda count: idle)
    found, expected = vars(overhead.measure()), vars(true)
    assert found == pytest.approx(expected, rel=0.01)
