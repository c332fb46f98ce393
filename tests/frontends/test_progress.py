"""The output of fit, evaluate and predict in a terminal, a notebook and a file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import stratagem as sg
from tests.support import data, mlp, strategy

ROOT = Path(__file__).parents[2]
X, Y = data(40)


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def model_on(on: sg.Strategy) -> sg.Model:
    model = sg.Model(mlp(), on)
    model.compile("sgd", "cross_entropy", ["accuracy"])
    return model


def act(model: sg.Model, verb: str, **options: Any) -> None:
    getattr(model, verb)(*((X,) if verb == "predict" else (X, Y)), batch_size=8, **options)


FIGURES = {
    "fit": "loss [0-9.]+  accuracy [0-9.]+",
    "evaluate": "loss [0-9.]+  accuracy [0-9.]+",
    "predict": "",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", list(FIGURES))
@pytest.mark.parametrize("verbose", ["auto", 0, 1, 2])
def test_in_a_file(
    some: sg.Strategy, verb: str, verbose: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line where no bar can be drawn; by default, only `fit` prints it."""
    act(model_on(some), verb, verbose=verbose)
    out = capfd.readouterr().out
    if verbose == 0 or (verbose == "auto" and verb != "fit"):
        assert out == ""
        return
    title = "epoch 1/1" if verb == "fit" else verb
    assert re.fullmatch(rf"{title}  [0-9.]+ s  {FIGURES[verb]}(  )?[0-9,]+ examples/s\n", out), out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", list(FIGURES))
@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_at_a_terminal(
    some: sg.Strategy,
    verb: str,
    verbose: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    act(model_on(some), verb, verbose=verbose)
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capfd.readouterr().out)
    assert ("━" in out and "5/5" in out) is (verbose != 2)
    assert re.search(FIGURES[verb], out) and "examples/s" in out
    assert ("1/1" if verb == "fit" else verb) in out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("columns", [40, 80, 110, 200])
def test_every_result_is_seen(
    columns: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room, the speed is left out, and then there are several lines.

    What a callback prints at the end of an epoch stands above the full bar.
    """
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    speak = sg.callbacks.LambdaCallback(on_epoch_end=lambda *_: print("the end"))
    act(model_on(strategy(1)), "fit", validation_data=(X, Y), callbacks=[speak])
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capfd.readouterr().out)
    after = out.split("the end", 1)[1]
    assert "5/5" in after and "0/5" not in after
    assert ("examples/s" in after.partition("val_accuracy")[2]) is (columns == 200)
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert re.search(rf"\b{name} [0-9]\.[0-9]{{4}}\b", after)


@pytest.mark.timeout(60)
def test_one_bar_at_a_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that evaluates does not draw over the bar of `fit`; an error releases the bar."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    model = model_on(strategy(1))
    look = sg.callbacks.LambdaCallback(on_epoch_end=lambda *_: act(model, "evaluate"))
    act(model, "fit", epochs=2, callbacks=[look])
    assert "evaluate" not in capfd.readouterr().out
    fail = sg.callbacks.LambdaCallback(on_epoch_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        act(model, "fit", callbacks=[fail])
    capfd.readouterr()
    with pytest.raises(RuntimeError, match="shape"):
        model.evaluate(X[:, :3], Y)
    act(model, "evaluate")
    assert "5/5" in capfd.readouterr().out


def test_other_words_are_refused() -> None:
    for verb in FIGURES:
        with pytest.raises(sg.UsageError, match=r'verbose.*"auto", 0, 1 or 2'):
            act(model_on(strategy(1)), verb, verbose="loud")


CELL = """
import sys
sys.modules["ipywidgets"] = None  # not installed
import time, torch, stratagem as sg
from torch import nn

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.15)
        return super().forward(x)

model = sg.Model(Slow(4, 2), sg.MirroredStrategy(["cpu:0", "cpu:1"]))
model.compile("sgd", "mse")
x, y = torch.randn(64, 4), torch.randn(64, 2)
model.{verb}({args}, batch_size=8);
"""


class Watcher(NotebookClient):
    """Records every text that a cell showed, also replaced ones."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        bundle = msg["content"].get("data", {})
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append((msg["msg_type"], bundle.get("text/plain", "")))
        return super().process_message(msg, cell, cell_index)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_in_a_notebook_without_widgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel has one output per pass, which is replaced as the bar advances."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        nbformat.v4.new_code_cell(CELL.replace("{verb}", verb).replace("{args}", args))
        for verb, args in (("fit", "x, y"), ("evaluate", "x, y"), ("predict", "x"))
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Watcher(notebook, timeout=60, kernel_name="python3")
    client.shown = []
    client.execute(cwd=str(tmp_path))
    steps = [re.findall(r"(\d)/8", text) for kind, text in client.shown]
    first = [kind for kind, _ in client.shown].count("display_data")
    assert first == 3, client.shown
    seen = [numbers[-1] for numbers in steps if numbers]
    assert seen.count("8") >= 3 and len(set(seen)) > 4, seen
    for cell, word in zip(notebook.cells, ("loss", "loss", "predict"), strict=True):
        shown = [o for o in cell.outputs if o.output_type == "display_data"]
        assert len(shown) == 1 and "8/8" in shown[0]["data"]["text/plain"]
        assert word in shown[0]["data"]["text/plain"]
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], cell.outputs


@pytest.mark.timeout(60)
def test_what_was_counted_is_a_whole_number(capfd: pytest.CaptureFixture[str]) -> None:
    cluster = sg.LocalCluster(workers=1, ps=1)
    with sg.ParameterServerStrategy(cluster, updates=sg.Synchronous()) as served:
        model_on(served).fit(X, Y, batch_size=8, verbose=2)
    line = capfd.readouterr().out
    assert "  updates 5  dropped 0  " in line and re.search(r"  waiting \d+\.\d{4}  ", line), line


def test_a_model_says_what_it_is(some: sg.Strategy) -> None:
    model = sg.Model(mlp(), some)
    assert repr(model).startswith("<sg.Model of Sequential, 180 parameters; not compiled; ")
    model.compile("sgd", "cross_entropy", ["accuracy", print])
    assert "; compiled with SGD, cross_entropy, accuracy, print; " in repr(model)
    assert repr(model).endswith(f"; MirroredStrategy on {', '.join(some.devices)}>")
    assert repr(sg.Model(mlp())).endswith("; one device on cpu:0>")
