"""How long the k-th of n replicas takes, when each step's time is drawn anew.

    shifted exponential   D + (H_n - H_{n-k}) / rate
    lognormal             exp(mu + sigma * PHI^-1((k - 3/8) / (n + 1/4)))      near enough below 1
    measured samples      exactly: each sample times its chance of being the k-th
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from stratagem.errors import UsageError


def exponential(k: int, n: int, shift: float, rate: float) -> float:
    """The mean of the k-th of n draws from a shifted exponential distribution."""
    _check(k, n)
    return shift + math.fsum(1 / i for i in range(n - k + 1, n + 1)) / rate


def lognormal(k: int, n: int, mu: float, sigma: float) -> float:
    """About the mean of the k-th of n draws from a lognormal distribution."""
    _check(k, n)
    return math.exp(mu + sigma * NormalDist().inv_cdf((k - 0.375) / (n + 0.25)))


@lru_cache(maxsize=4096)
def sampled(k: int, n: int, samples: tuple[float, ...]) -> float:
    """The mean of the k-th of n draws from the samples, with replacement."""
    _check(k, n)
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    edges = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.diff(_at_least(k, n, edges)) @ ordered)


def _at_least(k: int, n: int, chance: np.ndarray) -> np.ndarray:
    """The chance of k successes or more among n."""
    some = np.arange(k, n + 1)
    ways = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in some]
    inside = np.clip(chance[1:-1, None], 1e-300, 1 - 1e-16)
    logs = np.array(ways) + some * np.log(inside) + (n - some) * np.log1p(-inside)
    middle = np.clip(np.exp(logs).sum(1), 0.0, 1.0)
    return np.concatenate([[0.0], middle, [1.0]])


def drawn(k: int, n: int, samples: Sequence[float], draws: int, seed: int = 0) -> float:
    """The same by Monte Carlo."""
    _check(k, n)
    dice = np.random.default_rng(seed)
    picked = dice.choice(np.asarray(samples), size=(draws, n))
    return float(np.partition(picked, k - 1, axis=1)[:, k - 1].mean())


def _check(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise UsageError(f"there is no number {k} among {n} replicas.")
