"""A parameter server without user code: `python -m stratagem.ps`.

It takes its place from the environment (TF_CONFIG and the others), or from --cluster and --index,
serves the job's workers, and ends when the job does.

  TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"]},
              "task": {"type": "ps", "index": 0}}'  python -m stratagem.ps
  python -m stratagem.ps --index 0 \\
      --cluster '{"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"]}'
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from stratagem.cluster import exit_cause
from stratagem.cluster.environment import detect
from stratagem.cluster.spec import ClusterSpec, Place, Task
from stratagem.errors import StratagemError, UsageError


def main(words: list[str] | None = None) -> int:
    """Serve; 0 when the job has ended well, 1 with a sentence otherwise."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m stratagem.ps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cluster", metavar="JSON", help="roles and addresses of all tasks")
    parser.add_argument("--index", type=int, default=0, help="which of the ps tasks this is (0)")
    parser.add_argument("--threads", type=int, metavar="N", help="torch threads for updates (1)")
    parser.add_argument(
        "--insecure", action="store_true", help="listen on a network without STRATAGEM_SECRET"
    )
    args = parser.parse_args(words)
    logging.basicConfig(format="%(message)s")
    try:
        place = _place(args.cluster, args.index)
        import torch

        from stratagem.strategies.parameter_server import serve

        torch.set_num_threads(args.threads or 1)
        serve(place, insecure=args.insecure, option="--insecure")
    except StratagemError as error:
        exit_cause.because(error)
        print(f"stratagem.ps: {error}", file=sys.stderr)
        return 1
    return 0


def _place(cluster: str | None, index: int) -> Place:
    if cluster is not None:
        spec = ClusterSpec.from_json(cluster, "--cluster")
        return Place(spec, Task("ps", index), "--cluster")
    place = detect(os.environ)
    if place is None:
        raise UsageError("there is no cluster in the environment; set TF_CONFIG, or --cluster.")
    if place.task.type != "ps":
        raise UsageError(f"{place.source} says that this task is {place.task}, not a ps.")
    return place


if __name__ == "__main__":
    sys.exit(main())
