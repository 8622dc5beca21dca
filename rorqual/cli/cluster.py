"""Prefill and decode workers under Ray: start them, look at them, end them. `rorqual serve --cluster` answers for them.

A cluster is a TOML file (`rorqual.disagg.cluster.config`, docs/cluster.md). It lives as long as `up` runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.cli.app import Verb
from rorqual.cli.output import Cell, print_table
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.disagg.cluster.job import Facts
    from rorqual.disagg.cluster.placing import Post

VERBS: tuple[Verb, ...] = (
    Verb(name="up", target="rorqual.cli.cluster:up_command", help="Start the workers of a config, until Ctrl-C"),
    Verb(name="status", target="rorqual.cli.cluster:status_command", help="What each worker is and does"),
    Verb(name="down", target="rorqual.cli.cluster:down_command", help="End a cluster that runs on this machine"),
)
WATCH_SECONDS = 2.0
ANSWER_SECONDS = 30.0
Config = Annotated[Path, typer.Argument(help="The cluster, in TOML.")]


def up_command(config: Config) -> None:
    """Start the workers of a config and keep them running until Ctrl-C; Ray restarts those that die."""
    from rorqual.disagg.cluster.config import ClusterConfig
    from rorqual.disagg.cluster.supervisor import up

    stated = ClusterConfig.read(config)
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt), up(stated) as posts:
        # Ray has a handler of its own.
        signal.signal(signal.SIGTERM, _interrupt)
        _print([post.facts for post in posts if post.facts is not None])
        print(f"rorqual cluster {stated.name} is up; answer for it with: rorqual serve --cluster {config}", flush=True)
        _watch(posts)


def status_command(config: Config) -> None:
    """Show every worker of a cluster that is up: where it runs, what it does. Exit code 1 where one does not answer."""
    from rorqual.disagg.cluster.config import ClusterConfig
    from rorqual.disagg.cluster.supervisor import connected

    with connected(ClusterConfig.read(config)) as posts:
        answers = _answers(posts)
    _print([facts for facts, _ in answers.values()], {name: stats for name, (_, stats) in answers.items()})
    silent = [post.name for post in posts if post.name not in answers]
    if silent:
        print(f"no answer: {', '.join(silent)}")
        raise typer.Exit(1)


def down_command(config: Config) -> None:
    """End a cluster that was started on this machine, as Ctrl-C does; wait until it is gone."""
    from rorqual.disagg.cluster.config import ClusterConfig
    from rorqual.disagg.cluster.presence import find

    name = ClusterConfig.read(config).name
    own = find(name)
    if own is None:
        raise InputError(f"cluster: none called {name!r} runs here")
    os.kill(own.pid, signal.SIGTERM)  # a shell's background jobs do not hear SIGINT
    end = time.monotonic() + ANSWER_SECONDS
    while own.alive and time.monotonic() < end:
        time.sleep(0.05)
    if own.alive:
        print(f"process {own.pid} has not ended after {ANSWER_SECONDS:g} s")
        raise typer.Exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _answers(posts: Sequence[Post]) -> dict[str, tuple[Any, Any]]:
    """Facts and statistics of those that answer in time."""
    calls = {post.name: post.handle.call("hello") for post in posts}
    end, found = time.monotonic() + ANSWER_SECONDS, {}
    for name, call in calls.items():
        with contextlib.suppress(Exception):  # it is dead, or silent
            found[name] = call.result(max(0.0, end - time.monotonic()))
    return found


def _watch(posts: Sequence[Post]) -> None:
    """Say which workers have begun anew, until somebody ends it."""
    known = {post.name: post.facts.incarnation for post in posts if post.facts is not None}
    while True:
        time.sleep(WATCH_SECONDS)
        for name, (facts, _) in _answers(posts).items():
            if facts.incarnation != known[name]:
                known[name] = facts.incarnation
                print(f"{name} has begun anew, as process {facts.pid} on {facts.node}", flush=True)


def _print(each: Sequence[Facts], stats: dict[str, Any] | None = None) -> None:
    from rorqual.planner.units import decimal_bytes

    heads = ["worker", "machine", "process", "resident", "slots", "pages"]
    rows: list[list[Cell]] = []
    for own in each:
        row: list[Cell] = [own.name, own.node, own.pid, decimal_bytes(own.resident), own.slots, own.pages]
        if stats is not None:
            now = stats[own.name]
            row += [now.running, now.waiting, now.pages_used, now.pages_cached]
        rows.append(row)
    if stats is not None:
        heads += ["running", "waiting", "pages used", "cached"]
    print_table(heads, rows)
