"""Device names: every spelling of the book and of torch, and a sentence for everything else."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.training import devices
from stratagem.training.devices import canonical, place, resolve
from stratagem.training.placement import attentively
from stratagem.wire import device_kinds

SPELLINGS = {
    "cuda:0": [
        "/gpu:0",
        "gpu:0",
        "GPU:0",
        "/GPU:0",
        "cuda:0",
        "cuda",
        "gpu",
        "/device:GPU:0",
        "device:gpu:0",
        " cuda:0 ",
        "/job:localhost/replica:0/task:0/device:GPU:0",
        "/job:worker/task:1/gpu:0",
    ],
    "cuda:11": ["/gpu:11", "cuda:11"],
    "cpu:0": ["cpu", "CPU", "/cpu:0", "CPU:0", "/device:CPU:0"],
    "cpu:3": ["cpu:3", "/cpu:3"],
    "mps:0": ["mps", "mps:0"],
}


@pytest.mark.timeout(60)
def test_the_thread_that_makes_groups_uses_the_replicas_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's current GPU belongs to a thread: a new one would use GPU 0."""
    chosen: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.get_ident()))
    )
    monkeypatch.setattr(device_kinds, "_in_use", [])
    gpu = torch.device("cuda", 1)
    thread = attentively(threading.get_ident, lambda: None, gpu)
    assert chosen == [(gpu, thread)] and thread != threading.get_ident()
    attentively(lambda: None, lambda: None, torch.device("cpu"))
    assert len(chosen) == 1


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("name", "expected"), [(name, key) for key, names in SPELLINGS.items() for name in names]
)
def test_spellings(name: str, expected: str) -> None:
    assert canonical(name) == expected


def test_torch_devices() -> None:
    assert canonical(torch.device("cuda", 1)) == "cuda:1"
    assert canonical(torch.device("cpu")) == "cpu:0"
    assert place("cpu:3") == torch.device("cpu"), "CPU replicas share the one CPU"
    assert place("cuda:1") == torch.device("cuda", 1)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert resolve(None) == ("cpu:0",)
    assert resolve("cpu:4") == resolve(["cpu:4"]) == ("cpu:4",)
    assert resolve(f"cpu:{i}" for i in range(3)) == ("cpu:0", "cpu:1", "cpu:2")
    with pytest.raises(sg.DeviceError, match=r"no cuda:0 on this machine.*cpu:0, cpu:1"):
        resolve(["/gpu:0"])


@pytest.mark.usefixtures("two_gpus")
def test_with_two_gpus() -> None:
    assert resolve(None) == ("cuda:0", "cuda:1")
    assert resolve(["/gpu:1", "cuda:0"]) == ("cuda:1", "cuda:0"), "the order is the user's"
    with pytest.raises(sg.DeviceError, match=r"no cuda:2 on this machine.*cuda:0, cuda:1, cpu:0"):
        resolve(["/gpu:0", "/gpu:2"])


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "names", [["/gpu:0", "cuda:0"], ["cpu", "cpu:0"], [torch.device("cuda", 1), "GPU:1"]]
)
def test_one_device_twice(names: list[str]) -> None:
    with pytest.raises(sg.DeviceError, match="is named twice"):
        resolve(names)


@pytest.mark.parametrize(
    ("name", "expected"), [("cpu:00", "cpu:0"), ("cuda:01", "cuda:1"), ("cpu:٣", "cpu:3")]
)
def test_an_index_is_a_number(name: str, expected: str) -> None:
    """Otherwise ["cpu:0", "cpu:00"] are two devices, and torch rejects "cuda:01" later on."""
    assert canonical(name) == expected


@pytest.mark.parametrize("names", [[], ()])
def test_no_devices_at_all(names: list[str]) -> None:
    with pytest.raises(sg.DeviceError, match=r"empty.*present here"):
        resolve(names)


def test_a_number_of_devices() -> None:
    with pytest.raises(sg.DeviceError, match=r'devices=2 is no list.*"cpu:0", "cpu:1".*present'):
        sg.MirroredStrategy(2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["npu:0", "gpu:-1", "gpu:x", "", ":", "0", "cuda:0:1", "c p u"])
def test_what_is_no_device(name: str) -> None:
    with pytest.raises(sg.DeviceError, match=re.escape(repr(name))) as caught:
        sg.MirroredStrategy([name])
    assert "present here" in str(caught.value) and '"cuda:0"' in str(caught.value)
    assert isinstance(caught.value, ValueError)


_PIECES = ["cpu", "gpu", "cuda", "mps", "/", ":", "0", "1", "device:", "job:", "task:", " ", "é"]


@given(st.one_of(st.text(), st.lists(st.sampled_from(_PIECES)).map("".join)))
def test_garbage_is_refused_or_understood(name: str) -> None:
    try:
        known = canonical(name)
    except sg.DeviceError as error:
        assert "is not a device" in str(error)
        return
    assert known.partition(":")[0] in ("cpu", "cuda", "mps")
    assert canonical(known) == known
    assert re.search(known.partition(":")[0].replace("cuda", "cuda|gpu"), name, re.IGNORECASE)
    assert devices.place(known).type == known.partition(":")[0]
