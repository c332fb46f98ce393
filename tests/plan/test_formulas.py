"""The k-th of n draws: the exact sum equals Monte Carlo."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.formulas import sampled


def drawn(k: int, n: int, samples: list[float], draws: int) -> float:
    """The mean of the k-th of n draws, by Monte Carlo."""
    picked = np.random.default_rng(0).choice(np.asarray(samples), size=(draws, n))
    return float(np.partition(picked, k - 1, axis=1)[:, k - 1].mean())


@given(
    st.lists(st.floats(0.5, 5.0), min_size=1, max_size=20), st.integers(1, 12), st.integers(0, 11)
)
def test_samples_agree_with_monte_carlo(samples: list[float], n: int, spares: int) -> None:
    k = max(1, n - spares)
    said = sampled(k, n, tuple(samples))
    assert said == pytest.approx(drawn(k, n, samples, draws=4000), rel=0.1)
    assert min(samples) * (1 - 1e-9) <= said <= max(samples) * (1 + 1e-9)


@given(st.lists(st.floats(0.5, 5.0), min_size=2, max_size=20))
def test_more_replicas_wait_longer_and_spares_less(samples: list[float]) -> None:
    given_ = tuple(samples)
    last = [sampled(n, n, given_) for n in (1, 2, 8, 100, 1000)]
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(last))
    assert last[0] == pytest.approx(np.mean(samples)) and sampled(7, 8, given_) <= last[2] + 1e-9


def test_nobody_is_not_the_last() -> None:
    with pytest.raises(UsageError, match="number 0 among 4"):
        sampled(0, 4, (1.0,))
