"""What the planner takes: how soon its verbs have answered, and the replay of long traces: `rorqual bench plan`.

Everything is measured on processes of their own, as a user meets them: the interpreter's start and all imports count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rorqual.bench.fresh import environment
from rorqual.bench.report import Bar, JsonRow
from rorqual.bench.timing import Sample
from rorqual.ops.dispatch import Progress

REPEATS = 3
STARTS = 5  # of a verb for each repeat: they are short
VERBS = ("ledger", "numbers", "explain", "capacity", "traffic", "compare", "glossary")
START_BAR, REPLAY_BAR, MEMORY_BAR = Bar(at_most=0.3), Bar(at_most=20), Bar(at_most=500e6)
POLL_S = 0.02

NOTES = (
    "start_s: wall time from the start of a fresh interpreter to its end, output to nowhere; report writes a file "
    "and is left out",
    "a trace is `rorqual plan trace --synthetic N FILE` (24 block ids a request on average), replayed at the default "
    "pool of 256GB under LRU; the parser is a second process",
    "peak_rss_bytes: peaks (VmHWM) of the replaying process and its parser, added",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Requests of the trace that is timed and of the one whose memory counts."""

    timed: int = 1_000_000
    large: int = 10_000_000


FULL = Lengths()
QUICK = Lengths(timed=500, large=1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One process, its children included. peak_rss: bytes, 0 where the system does not say. told: lines on stderr."""

    wall_s: float
    cpu_s: float
    peak_rss: int
    told: int


def run_plan(*, repeats: int = REPEATS, quick: bool = False, progress: Progress | None = None) -> list[JsonRow]:
    """A row a verb, one of the timed replay, one of the large one."""
    lengths = QUICK if quick else FULL
    steps = len(VERBS) + repeats + 3
    rows: list[JsonRow] = []
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    for verb in VERBS:
        rows.append(start_row(verb, 1 if quick else STARTS * repeats))
        advance()
    for name, requests, times in (("replay", lengths.timed, repeats), ("memory", lengths.large, 1)):
        with synthetic(requests) as (path, written):
            advance()
            runs = []
            for _ in range(times):
                runs.append(plan("trace", str(path), "--json"))
                advance()
            rows.append(replay_row(name, requests, path.stat().st_size, written, runs))
    return rows


def start_row(verb: str, times: int) -> JsonRow:
    """Wall time of one verb on the release, by its defaults. The first start, from a cold disk, is left out."""
    plan(verb)
    sample = Sample.of([plan(verb).wall_s for _ in range(times)])
    return {"name": "start", "shape": f"rorqual plan {verb}", "start_s": asdict(sample)} | _judged(
        START_BAR, sample.median
    )


def replay_row(name: str, requests: int, size: int, written: Run, runs: Sequence[Run]) -> JsonRow:
    """Times and memory of replays of one trace; "replay" is judged by its median time, "memory" by its worst peak."""
    wall, peak = Sample.of([run.wall_s for run in runs]), max(run.peak_rss for run in runs)
    bar = _judged(REPLAY_BAR, wall.median) if name == "replay" else _judged(MEMORY_BAR, peak)
    return {
        "name": name,
        "shape": f"{requests:,} requests",
        "trace_bytes": size,
        "write_s": asdict(Sample.of([written.wall_s])),
        "replay_s": asdict(wall),
        "cpu_s": asdict(Sample.of([run.cpu_s for run in runs])),
        "peak_rss_bytes": peak,
        "progress_lines": max(run.told for run in runs),
        **bar,
    }


def _judged(bar: Bar, value: float) -> JsonRow:
    return {"bar": bar.as_json(value)}


@contextmanager
def synthetic(requests: int) -> Iterator[tuple[Path, Run]]:
    """A synthetic trace for as long as it is needed, and what writing it took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        yield path, plan("trace", str(path), "--synthetic", str(requests))


def plan(*arguments: str) -> Run:
    """Run `rorqual plan ARGUMENTS` in a process of its own. Raises RuntimeError if it fails."""
    script = "import sys; from rorqual.cli.app import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "plan", *arguments]
    with tempfile.TemporaryFile("w+") as told:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=told, env=environment())
        peaks: dict[int, int] = {}
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            _note_peaks(process.pid, peaks)
            time.sleep(POLL_S if time.perf_counter() - start > 1 else POLL_S / 20)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        told.seek(0)
        lines = told.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"rorqual plan {' '.join(arguments)} ended with {process.returncode}: {lines[-1:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(wall_s=wall, cpu_s=cpu, peak_rss=sum(peaks.values()), told=len(lines))


def _note_peaks(pid: int, peaks: dict[int, int]) -> None:
    """The peaks so far of a process and its children; a peak of one that has just gone stays as it was last seen."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        for one in (pid, *map(int, children)):
            for line in Path(f"/proc/{one}/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    peaks[one] = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
