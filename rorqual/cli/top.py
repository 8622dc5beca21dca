"""`rorqual top`: watch an engine that runs in another process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rorqual.errors import InputError


def command(
    which: Annotated[
        str | None, typer.Argument(metavar="[FILE|PID]", help="Which engine; else the process that started last.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two frames.")] = 0.5,
) -> None:
    """Watch an engine that runs in another process: pools, speed, acceptance of drafts, requests, the last steps.

    Ctrl-C ends it, and it ends by itself when the process does.
    """
    from rorqual.engine.published import find_document, read_document

    if not 0.05 <= interval <= 3600:
        raise InputError(f"interval: {interval} is not legal; legal: 0.05..3600 seconds")
    path = find_document(which)
    document = read_document(path)
    try:
        if once:
            _print(document)
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            _watch(path, document, interval)
        else:
            _follow(path, document, interval)
    except KeyboardInterrupt:
        return


def _watch(path: Path, document: dict[str, Any], interval: float) -> None:
    """One frame in the place of the other, on a screen of its own."""
    from rich.console import Console
    from rich.live import Live

    from rorqual.cli.top_frame import frame
    from rorqual.engine.published import read_document

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(document, time.time(), console.width), refresh=True)
            time.sleep(interval)
            try:
                document = read_document(path)
            except InputError:
                break
    print(f"process {document['pid']} has ended")


def _follow(path: Path, document: dict[str, Any], interval: float) -> None:
    """One frame after the other, for a file, a pipe, or a terminal that cannot put one in the place of another."""
    from rorqual.engine.published import read_document

    while True:
        _print(document)
        time.sleep(interval)
        try:
            document = read_document(path)
        except InputError:
            return


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console

    from rorqual.cli.output import PIPE_WIDTH
    from rorqual.cli.top_frame import frame

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    console.print(frame(document, time.time(), console.width))
    sys.stdout.flush()
