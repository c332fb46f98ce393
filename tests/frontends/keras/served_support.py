"""Strategies with parameter servers that a file's tests share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import stratagem as sg
from tests import served_support

_made: list[sg.ParameterServerStrategy] = []


@cache
def served(
    updates: Any = None, workers: int = 2, ps: int = 1, **options: Any
) -> sg.ParameterServerStrategy:
    """Return the cluster that tests without other needs share."""
    cluster = sg.LocalCluster(workers=workers, ps=ps)
    _made.append(sg.ParameterServerStrategy(cluster, updates=updates, **options))
    return _made[-1]


def close_served() -> None:
    """Close all clusters."""
    served.cache_clear()
    while _made:
        _made.pop().close()


@cache
def handwriting() -> tuple[Any, Any, Any, Any]:
    """The digits of scikit-learn: rows to train on and rows to look at."""
    x, y = served_support.handwriting()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]
