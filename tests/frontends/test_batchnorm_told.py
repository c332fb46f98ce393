"""`fit` says once that BatchNorm layers look at a replica's rows only, as `prepare` does."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from tests.support import strategy

SAID = "each replica normalises over its own rows"


def fit_torch(on: Any) -> None:
    with on.scope():
        model = sg.Model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(torch.randn(12, 3), torch.randn(12, 2), batch_size=6, verbose=0)


def fit_keras(on: Any) -> None:
    with on.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
        model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(np.ones((12, 3)), np.ones((12, 3)), batch_size=6, verbose=0)


@pytest.mark.parametrize("fit", [fit_torch, fit_keras])
@pytest.mark.parametrize(
    ("count", "synchronised", "times"), [(2, False, 1), (2, True, 0), (1, False, 0)]
)
def test_it_is_said_once(
    fit: Any, count: int, synchronised: bool, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), strategy(count, sync_batchnorm=synchronised) as on:
        fit(on)
    assert caplog.text.count(SAID) == times
