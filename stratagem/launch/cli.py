"""The command `stratagem`; it answers --help without importing torch.

A sub-command is a module, or a class in one, with `add_arguments(parser)` and `main(args)`; it is
imported when it is called, and its docstring is its help. With `APART` it runs in a child process.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from stratagem import __version__
from stratagem.errors import StratagemError, UsageError
from stratagem.launch.tether import die_with


def below(limit: float, what: str) -> Callable[[str], float]:
    """Return a reader of numbers from 0 to less than `limit`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < limit:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


def whole(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if text.strip().isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")

    return read


#: a flag and its METAVAR, if it takes a value; the help; a reader (`str`); a default
Option = tuple[str, str] | tuple[str, str, Any] | tuple[str, str, Any, Any]


def declare(parser: argparse.ArgumentParser, *options: Option) -> None:
    """Declare options, a row each; one without a METAVAR is a switch, a list may be repeated."""
    for flag, text, *more in options:
        name, _, metavar = flag.partition(" ")
        read, default = more[0] if more else str, more[1] if len(more) > 1 else None
        if not metavar:
            default = default if len(more) > 1 else False
            parser.add_argument(name, action="store_true", default=default, help=text)
        elif read is list:
            parser.add_argument(name, action="append", metavar=metavar, default=default, help=text)
        else:
            parser.add_argument(name, type=read, metavar=metavar, default=default, help=text)


def declare_script(parser: argparse.ArgumentParser) -> None:
    """Declare a script, or -m and a module, and all arguments after it."""
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, metavar="module", help="run a module")
    parser.add_argument("script", nargs=rest, help="a Python script and its arguments")


def script_words(args: argparse.Namespace, example: str) -> tuple[str, ...]:
    """A script, or -m and a module, with its arguments; `example`: how a command could begin."""
    if getattr(args, "module", None) is not None:
        if not args.module:
            raise UsageError(
                f"-m needs the name of a module; as in: stratagem {example} -m mypackage.train"
            )
        return ("-m", *args.module, *args.script)
    words = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not words:
        raise UsageError(f"which script? As in: stratagem {example} train.py")
    if words[0].startswith("-"):
        name = example.partition(" ")[0]
        raise UsageError(f"there is no option {words[0]} (see stratagem {name} --help)")
    return tuple(words)


def check_outputs(files: Mapping[str, str | None]) -> None:
    """Refuse output files, by option, that could not be written once the work is done."""
    named = {option: Path(file) for option, file in files.items() if file is not None}
    for option, file in named.items():
        if not file.absolute().parent.is_dir():
            raise UsageError(f"--{option}: there is no folder {str(file.parent)!r}; make it.")
        if file.is_dir():
            raise UsageError(f"--{option}: {str(file)!r} is a folder; name a file.")
        trial = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            if file.exists() and not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if file.is_file() or not file.exists():  # a pipe or a device is not tried
                trial.touch()
                trial.unlink()
        except OSError as problem:
            raise UsageError(f"{file}: it cannot be written ({problem.strerror}).") from None
        twin = next(other for other in named if named[other].resolve() == file.resolve())
        if twin != option:
            raise UsageError(f"--{twin} and --{option} name the same file; give each its own.")


_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


class Killed(StratagemError):
    """The system ended a process that did nothing wrong."""


def apart(work: Callable[[], int]) -> int:
    """Do `work` in a child process; pass signals on, and explain its death. The exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(parent)
        return work()
    return _wait(child)


def _wait(child: int) -> int:
    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child has it, too
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        raise Killed(
            "the script was killed, by the system if nobody else: its model, data and gradients "
            "most likely take more memory than there is; try a smaller model or --batch, or a "
            "machine with more."
        )
    return 128 - code if code < 0 else code


#: the module of each sub-command in this folder, and its summary
COMMANDS = {
    "run": ("run", "start a cluster on this machine"),
    "submit": ("submit", "send a job to Slurm, Kubernetes, Ray, Vertex AI or ssh hosts"),
    "jobs": ("job_commands:JobsCommand", "list the jobs that were submitted"),
    "logs": ("job_commands:LogsCommand", "what the tasks of a submitted job print"),
    "status": ("job_commands:StatusCommand", "how far a submitted job is, task by task"),
    "cancel": ("job_commands:CancelCommand", "end a submitted job"),
    "sweep": ("sweep", "train with other hyper-parameters, keep the best"),
    "ensemble": ("model_commands:EnsembleCommand", "join the models that a sweep has kept"),
    "quantize": ("model_commands:QuantizeCommand", "make a trained model small, in 8 bits"),
    "top": ("top", "show a run as it goes: who is slow, who is dead"),
    "report": ("report_command", "write a run down as one HTML page"),
    "check": ("check", "see whether every task can reach every other"),
    "plan": ("plan", "predict which strategy pays on how many machines"),
    "simulate": ("simulate_command", "run a training in virtual time, at any size"),
}

_DESCRIPTION = "Spread neural-network training over devices and machines."
_EXAMPLES = """examples:
  stratagem run --replicas 2 train.py --epochs 10   two workers on this machine
  stratagem submit --on slurm --workers 4 train.py  the same on a cluster
  stratagem sweep train.py --lr 1e-4..1e-1:log --metric val_loss   which rate is best
  stratagem top runs/first                          what every task does, live
  stratagem check --wait 10                         on each machine, in place of the training
  stratagem plan --link 10Gbit train.py             how many machines are worth having
  stratagem run --help                              every option, with examples
"""


class _Parser(argparse.ArgumentParser):
    """Raises errors as one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += ", and what begins with - is none"
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = argv is None  # else a test, or another program
    name = next((word for word in words if not word.startswith("-")), "")
    try:
        return _dispatch(words, name, command)
    except StratagemError as problem:
        prog = f"stratagem {name}" if name in COMMANDS else "stratagem"
        print(f"{prog}: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(words: Sequence[str], name: str, command: bool) -> int:
    chosen = _imported(COMMANDS[name][0]) if name in COMMANDS else None
    parser, options = _parser(name, chosen)
    try:
        args, unknown = parser.parse_known_args(words)
    except SystemExit as done:  # --help, --version
        return int(done.code or 0)
    if unknown:
        raise UsageError(_unknown(unknown[0], name, options))
    if chosen is None:
        parser.print_help()
        return 2
    if command and getattr(chosen, "APART", False):
        return apart(lambda: int(chosen.main(args)))
    return int(chosen.main(args))


def _imported(where: str) -> Any:
    """Import the sub-command of MODULE or MODULE:CLASS."""
    module, _, name = where.partition(":")
    found = importlib.import_module(f"stratagem.launch.{module}")
    return getattr(found, name) if name else found


def _unknown(word: str, name: str, options: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one argument too many (see stratagem {name} --help)"
    near = difflib.get_close_matches(word.partition("=")[0], options, 1)
    meant = f"; {near[0]}?" if near else ""
    return f"there is no option {word}{meant} (see stratagem {name} --help)"


def _parser(chosen: str, found: Any) -> tuple[argparse.ArgumentParser, list[str]]:
    """A parser of all sub-commands with the options of the chosen one, and a list of these."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="stratagem", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"stratagem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    options: list[str] = []
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=raw, allow_abbrev=False)
        if found is not None and name == chosen:
            text = inspect.getdoc(found) or ""
            command.description, _, examples = text.partition("\nexamples:")
            command.epilog = f"examples:{examples}" if examples else None
            found.add_arguments(command)
            options = [each for action in command._actions for each in action.option_strings]
    return parser, options
