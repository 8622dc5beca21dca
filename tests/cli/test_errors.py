"""Whatever goes wrong, a person gets one line and a program gets a code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.cli.app import VERBS, Verb, main
from rorqual.log import logger

ROOT = Path(__file__).resolve().parents[2]
ALL_ERRORS = (
    "RorqualError",
    "ConfigError",
    "FormatError",
    "CheckpointError",
    "InputError",
    "HandoverError",
    "CapacityError",
)

MODULE = """
import logging, os, sys
from typing import Annotated
import typer
from rorqual import errors

def fail(name: str) -> None:
    raise getattr(errors, name)("alpha is 3;\\n  legal: 1, 2")

def read(path: str) -> None:
    open(path)

def crash() -> None:
    raise ZeroDivisionError("a bug of ours")

def verdict(code: int) -> None:
    raise typer.Exit(code)

def count(number: Annotated[int, typer.Option(min=1, max=4)] = 2) -> None:
    print(number)

def interrupted() -> None:
    raise KeyboardInterrupt

def chatty() -> None:
    logging.getLogger("rorqual").info("compiling kernels")
    print("done")

def endless() -> None:
    for line in range(10**7):
        print(line)
"""
FUNCTIONS = ("fail", "read", "crash", "verdict", "count", "interrupted", "chatty", "endless")


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Verb, ...]:
    (tmp_path / "planted_verbs.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "planted_verbs", raising=False)
    return tuple(Verb(name=name, target=f"planted_verbs:{name}", help="Planted") for name in FUNCTIONS)


@pytest.mark.parametrize("name", ALL_ERRORS)
def test_every_error_is_one_line_and_exit_2(
    name: str, verbs: tuple[Verb, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", name], verbs) == 2
    streams = capsys.readouterr()
    assert streams.err == "rorqual: alpha is 3; legal: 1, 2\n"
    assert streams.out == ""


def test_missing_file_is_named(verbs: tuple[Verb, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "/nowhere/ids.json"], verbs) == 2
    assert capsys.readouterr().err == "rorqual: /nowhere/ids.json: No such file or directory\n"


def test_a_bug_keeps_its_traceback(verbs: tuple[Verb, ...]) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["crash"], verbs)


@pytest.mark.parametrize("code", [0, 1, 7])
def test_exit_code_of_a_verdict(code: int, verbs: tuple[Verb, ...]) -> None:
    assert main(["verdict", str(code)], verbs) == code


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["count", "--number", "9"], "--number"),
        (["count", "--number", "many"], "--number"),
        (["count", "--nmber", "1"], "--nmber"),
        (["fail"], "name"),
        (["conut"], "the verbs are fail, read, crash, verdict, count"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], named: str, verbs: tuple[Verb, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, verbs) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("rorqual: ")
    assert streams.err.count("\n") == 1
    assert named.lower() in streams.err.lower()


def test_interrupt_is_130(verbs: tuple[Verb, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["interrupted"], verbs) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_log_goes_to_stderr_and_only_while_running(verbs: tuple[Verb, ...], capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = list(logger.handlers), logger.level
    assert main(["chatty"], verbs) == 0
    streams = capsys.readouterr()
    assert (streams.out, streams.err) == ("done\n", "rorqual: compiling kernels\n")
    assert (logger.handlers, logger.level) == (handlers, level)


def test_overview_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"  {verb.name} " in text
        assert verb.help in text
    assert main([]) == 2
    assert capsys.readouterr().out == text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import rorqual

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rorqual {rorqual.__version__}\n"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_registered_verb_describes_itself(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb.name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"rorqual {verb.name}" in text
    assert (verb.load().__doc__ or "").split("\n")[0] in " ".join(text.split())


def test_overview_imports_nothing_heavy() -> None:
    script = (
        "import sys; from rorqual.cli import main; main(['--help']); "
        "print(sorted({'torch', 'numba', 'numpy', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_reader_that_leaves_early_is_no_error(verbs: tuple[Verb, ...], tmp_path: Path) -> None:
    script = (
        "import sys; from rorqual.cli.app import Verb, main; "
        "sys.exit(main(['endless'], (Verb(name='endless', target='planted_verbs:endless', help=''),)))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) in (1, -signal.SIGPIPE)
