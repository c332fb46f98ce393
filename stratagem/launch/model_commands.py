"""Commands about models that were trained: ensemble, quantize."""

from __future__ import annotations

import argparse
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from stratagem.errors import UsageError
from stratagem.launch.cli import below, declare, whole


def arrays(file: Path) -> tuple[Any, Any]:
    """The arrays x and y of an .npz file."""
    import numpy as np

    try:
        with np.load(file, allow_pickle=False) as found:
            return found["x"], found["y"]
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as problem:
        raise UsageError(
            f"{file} is no file of arrays x and y ({problem}); write it by "
            "numpy.savez(file, x=..., y=...)"
        ) from None


def function(where: str) -> Any:
    """The function that `--build FILE.py:NAME` names."""
    file, _, name = where.rpartition(":")
    if not Path(file).is_file():
        raise UsageError(f"--build {where}: there is no file {file!r}; as in --build net.py:build")
    loader = SourceFileLoader(Path(file).stem, file)
    module = ModuleType(loader.name)
    module.__file__ = file
    with _told(f"--build {where}: {file} cannot be imported"):
        loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise UsageError(f"--build {where}: {file} has no function {name!r}")
    return getattr(module, name)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Tell an error of the user's code in a sentence, with its place."""
    try:
        yield
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}"
        raise UsageError(f"{what}: {type(problem).__name__}: {problem} ({where})") from problem


class EnsembleCommand:
    """The models that a sweep has kept, joined: mean of their probabilities, or a vote.

    RUN is the folder of a sweep. The table shows the ensemble beside its members on validation
    data, since it can be worse than they are; with --out it is saved as one folder of plain files.
    Models of Keras are read as they are. Of torch modules a sweep keeps the weights: --build names
    a function that makes the module from a trial's flags, {"units": "64"}, in a file that can be
    imported.

    examples:
      stratagem ensemble runs/sweep-train --data valid.npz          arrays x and y
      stratagem ensemble runs/sweep-train --data valid.npz --vote --out best
      stratagem ensemble runs/sweep-train --data valid.npz --build net.py:build --from-logits
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the options of `stratagem ensemble`."""
        add = parser.add_argument
        add("run", metavar="RUN", help="the folder of a sweep")
        add("--data", metavar="FILE.npz", required=True, help="validation data: arrays x and y")
        declare(
            parser,
            ("--vote", "a vote for each member instead of the mean"),
            ("--build FILE.py:NAME", "makes a torch module from a trial's flags"),
            ("--from-logits", "the members' outputs are logits", bool, None),
            ("--batch N", "examples at a time", int),
            ("--replicas N", "processes that share the members", whole(1), 1),
            ("--out DIR", "save the ensemble there"),
        )

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Print the table; save the ensemble if asked to."""
        from stratagem.frontends.ensemble import Ensemble  # imports torch
        from stratagem.strategies.mirrored import MirroredStrategy

        x, y = arrays(Path(args.data))
        build = function(args.build) if args.build else None
        with ExitStack() as held:
            strategy = None
            if args.replicas > 1:
                devices = [f"cpu:{i}" for i in range(args.replicas)]
                strategy = held.enter_context(MirroredStrategy(devices))
            ensemble = Ensemble.from_sweep(args.run, build, args.vote, args.from_logits, strategy)
            print(ensemble.evaluate(x, y, batch_size=args.batch))
        if args.out:
            print(f"saved in {ensemble.save(args.out)}")
        return 0


class QuantizeCommand:
    """A trained classifier in 8 bits: ONNX for serving, or Keras' own for models of Keras.

    MODEL is a file that `save` wrote: digits.safetensors, or digits.keras. The table shows the
    small model beside the one in floats: accuracy, how often both answer alike, bytes,
    milliseconds. With --max-drop nothing is written if more accuracy is lost. Weights of torch
    need a module to put them into: --build names a function that makes it, in a file that can
    be imported; for a model of a sweep's trial it is given the trial's flags, {"units": "64"}.

    examples:
      stratagem quantize digits.keras --calibration train.npz --test test.npz --out small
      stratagem quantize digits.safetensors --build net.py:build --calibration train.npz \\
          --test test.npz --max-drop 0.01 --out small
      stratagem quantize w.safetensors --build net.py:build --calibration a.npz --to int8-weights
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the options of `stratagem quantize`."""
        add = parser.add_argument
        add("model", metavar="MODEL", help="a .safetensors file of sg.Model.save, or a .keras file")
        calibration = "arrays x and y, to calibrate by"
        add("--calibration", metavar="FILE.npz", required=True, help=calibration)
        declare(
            parser,
            ("--test FILE.npz", "arrays x and y, to compare on"),
            ("--build FILE.py:NAME", "makes the torch module"),
            ("--to KIND", "int8 (ONNX, or Keras' own) or int8-weights", str, "int8"),
            ("--max-drop D", "accuracy that may be lost", below(1.0, "a part of 1")),
            ("--replicas N", "processes that calibrate", whole(1), 1),
            ("--out FILE", "where the small model goes"),
        )

    @staticmethod
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
    from torch.nn import Module

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
    given = "the flags of its trial" if flags else "no argument"
    make = function(build)
    with _told(f"--build {build} was called with {given}"):
        module = make(*flags)
    if not isinstance(module, Module):
        raise UsageError(f"--build {build} returns no torch module, but {type(module).__name__}")
    with _told(f"{file} is of another module than --build {build} makes"):
        return TorchMember.load(file, module)
