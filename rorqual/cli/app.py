"""Dispatch: from `argv` to one verb, and from its errors to one line.

The protocol of a verb
- It is a row of `VERBS`: its name, a target `module:function`, one line of help. The row is all that `rorqual --help`
  reads; the module is imported when its verb is called, so a heavy verb never slows a light one.
- The function (by custom called `command`) is one that `typer` takes: annotated parameters, options described by
  `Annotated[..., typer.Option(...)]`, types importable at module level. Its docstring is the verb's `--help`.
- A group of verbs, such as `lab`, has a module as its target: one with `VERBS` of its own, of which the next argument
  picks one. The first line of its docstring heads the group's `--help`. Its `BARE`, if it has one, is the command line
  that the group's name alone stands for.
- It returns None for success. `raise typer.Exit(1)` says that the work was done and its answer is no (a failed
  verification). A user's mistake is a `RorqualError`, a missing file included: the verb turns FileNotFoundError on a
  path that the user gave into InputError. Any other exception is a bug of ours and keeps its traceback.

Exit codes: 0 done, 1 the answer is no (or nobody reads our output any more), 2 a mistake in the input, 130 interrupted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from rorqual.errors import RorqualError
from rorqual.log import logger

PROGRAM = "rorqual"
COMPILER = "rorqual-kernels"
"""The thread in which kernels compile (`rorqual.ops.dispatch`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One verb of the command line: `target` is `module:function`, `help` one line without a full stop.

    A group's target is a module.
    """

    name: str
    target: str
    help: str

    def load(self) -> Callable[..., Any] | ModuleType:
        """Import the verb's module and hand out its function; of a group, the module."""
        name, _, function = self.target.partition(":")
        module = import_module(name)
        command: Callable[..., Any] | ModuleType = getattr(module, function) if function else module
        return command


VERBS: tuple[Verb, ...] = (
    Verb(name="generate", target="rorqual.cli.generate:command", help="Continue a prompt, streaming the text"),
    Verb(name="chat", target="rorqual.cli.chat:command", help="Talk with a model in the terminal"),
    Verb(name="top", target="rorqual.cli.top:command", help="Watch an engine that runs in another process"),
    Verb(name="serve", target="rorqual.cli.serve:command", help="Serve a model over OpenAI's and Anthropic's APIs"),
    Verb(name="cluster", target="rorqual.cli.cluster", help="Run prefill and decode workers under Ray, for `serve`"),
    Verb(name="inspect", target="rorqual.cli.inspect:command", help="Show layers, parameters and cache bytes"),
    Verb(name="plan", target="rorqual.cli.plan", help="Bytes, FLOPs, sessions and traffic of a config, by formula"),
    Verb(name="store", target="rorqual.cli.store", help="Look after the cache pages that a store keeps on disk"),
    Verb(name="init", target="rorqual.cli.init:command", help="Write a random checkpoint of any config"),
    Verb(name="train", target="rorqual.cli.train:command", help="Train a small model on text"),
    Verb(name="trace", target="rorqual.cli.trace:command", help="Dump every tensor of a forward pass"),
    Verb(name="verify", target="rorqual.cli.verify:command", help="Check a golden folder against our own trace"),
    Verb(name="golden", target="rorqual.cli.golden:command", help="Write a golden folder for a config"),
    Verb(name="diff", target="rorqual.cli.diff:command", help="Find the first tensor where two dumps part"),
    Verb(name="lab", target="rorqual.cli.lab", help="Measure what formats, prefill and drafts do to a model"),
    Verb(name="bench", target="rorqual.cli.bench:command", help="Measure kernels or a model against the plain twins"),
    Verb(name="warm", target="rorqual.cli.warm:command", help="Compile the fast kernels ahead of time"),
)


def main(argv: Sequence[str] | None = None, verbs: Sequence[Verb] = VERBS) -> int:
    """Run one command line (default `sys.argv[1:]`) and return its exit code; nothing but a bug raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _mend_stdout()
    with _log_to_stderr():
        try:
            code = _dispatch(arguments, verbs)
            sys.stdout.flush()
            return code
        except RorqualError as error:
            return _complain(str(error))
        except BrokenPipeError:
            return _silence_stdout()
        except OSError as error:
            # The safety net under the verbs: a path or a device that fails in a way no verb foresaw.
            return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if any(thread.name == COMPILER for thread in threading.enumerate()):
                os._exit(130)  # a compilation would hold the exit for seconds
            return 130


def _dispatch(arguments: list[str], verbs: Sequence[Verb], program: str = PROGRAM, about: str = "") -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h", "help"):
        print(_overview(verbs, program, about))
        return 0 if arguments else 2
    if name == "--version" and program == PROGRAM:
        from rorqual import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    verb = next((verb for verb in verbs if verb.name == name), None)
    if verb is None:
        given = f"{program} {name}".removeprefix(f"{PROGRAM} ")
        return _complain(f"no verb '{given}'; the verbs are {', '.join(verb.name for verb in verbs)}")
    target = verb.load()
    if isinstance(target, ModuleType):
        about = (target.__doc__ or "").split("\n")[0]
        rest = arguments[1:] or list(getattr(target, "BARE", ()))
        return _dispatch(rest, target.VERBS, f"{program} {name}", about)
    return _run(target, f"{program} {name}", arguments[1:])


def _run(function: Callable[..., Any], program: str, arguments: list[str]) -> int:
    import typer

    # The base of all complaints about the arguments. Some releases of typer import click for it, some carry their
    # own copy; the class that both export, BadParameter, derives from it.
    bases: Any = typer.BadParameter.__mro__
    usage_error: type[Exception] = next(base for base in bases if base.__name__ == "ClickException")

    application = typer.Typer(add_completion=False)
    application.command()(function)
    command = typer.main.get_command(application)
    # A verb that starts more processes of itself finds its own command line in the context.
    spelled = [*program.split()[1:], *arguments]
    try:
        code = command.main(arguments, prog_name=program, standalone_mode=False, obj=spelled)
    except typer.Abort:
        return 130
    except usage_error as error:
        detail: Any = error
        return _complain(f"{detail.format_message()} (see {program} --help)")
    return code if isinstance(code, int) else 0


def _overview(verbs: Sequence[Verb], program: str, about: str) -> str:
    width = max(len(verb.name) for verb in verbs)
    rows = "\n".join(f"  {verb.name:<{width}}  {verb.help}" for verb in verbs)
    heading = f"{about}\n\n" if about else ""
    return (
        f"usage: {program} VERB [ARGUMENTS]\n\n{heading}{rows}\n\n"
        f"`{program} VERB --help` describes one verb, `{PROGRAM} --version` prints the version."
    )


def _complain(message: str) -> int:
    """One line on stderr, whatever the message's own line breaks; the exit code of a mistake in the input.

    Of processes that train together the first on a machine speaks for the others, which meet the same mistake.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 2
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _mend_stdout() -> None:
    """A closed standard output swallows what is printed; one that cannot encode a character shows another."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _silence_stdout() -> int:
    """The reader has gone: let the interpreter's last flush go nowhere instead of printing a complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
