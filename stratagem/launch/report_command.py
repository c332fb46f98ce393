"""A run on one page: curves, what every task did when, faults and what was done about them.

RUN is the folder that was given to `stratagem run --record`, or that STRATAGEM_RECORD names;
without it, the newest one in runs/. The page is one file that needs nothing else, no network
either; it can be written while the run goes on.

examples:
  stratagem run --record runs/first --replicas 2 train.py
  stratagem report runs/first                         writes runs/first/report.html
  stratagem report --html first.html runs/first
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stratagem.errors import UsageError
from stratagem.figures.run_folder import find
from stratagem.launch.run_page import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem report`."""
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="the run's folder (the newest in runs/)")
    add("--html", metavar="FILE", help="where to write the page (RUN/report.html)")


def main(args: argparse.Namespace) -> int:
    """Write the page."""
    run = find(args.run)
    run.read()
    if not run.tasks:
        raise UsageError(f"nothing was recorded in {run.path} yet; is this the run's folder?")
    path = Path(args.html) if args.html else run.path / "report.html"
    try:
        path.write_text(page(run), encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}") from None
    print(path)
    return 0
