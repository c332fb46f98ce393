"""A profile on a GPU has the times of kernels, not of their launches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from stratagem.plan.machine import measure_hardware
from stratagem.plan.notebook import profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_times_are_the_devices_own() -> None:
    width = 4096
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).cuda()
    batch = torch.randn(2048, width), torch.randn(2048, width)
    seen = profile(net, batch, loss=mse_loss, optimizer=torch.optim.SGD(net.parameters()), steps=10)
    assert seen.device == "cuda"
    weights = [bucket for bucket in seen.buckets if bucket.size >= 4 * width * width]
    assert len(weights) == 6
    ready = [bucket.ready for bucket in weights]
    assert ready == sorted(ready) and ready[-1] <= seen.backward
    # Six equal layers: the first gradient is there long before the last.
    assert ready[0] < 0.5 * ready[-1]
    assert seen.backward > 1.2 * seen.forward


def test_this_machine_has_gpus() -> None:
    here = measure_hardware("cuda")
    assert here.per_host == torch.cuda.device_count() and 1e9 < here.local < 1e13
