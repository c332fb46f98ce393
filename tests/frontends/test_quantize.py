"""`sg.quantize` makes a smaller model with nearly equal answers, and the same file on any number of
replicas; otherwise it writes nothing.
"""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg
from stratagem.frontends import onnx_int8
from stratagem.frontends.quantize_report import Form, FormScores, QuantizeReport, compare_forms
from stratagem.launch import cli
from tests.support import strategy

pytestmark = pytest.mark.timeout(120)

Data = tuple[Any, Any, Any, Any]
quantize = importlib.import_module("stratagem.frontends.quantize")  # its function is sg.quantize


def alike() -> float:
    """Return the expected agreement; x86-64 processors without VNNI add products in 16 bits."""
    exact = platform.machine() == "aarch64" or "vnni" in Path("/proc/cpuinfo").read_text()
    return 0.99 if exact else 0.95


def cnn() -> nn.Module:
    """150 thousand parameters, most of them in one Linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@pytest.fixture(scope="module")
def digits() -> Data:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
    return x[:1400], y[:1400], x[1400:], y[1400:]


@pytest.fixture(scope="module")
def trained(digits: Data) -> nn.Module:
    model = sg.Model(cnn())
    model.compile("adam", "cross_entropy")
    model.fit(digits[0], digits[1], epochs=3, batch_size=64, verbose=0)
    return model.module


@pytest.fixture(scope="module")
def made(trained: nn.Module, digits: Data) -> tuple[Any, bytes]:
    """Return the result of `sg.quantize`, and the float model that it exported."""
    found: list[bytes] = []

    def export(*given: Any) -> bytes:
        found.append(onnx_int8.exported(*given))
        return found[0]

    with pytest.MonkeyPatch.context() as patch, strategy(1).scope():
        patch.setattr(quantize, "exported", export)
        small = sg.quantize(trained, digits[0][:300], test=digits[2:], verbose=0)
    return small, found[0]


@pytest.fixture(scope="module")
def small(made: tuple[Any, bytes]) -> Any:
    return made[0]


@pytest.fixture(scope="module")
def floats(made: tuple[Any, bytes]) -> bytes:
    return made[1]


def test_small_and_nearly_the_same(small: Any, trained: nn.Module, digits: Data) -> None:
    """The table's numbers equal those computed by hand from the file."""
    report, (x, y) = small.report, digits[2:]
    assert [row.name for row in report.rows] == ["torch float32", "ONNX float32", "ONNX int8"]
    session = onnxruntime.InferenceSession(small.content)
    answers = session.run(None, {"x": x})[0].argmax(1)
    with torch.no_grad():
        want = trained.eval()(torch.as_tensor(x)).numpy().argmax(1)
    assert report.agreement == (answers == want).mean() >= alike()
    assert report.rows[2].accuracy == (answers == y).mean() > 0.8
    assert report.drop == pytest.approx((want == y).mean() - (answers == y).mean())
    assert report.rows[2].bytes == len(small.content)
    assert report.smaller <= 0.30
    assert str(report).splitlines()[3].startswith("ONNX int8")


@pytest.mark.slow
@pytest.mark.skipif(alike() < 0.99, reason="the processor has no products of 8 bits")
def test_half_as_fast_again_on_one_thread(small: Any, floats: bytes, digits: Data) -> None:
    """The best of five medians, in turns, since other load only makes a model slower."""
    models = [onnx_int8.OnnxModel(content) for content in (floats, small.content)]
    forms = {name: Form(each, 1) for name, each in zip(("float", "int8"), models, strict=True)}
    rounds = [compare_forms(forms, digits[2], None).rows for _ in range(5)]
    float_ms, int8_ms = (min(rows[i].milliseconds for rows in rounds) for i in range(2))
    assert float_ms >= 1.5 * int8_ms, rounds


def test_the_file_is_in_8_bits_and_says_nothing_of_its_source(small: Any) -> None:
    model = onnx.load_from_string(small.content)
    kinds = {each.data_type for each in model.graph.initializer if np.prod(each.dims) > 500}
    assert kinds == {onnx.TensorProto.INT8}
    quantised = [node for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantised) >= 4  # activations, too
    assert b"site-packages" not in small.content and str(Path.home()).encode() not in small.content


@pytest.mark.parametrize("rows", [300, 20])
def test_the_same_file_from_any_number_of_replicas(floats: bytes, digits: Data, rows: int) -> None:
    """Every byte is equal; with 20 rows, the second replica has no batch."""
    x = digits[0][:rows].copy()
    x[32:64] = 4 * x[32:64] - 1  # the second replica's: least and greatest of all
    with strategy(2) as two, strategy(1) as one:
        alone = onnx_int8.quantised(floats, x, one)
        assert onnx_int8.quantised(floats, x, two) == alone
        if rows == 300:  # each replica's batches count
            assert onnx_int8.quantised(floats, x[:32], one) != alone
            assert onnx_int8.quantised(floats, x[64:], one) != alone
            shares = [len(range(0, rows, 32)[index::2]) for index in range(2)]
            assert two.run(_batches_seen, floats, x) == shares


def _batches_seen(floats: bytes, x: Any) -> int:
    """Return the number of batches with which one replica calibrates."""
    seen = []
    watched = onnx_int8._watched

    class Counting:
        def __init__(self, model: bytes) -> None:
            self.session = watched(model)

        def get_outputs(self) -> Any:
            return self.session.get_outputs()

        def run(self, *given: Any) -> Any:
            seen.append(given)
            return self.session.run(*given)

    onnx_int8._watched = Counting
    try:
        onnx_int8._ranges(floats, x)
    finally:
        onnx_int8._watched = watched
    return len(seen)


def test_under_a_scope_the_whole_way(
    small: Any, trained: nn.Module, digits: Data, tmp_path: Path
) -> None:
    """`sg.quantize` of a model on two replicas gives the file of one device."""
    with strategy(2) as two:
        model = sg.Model(trained, two)
        made = sg.quantize(model, digits[0][:300], out=tmp_path / "two", verbose=0)
    assert (tmp_path / "two.onnx").read_bytes() == made.content == small.content
    assert made.report.drop is None and "-" in str(made.report).splitlines()[1]


def test_weights_only_stays_in_torch(digits: Data, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = sg.quantize(net, (digits[0], digits[1]), "int8-weights", out=tmp_path / "n", verbose=0)
    assert made.report.agreement >= 0.98 and made.report.smaller < 0.40
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    again = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    again.load_state_dict(torch.load(tmp_path / "n.pt", weights_only=True), assign=True)
    x = torch.as_tensor(digits[2])
    assert torch.equal(again(x), made.model(x)) and not torch.equal(again(x), net(x))


def dense(units: int = 64) -> Any:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((1, 8, 8)),
        keras.layers.Flatten(),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def test_keras_quantises_its_own(digits: Data, tmp_path: Path) -> None:
    model = dense(256)
    model.fit(digits[0], digits[1], epochs=2, verbose=0)
    before = model.get_weights()
    made = sg.quantize(model, digits[0], test=digits[2:], out=tmp_path / "k", verbose=0)
    assert made.report.agreement >= 0.99 and made.report.smaller < 0.80
    loaded = keras.models.load_model(tmp_path / "k.keras")
    assert np.array_equal(
        loaded.predict(digits[2], verbose=0), made.model.predict(digits[2], verbose=0)
    )
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert [layer.quantization_mode for layer in model.layers[1:]] == [None, None]


# --- what is refused -----------------------------------------------------------------------------


def test_max_drop_refuses_and_writes_nothing(
    trained: nn.Module, floats: bytes, digits: Data, tmp_path: Path, monkeypatch: Any
) -> None:
    """Calibration with faint pictures clips the activations of real ones."""
    monkeypatch.setattr(quantize, "exported", lambda *_: floats)
    faint = digits[0][:64] * 1e-3
    with pytest.raises(sg.UsageError, match=r"max_drop is 0\.01, so nothing was written"):
        sg.quantize(
            trained, faint, test=digits[2:], max_drop=0.01, out=tmp_path / "m.onnx", verbose=0
        )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(sg.UsageError, match="max_drop needs labels"):
        sg.quantize(trained, digits[0], max_drop=0.01)


def test_a_drop_is_counted_in_answers() -> None:
    rows = [FormScores("float", 0.93, 1.0, 100, 2.0), FormScores("int8", 0.92, 0.98, 30, 1.0)]
    report = QuantizeReport(tuple(rows), 10)
    report.refuse_worse(0.01)
    with pytest.raises(sg.UsageError, match=r"0.0100 less, and max_drop is 0.009"):
        report.refuse_worse(0.009)
    assert (report.smaller, report.faster) == (0.3, 2.0)


@pytest.mark.parametrize(
    ("calibration", "sentence"),
    [
        (np.zeros((8, 1, 8, 8), "float32"), "is all zeros, which says nothing"),
        (np.ones((8, 1, 8, 8), "float32"), "is all one number"),
        (np.full((8, 1, 8, 8), np.nan, "float32"), "not finite"),
        (np.zeros((0, 1, 8, 8), "float32"), "a row for each example"),
        ([1.0, 2.0], "an array or tensor of inputs, or a pair"),
    ],
)
def test_calibration_that_says_nothing(calibration: Any, sentence: str) -> None:
    with pytest.raises(sg.UsageError, match=sentence):
        sg.quantize(cnn(), calibration)


class Masked(nn.Module):
    """Adds a number to one of its first layer's outputs."""

    def __init__(self, number: float, weight: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, number]))
        self.first.weight.data[0, 0] = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.softmax(self.first(x) + self.mask, -1))  # type: ignore[no-any-return,operator]


ROWS = np.random.default_rng(0).standard_normal((40, 8)).astype("float32")


@pytest.mark.parametrize("model", [Masked(-np.inf), Masked(0.0, np.nan)], ids=["mask", "weights"])
def test_what_8_bits_cannot_span(model: nn.Module) -> None:
    with strategy(1).scope(), pytest.raises(sg.UsageError, match="8 bits cannot span"):
        sg.quantize(model, ROWS, verbose=0)


def test_tests_that_find_nothing() -> None:
    labels = np.zeros(40, dtype=int)
    with pytest.raises(sg.UsageError, match="the test set is empty"):
        sg.quantize(Masked(0.0), ROWS, test=(ROWS[:0], labels[:0]))
    with pytest.raises(sg.UsageError, match="max_drop is NaN"):
        sg.quantize(Masked(0.0), ROWS, test=(ROWS, labels), max_drop=float("nan"))


def test_models_of_servers() -> None:
    """Calibration runs in this process, and starts no server or worker."""
    module = Masked(0.0)
    expected = sg.quantize(module, ROWS, verbose=0)
    with sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1)) as served:
        assert sg.quantize(sg.Model(module, served), ROWS, verbose=0).content == expected.content


def test_nothing_to_quantise(digits: Data) -> None:
    x = digits[0][:40]
    with pytest.raises(sg.UsageError, match=r"nothing to quantise.*no Linear and no convolution"):
        sg.quantize(nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Softmax(1)), x)
    with pytest.raises(sg.UsageError, match=r"nothing to quantise.*no Linear layer"):
        sg.quantize(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), x, "int8-weights")
    flat = keras.Sequential([keras.layers.Input((1, 8, 8)), keras.layers.Flatten()])
    with pytest.raises(sg.UsageError, match=r"nothing to quantise.*Dense"):
        sg.quantize(flat, x)


def test_what_is_no_classifier(digits: Data) -> None:
    x = digits[0][:40]
    one = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    with pytest.raises(sg.UsageError, match=r"answers each example with 1, and sg.quantize"):
        sg.quantize(one, x, "int8-weights", verbose=0)
    with pytest.raises(sg.UsageError, match="labels of shape"):
        sg.quantize(cnn(), x, "int8-weights", test=(x, x), verbose=0)
    with pytest.raises(sg.UsageError, match="choose one of 'int8', 'int8-weights'"):
        sg.quantize(one, x, "int2")
    with pytest.raises(sg.UsageError, match=r"an nn.Module or a model of Keras, not a str"):
        sg.quantize("model", x)
    with pytest.raises(sg.UsageError, match="is for torch modules"):
        sg.quantize(dense(), x, "int8-weights")


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(sg.UsageError, match=r"needs onnxruntime.*stratagem\[quantize\]"):
        onnx_int8.needed("onnxruntime")
    assert importlib.import_module("stratagem.frontends.quantize")


# --- the command ---------------------------------------------------------------------------------


def test_the_command(
    digits: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x=digits[0], y=digits[1])
    np.savez("b.npz", x=digits[2], y=digits[3])
    model = dense()
    model.fit(digits[0], digits[1], epochs=1, verbose=0)
    model.save("m.keras")
    words = ["quantize", "m.keras", "--calibration", "a.npz", "--test", "b.npz"]
    assert cli.main([*words, "--max-drop", "0.05", "--out", "small"]) == 0
    printed = capsys.readouterr().out
    assert "Keras int8" in printed and (tmp_path / "small.keras").is_file()
    sg.Model(nn.Linear(3, 3)).save("w")
    assert cli.main(["quantize", "w.safetensors", "--calibration", "a.npz"]) == 2
    assert "has weights only; name a function" in capsys.readouterr().err
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    sg.Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))).save("w")
    words = ["quantize", "w.safetensors", "--calibration", "a.npz", "--build", "net.py:build"]
    assert cli.main([*words, "--to", "int8-weights", "--out", "w8.onnx"]) == 2
    assert "w8.pt" in capsys.readouterr().err
    assert cli.main([*words, "--to", "int8-weights", "--out", "w8"]) == 0
    assert (tmp_path / "w8.pt").is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_here", "net.py cannot be imported: ModuleNotFoundError"),
        ("build = 3", "net.py has no function 'build'"),
        ("def build(flags): pass", "was called with no argument: TypeError"),
        ("def build(): return {}", "returns no torch module, but dict"),
        ("def build(): return 1 / 0", "net.py, line 1)"),
        ("from torch import nn\ndef build(): return nn.Linear(4, 3)", "another module"),
    ],
)
def test_a_wrong_build_is_a_sentence(
    text: str, said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x=np.zeros((4, 3), "float32"), y=np.zeros(4, "int64"))
    sg.Model(nn.Linear(3, 3)).save("w")
    (tmp_path / "net.py").write_text(text)
    words = ["quantize", "w.safetensors", "--calibration", "a.npz", "--build", "net.py:build"]
    assert cli.main([*words, "--to", "int8-weights"]) == 2
    assert said in capsys.readouterr().err
