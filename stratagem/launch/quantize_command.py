"""A trained classifier in 8 bits: ONNX for serving, or Keras' own for models of Keras.

MODEL is a file that `save` wrote: digits.safetensors, or digits.keras. The table shows the small
model beside the one in floats: accuracy, how often both answer alike, bytes, milliseconds. With
--max-drop nothing is written if more accuracy is lost. Weights of torch need a module to put them
into: --build names a function that makes it, in a file that can be imported; for a model of a
sweep's trial it is given the trial's flags, {"units": "64"}.

examples:
  stratagem quantize digits.keras --calibration train.npz --test test.npz --out small
  stratagem quantize digits.safetensors --build net.py:build --calibration train.npz \\
      --test test.npz --max-drop 0.01 --out small
  stratagem quantize w.safetensors --build net.py:build --calibration a.npz --to int8-weights
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.launch.cli import below, whole
from stratagem.launch.user_files import arrays, function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem quantize`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a .safetensors file of sg.Model.save, or a .keras file")
    add("--calibration", metavar="FILE.npz", required=True, help="arrays x and y, to calibrate by")
    add("--test", metavar="FILE.npz", help="arrays x and y, to compare on")
    add("--build", metavar="FILE.py:NAME", help="makes the torch module")
    add("--to", default="int8", metavar="KIND", help="int8 (ONNX, or Keras' own) or int8-weights")
    add("--max-drop", type=below(1.0, "a part of 1"), metavar="D", help="accuracy that may be lost")
    add("--replicas", type=whole(1), default=1, metavar="N", help="processes that calibrate")
    add("--out", metavar="FILE", help="where the small model goes")


def main(args: argparse.Namespace) -> int:
    """Print the table; write the small model if asked to."""
    calibration = arrays(Path(args.calibration))
    test = arrays(Path(args.test)) if args.test else None
    from stratagem.frontends.quantize import quantize  # imports torch
    from stratagem.strategies.mirrored import MirroredStrategy

    with ExitStack() as held:
        if args.replicas > 1:
            strategy = MirroredStrategy([f"cpu:{i}" for i in range(args.replicas)])
            held.callback(strategy.close)
            held.enter_context(strategy.scope())
        model = _model(Path(args.model), args.build)
        quantize(model, calibration, args.to, test=test, max_drop=args.max_drop, out=args.out)
    return 0


def _model(file: Path, build: str | None) -> Any:
    from stratagem.frontends.ensemble import flags_of
    from stratagem.frontends.ensemble_member import KerasMember, TorchMember

    if not file.is_file() or file.suffix not in (".keras", ".safetensors"):
        raise UsageError(f"{file} is no .safetensors or .keras file of a trained model.")
    if file.suffix == ".keras":
        return KerasMember.load(file)
    if build is None:
        raise UsageError(
            f"{file} has weights only; name a function that makes the module: --build net.py:build"
        )
    flags = (flags_of(file),) if (file.parent / "args.json").is_file() else ()
    return TorchMember.load(file, function(build)(*flags))
