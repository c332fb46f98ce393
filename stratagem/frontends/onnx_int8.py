"""Exports a torch module to ONNX, and quantises weights and activations to 8 bits.

Calibration runs in batches of a fixed size, each on one replica and one thread. So the minimum and
maximum of every tensor, and every byte of the file, do not depend on the number of replicas.
"""

from __future__ import annotations

import copy
import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stratagem.errors import UsageError
from stratagem.strategies.strategy import Strategy
from stratagem.training.replica import current_replica

_BATCH = 32  # examples per calibration batch; another size could change the last bit
_CLOSE = 1e-3  # relative tolerance between outputs of the exported model and the module
_INPUT, _OUTPUT = "x", "y"
_MIN, _MAX = "ReduceMin", "ReduceMax"  # suffixes of onnxruntime's names: NAME_ReduceMin
#: node types that are quantised; listed, since the default is a set in no fixed order
_WEIGHTED = ("Conv", "Gemm", "MatMul")
_AROUND = ("Add", "AveragePool", "Flatten", "GlobalAveragePool", "MaxPool", "Relu", "Reshape")


class OnnxModel:
    """An ONNX model, run on one thread of the CPU."""

    def __init__(self, content: bytes) -> None:
        runtime = needed("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.content = content
        self._session = runtime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, x: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = self._session.run(None, {_INPUT: x})[0]
        return found


def needed(name: str) -> Any:
    """Import a package of the extra `quantize`."""
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise UsageError(
            f"this needs {name.partition('.')[0]}, which is not installed ({problem}); "
            "pip install 'stratagem[quantize]'."
        ) from None


def exported(module: nn.Module, sample: NDArray[Any]) -> bytes:
    """Return the module as float ONNX, with onnxruntime's fused layers and no source paths."""
    needed("onnxscript")
    onnx = needed("onnx")
    plain = copy.deepcopy(module).cpu().eval()
    # two rows, since a batch of one would be exported as a constant
    two = torch.from_numpy(np.resize(sample, (2, *sample.shape[1:])))
    batch = {0: torch.export.Dim.DYNAMIC}
    with quietly():
        try:
            program: Any = torch.onnx.export(
                plain,
                (two,),
                dynamo=True,
                dynamic_shapes=(batch,),
                input_names=[_INPUT],
                output_names=[_OUTPUT],
            )
        except Exception as problem:  # the exporter raises any kind of error
            said = str(problem).strip().splitlines() or [type(problem).__name__]
            raise UsageError(
                f"torch cannot export this {type(module).__name__} to ONNX: {said[0]}; "
                'to="int8-weights" stays in torch and needs no export.'
            ) from problem
    model = program.model_proto
    if len(model.graph.output) != 1:
        raise UsageError(
            f"the model has {len(model.graph.output)} outputs, and sg.quantize takes classifiers, "
            "with one."
        )
    _forget_source(model)
    return _prepared(onnx, model)


def _forget_source(model: Any) -> None:
    """Remove stack traces, which have file names of this machine."""
    for each in (model, model.graph, *model.graph.node, *model.graph.value_info):
        del each.metadata_props[:]
    for each in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        del each.metadata_props[:]


def _prepared(onnx: Any, model: Any) -> bytes:
    quantization = needed("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder, quietly():
        before, after = Path(folder, "a.onnx"), Path(folder, "b.onnx")
        onnx.save(model, before)
        quantization.quant_pre_process(str(before), str(after), skip_symbolic_shape=True)
        return after.read_bytes()


def check_export(float_model: OnnxModel, module: nn.Module, x: NDArray[Any]) -> None:
    """Raise if the exported model's outputs differ from the module's."""
    rows = x[:_BATCH]
    want = torch_predict(module, rows)
    got = float_model(rows)
    if got.shape != want.shape or np.abs(got - want).max() > _CLOSE * (1 + np.abs(want).max()):
        raise UsageError(
            "the exported model does not answer as the module does, so it would serve something "
            'else; to="int8-weights" stays in torch.'
        )


def torch_predict(module: nn.Module, x: NDArray[Any]) -> NDArray[Any]:
    """Return the module's outputs, computed on one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            output = module(torch.from_numpy(x))
    finally:
        torch.set_num_threads(threads)
    if not isinstance(output, torch.Tensor):
        raise UsageError(
            "the model's output has several parts, and sg.quantize takes classifiers, with one."
        )
    found: NDArray[Any] = output.numpy()
    return found


def quantised(float_model: bytes, x: NDArray[Any], strategy: Strategy) -> bytes:
    """Quantise the model to 8 bits: weights per channel, activations by their ranges on `x`."""
    onnx = needed("onnx")
    graph = onnx.load_from_string(float_model).graph
    constant = {each.name for each in graph.initializer}
    if not any(n.op_type in _WEIGHTED and constant & {*n.input[1:]} for n in graph.node):
        raise UsageError(
            "there is nothing to quantise in this model: it has no Linear and no convolution."
        )
    names, ranges = strategy.run(_ranges, float_model, x)[0]
    _check_ranges(names, ranges)
    quantization = needed("onnxruntime.quantization")
    method = quantization.CalibrationMethod.MinMax
    pairs = {name: tuple(each) for name, each in zip(names, ranges, strict=True)}
    with tempfile.TemporaryDirectory() as folder, quietly():
        given, cache, made = (Path(folder, name) for name in ("f.onnx", "ranges.json", "q.onnx"))
        given.write_bytes(float_model)
        quantization.save_tensors_data(quantization.TensorsData(method, pairs), cache)
        quantization.quantize_static(
            given,
            made,
            None,
            op_types_to_quantize=[*_WEIGHTED, *_AROUND],
            per_channel=True,
            calibrate_method=method,
            calibration_cache_path=cache,
        )
        return made.read_bytes()


def _check_ranges(names: list[str], ranges: NDArray[Any]) -> None:
    for name, ends in zip(names, ranges, strict=True):
        if not np.isfinite(ends).all():
            raise UsageError(
                f"the tensor {name!r} in this model goes from {ends[0]} to {ends[1]}, which 8 bits "
                "cannot span: NaN among the weights, or -inf in a mask? Mend the weights, or use "
                'to="int8-weights", which leaves activations in floats.'
            )


def _ranges(float_model: bytes, x: NDArray[Any]) -> tuple[list[str], NDArray[Any]]:
    """Return minimum and maximum of each tensor over all replicas' batches. Collective."""
    replica = current_replica()
    session = _watched(float_model)
    added = {each.name for each in session.get_outputs()}
    names = sorted(name.rpartition("_")[0] for name in added if name.endswith(f"_{_MIN}"))
    asked = [f"{name}_{end}" for end in (_MIN, _MAX) for name in names]
    least = np.full(len(names), np.inf, dtype=np.float32)
    greatest = -least  # neutral in the all-reduce, if a replica has no batch
    for start in range(0, len(x), _BATCH)[replica.index :: replica.count]:
        found = np.concatenate(session.run(asked, {_INPUT: x[start : start + _BATCH]}))
        least = np.minimum(least, found[: len(names)])
        greatest = np.maximum(greatest, found[len(names) :])
    ends = [
        replica.all_reduce(torch.from_numpy(least), "min"),
        replica.all_reduce(torch.from_numpy(greatest), "max"),
    ]
    return names, torch.stack(ends, dim=1).cpu().numpy()


def _watched(float_model: bytes) -> Any:
    """Return a session of the model that also outputs minimum and maximum of every tensor."""
    runtime, quantization = needed("onnxruntime"), needed("onnxruntime.quantization")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory() as folder, quietly():
        given, augmented = Path(folder, "f.onnx"), Path(folder, "watched.onnx")
        given.write_bytes(float_model)
        quantization.create_calibrator(
            given,
            [*_WEIGHTED, *_AROUND],
            augmented_model_path=str(augmented),
            calibrate_method=quantization.CalibrationMethod.MinMax,
        )
        return runtime.InferenceSession(str(augmented), options, providers=["CPUExecutionProvider"])


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress what the exporter and the quantiser print and log."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
