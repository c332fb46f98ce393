"""`sg.sweep`: a function instead of a script, with the same trials and the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stratagem as sg

pytestmark = pytest.mark.timeout(120)

SPACE = {"lr": "1e-3..1e-1:log", "units": [8, 16], "kind": ["relu", "tanh"]}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_function_of_a_notebook() -> None:
    bonus = 0.5  # closures travel, too

    def train(lr: float, units: int, kind: str) -> dict[str, float]:
        if kind not in ("relu", "tanh"):
            raise ValueError(kind)
        return {"score": lr * units + bonus}

    results = [
        sg.sweep(train, SPACE, metric="score:max", trials=4, slots=slots, out=f"{slots}")
        for slots in (1, 2)
    ]
    found = [[(each.params, each.value) for each in result.trials] for result in results]
    assert found[0] == found[1] and len(found[0]) == 4
    for params, value in found[0]:
        assert value == pytest.approx(params["lr"] * params["units"] + 0.5)
    best = results[0].best
    assert best.value == max(value or 0.0 for _, value in found[0])
    assert (best.folder / "args.json").is_file()
    more = sg.sweep(train, SPACE, metric="score:max", trials=5, slots=1, out="1", resume=True)
    assert [(each.params, each.value) for each in more.trials[:4]] == found[0]
    assert len(more.trials) == 5


def test_what_is_tried_is_what_the_list_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside_the_script.py").write_text("def half(x): return x / 2")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))  # as that of a script in another folder

    def train(flag: bool, rate: float) -> dict[str, Any]:
        import numpy as np
        import torch
        from beside_the_script import half

        assert isinstance(flag, bool)
        return {"score": np.float32(half(rate)), "other": torch.tensor(2), "on": np.int64(flag)}

    space = {"flag": [True, False], "rate": [-1, 0.5]}
    grid: Any = {"metric": "score:max", "sampler": "grid", "trials": 2}  # the first of four points
    result = sg.sweep(train, space, slots=2, out="run", **grid)
    found = [(each.params["flag"], each.params["rate"], each.value) for each in result.trials]
    assert found == [(True, -1, -0.5), (True, 0.5, 0.25)]
    written = (result.trials[0].folder / "metrics.jsonl").read_text()
    assert '"other": 2.0' in written and '"on": ' in written


def test_a_plot_of_the_trials(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")

    def train(lr: float, units: int) -> dict[str, float]:
        return {"score": lr}

    space = {"lr": "1e-5..1e-1:log", "units": [8, 16]}
    result = sg.sweep(train, space, metric="score:min", trials=4, slots=2, out="run")
    figure = result.plot()
    assert [axis.get_xlabel() for axis in figure.axes] == ["lr", "units"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 4
    assert figure.axes[0].get_xscale() == "log"


def train(lr: float = 0.1) -> dict[str, float]:
    return {"other": lr}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"space": {}}, "there is nothing to try"),
        ({"space": {"rate": "1..2"}}, "train has no parameter 'rate'"),
        ({"space": {"lr": [1]}}, "lr has one value, 1; give it a range"),
        ({"space": {"lr": [(64, 32), (128,)]}}, r"lr has the value \(64, 32\)"),
        ({"space": {"lr": ["64,32", "128"]}}, "lr has the value '64,32'"),
        ({"space": {"lr": ["-relu", "gelu"]}}, "lr has the value '-relu'"),
        ({"space": {"lr": [0.1, None]}}, "lr has the value None"),
        ({"space": {"lr": ["resnet", "18"]}}, "lr has the value '18'"),
        ({"space": {"lr": ["true", "false"]}}, "lr has the value 'true'"),
        ({"space": {"lr": [1.0, float("inf")]}}, "lr has the value inf"),
        ({"metric": "score"}, "say which way is better"),
        ({"sampler": "best"}, "sampler='best'; choose one of random, grid, tpe"),
        ({}, "train writes no score; it writes other"),
    ],
)
def test_one_sentence(options: dict[str, Any], sentence: str) -> None:
    given = {"space": {"lr": "1..2"}, "metric": "score:max", "out": "run", "trials": 1, **options}
    with pytest.raises(sg.UsageError, match=sentence):
        sg.sweep(train, **given)
