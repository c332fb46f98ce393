"""The k-th of n: closed forms, exact sums and Monte Carlo say the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.stragglers import drawn, exponential, lognormal, sampled


@pytest.mark.parametrize(("k", "n"), [(1, 1), (4, 4), (3, 4), (48, 50), (50, 50)])
def test_exponential_agrees_with_monte_carlo(k: int, n: int) -> None:
    dice = np.random.default_rng(1)
    draws = 0.5 + dice.exponential(1 / 4.0, size=(20_000, n))
    seen = np.sort(draws, axis=1)[:, k - 1].mean()
    assert exponential(k, n, 0.5, 4.0) == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize(("k", "n", "sigma"), [(8, 8, 0.2), (30, 32, 0.2), (16, 32, 1.0)])
def test_lognormal_agrees_with_monte_carlo(k: int, n: int, sigma: float) -> None:
    dice = np.random.default_rng(2)
    seen = np.sort(dice.lognormal(0.1, sigma, size=(20_000, n)), axis=1)[:, k - 1].mean()
    assert lognormal(k, n, 0.1, sigma) == pytest.approx(seen, rel=0.05)


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
