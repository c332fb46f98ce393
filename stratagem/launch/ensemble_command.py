"""The models that a sweep has kept, joined: mean of their probabilities, or a vote.

RUN is the folder of a sweep. The table shows the ensemble beside its members on validation data,
since it can be worse than they are; with --out it is saved as one folder of plain files. Models of
Keras are read as they are. Of torch modules a sweep keeps the weights: --build names a function
that makes the module from a trial's flags, {"units": "64"}, in a file that can be imported.

examples:
  stratagem ensemble runs/sweep-train --data valid.npz          arrays x and y
  stratagem ensemble runs/sweep-train --data valid.npz --vote --out best
  stratagem ensemble runs/sweep-train --data valid.npz --build net.py:build --from-logits
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from stratagem.launch.cli import whole
from stratagem.launch.user_files import arrays, function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem ensemble`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a sweep")
    add("--data", metavar="FILE.npz", required=True, help="validation data: arrays x and y")
    add("--vote", action="store_true", help="a vote for each member instead of the mean")
    add("--build", metavar="FILE.py:NAME", help="makes a torch module from a trial's flags")
    add("--from-logits", action="store_true", default=None, help="the members' outputs are logits")
    add("--batch", type=int, metavar="N", help="examples at a time")
    add(
        "--replicas", type=whole(1), default=1, metavar="N", help="processes that share the members"
    )
    add("--out", metavar="DIR", help="save the ensemble there")


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
