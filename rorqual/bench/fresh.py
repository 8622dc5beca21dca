"""A measurement in a process of its own, because a peak is the peak of everything that a process ever did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rorqual.bench.report import JsonRow
from rorqual.errors import InputError, RorqualError


def answer(measure: Callable[[], JsonRow]) -> int:
    """What such a process prints, and its exit code: 2 with one line where the checkpoint is to blame; a bug of ours
    keeps its traceback."""
    try:
        print(json.dumps(measure()))
    except RorqualError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def environment(**added: str) -> dict[str, str]:
    """This process's variables and some more; a Python under them has the same package, installed or not."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path} | added


def fresh_process(module: str, *arguments: object) -> JsonRow:
    """The JSON object that `python -m module arguments` prints as its last line.

    Raises:
        InputError: with the process's one line of complaint, where it ends with 2.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode == 2:
        raise InputError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"the fresh process ended with {done.returncode}: {done.stderr}")
    result: JsonRow = json.loads(done.stdout.splitlines()[-1])
    return result
