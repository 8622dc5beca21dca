"""`rorqual top`: a frame of a given document, and a real process seen from another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from terminals import ROOT, RUN, Terminal

from rorqual.cli import main
from rorqual.cli.top_frame import acceptance_text, bar_text, frame, layers_text, speed_text, step_text
from rorqual.engine.published import process_start

Capture = pytest.CaptureFixture[str]
WRITTEN = 1_000_000.0


def step(number: int, *sequences: tuple[str, int, int, int], tokens: int = 1) -> dict[str, Any]:
    parts = {"plan_seconds": 0.001, "model_seconds": 0.006, "draft_seconds": 0.002, "other_seconds": 0.001}
    return {"number": number, "sequences": [list(s) for s in sequences], "tokens": tokens, **parts}


DOCUMENT = """{
"version": 1, "pid": 0, "process_start": 0, "started": 996275.0, "written": 1000000.0,
"model": {"name": "demo", "layers": 10, "max_model_len": 4096},
"runs": {"kernels": "fast", "numerics": "fp32", "device": "cpu", "prefill": "ced", "replay": "exact",
  "speculative": true},
"stats": {"running": 2, "waiting": 1, "requests": 9, "finished": 5, "aborted": 1, "steps": 70, "preemptions": 3,
  "evictions": 4, "pages": 32, "pages_free": 8, "pages_used": 16, "pages_cached": 8, "page_bytes": 123456,
  "page_tokens": 128, "slots": 4, "slots_free": 3, "bytes_by_group": {"global": 3950592, "window": 1000},
  "counts": {"prompt": 900, "new": 77, "hit": 256, "replayed": 128, "computed": 1000, "layer_tokens": 5000,
    "proposed": 50, "verifications": 20, "accepted": [16, 8], "preempted": 1}},
"requests": [
  {"id": "a-request-with-a-rather-long-name", "state": "decode", "completions": 1, "prompt": 512, "new": 4, "hit": 256,
   "queue_seconds": 0.25, "prefill_seconds": 1.5, "token_seconds": 0.0123},
  {"id": "c", "state": "waiting", "completions": 1, "prompt": 7, "new": 0, "hit": 0,
   "queue_seconds": null, "prefill_seconds": null, "token_seconds": null}]
}"""


def document() -> dict[str, Any]:
    """As this process would have written it."""
    found: dict[str, Any] = json.loads(DOCUMENT)
    found |= {"pid": os.getpid(), "process_start": process_start(os.getpid())}
    long = "a-request-with-a-rather-long-name/0"
    found["stats"]["recent"] = [step(68, (long, 0, 512, 0)), step(69, (long, 512, 516, 3), ("b/0", 9, 10, 0), tokens=4)]
    return found


def drawn(found: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(frame(found, WRITTEN + 2, width))
    return capture.get().splitlines()


def test_a_store_is_told_of() -> None:
    found = document()
    assert not any("store" in line for line in drawn(found, 120))
    found["stats"]["store"] = {"pages": 1234, "bytes": 2_000_000, "dropped": 5, "damaged": 6}
    found["stats"]["counts"]["restored"] = 128
    (line,) = [line for line in drawn(found, 160) if line.startswith("store")]
    assert "1,234 pages, 2.0 MB; 128 tokens restored, 5 pages dropped, 6 damaged" in line


@pytest.mark.parametrize("width", [60, 120])
def test_a_frame_tells_all_at_any_width(width: int) -> None:
    lines = drawn(document(), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for told in (
        "demo, 4,096 tokens a request",
        "fast kernels, fp32, cpu, ced prefill, exact replay, drafts on",
        "up 1:02:07, as of 2 s ago",
        "16 used, 8 cached, 8 free",
        "1 of 4 used",
        "2 running, 1 waiting",
        "900 of prompts, 77 new",
        "1,000 computed, 256 hit, 128 of these replayed",
        "5,000 of 10,000, 50.0%",
        "80% 40% by position",
        "3 preemptions, 4 evictions",
        "model 60%, drafts 20%, plan 10%, rest 10%",
        "4.0 MB",
        "decode",
        "2 live requests",
        "last steps",
    ):
        words = told.split()  # a narrow frame folds, and what stands beside comes between
        assert told in text or all(word in text for word in words), told
    wide = any("bytes allocated" in line and "█" in line for line in lines)
    assert wide == (width == 120), "the bytes stand beside the facts where there is room"
    newest = next(at for at, line in enumerate(lines) if "… [512, 516) +3" in line)
    assert "[0, 512)" in lines[newest + 1]
    assert any("b/0 [9, 10)" in line for line in lines) == (width == 120)


def test_a_frame_of_an_engine_that_has_done_nothing() -> None:
    found = document()
    zero: dict[str, Any] = {name: [] if name == "accepted" else 0 for name in found["stats"]["counts"]}
    found["stats"] |= {"counts": zero, "recent": [], "running": 0, "waiting": 0}
    found["requests"] = []
    text = "\n".join(drawn(found, 60))
    assert "last steps" not in text and "live requests" not in text and "0 running" in text


def test_many_requests_are_cut_and_counted() -> None:
    found = document()
    found["requests"] = [found["requests"][1] | {"id": f"r{at}"} for at in range(30)]
    lines = drawn(found, 80)
    assert any("30 live requests, the first 8" in line for line in lines)
    assert sum(line.startswith("r") and line.split()[1] == "waiting" for line in lines) == 8


def test_texts_of_numbers() -> None:
    recent = document()["stats"]["recent"]
    assert speed_text(recent) == "250.0 tokens/s in the last 2 steps, 2.50 a step"
    assert step_text(recent) == "10.0 ms: model 60%, drafts 20%, plan 10%, rest 10%"
    assert acceptance_text(document()["stats"]["counts"]).endswith("2.20 tokens a verification")
    assert layers_text({"computed": 0, "layer_tokens": 0}, 10) == speed_text([]) == step_text([]) == "-"
    for parts in ((3, 3, 4), (0, 0, 7), (1, 1, 1000), (1000, 1, 0), (5, 0, 0)):
        bar = bar_text(tuple(zip(parts, "abc", strict=True)), 20)
        assert len(bar) == 20 and all((mark in bar) == (n > 0) for n, mark in zip(parts, "abc", strict=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines of this test write."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "rorqual"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "top: no process publishes anything in"),
        (["999999999"], "top: process 999999999 publishes nothing"),
        (["nowhere.json"], "top: nowhere.json cannot be read"),
        (["--interval", "0"], "interval: 0.0 is not legal; legal: 0.05..3600 seconds"),
        (["--interval", "nan"], "interval: nan is not legal"),
    ],
)
def test_mistakes_are_one_line(folder: Path, arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["top", "--once", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_a_file_is_shown_and_a_stale_one_refused(folder: Path, capsys: Capture) -> None:
    folder.mkdir()
    path = folder / f"{os.getpid()}.json"
    path.write_text(json.dumps(document()))
    for which in ([], [str(os.getpid())], [str(path)]):
        assert main(["top", "--once", *which]) == 0
        assert f"process {os.getpid()}" in capsys.readouterr().out
    path.write_text(json.dumps(document() | {"process_start": 1}))
    assert main(["top", "--once", str(path)]) == 2
    assert capsys.readouterr().err == f"rorqual: top: {path} is stale: its process {os.getpid()} is gone\n"


WORK = """
import sys
sys.path.insert(0, "tests/engine")
from models import random_ids, tiny
from rorqual import Engine, SamplingParams
from rorqual.engine.monitor import Monitor

engine = Engine(tiny("plain"), pages=16, slots=2)
params = SamplingParams(max_tokens=30, ignore_eos=True)
with Monitor(engine, name="tiny", interval=0) as monitor:
    names = [engine.submit(random_ids(n), params) for n in (20, 4)]
    while engine.has_work:
        engine.step()
        monitor.tick()
        if engine.stats().steps == 3:
            print("three", flush=True)
            input()
    print("done", flush=True)
    input()
"""


@pytest.fixture
def working(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that generates, and waits for a line after its third step and at its end."""
    with subprocess.Popen(
        [sys.executable, "-c", WORK], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        child.kill()


def test_a_process_that_generates_is_seen(working: subprocess.Popen[str], folder: Path, capsys: Capture) -> None:
    assert working.stdin is not None and working.stdout is not None
    assert working.stdout.readline() == "three\n"
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert f"process {working.pid}  tiny" in out and "2 running, 0 waiting" in out and "2 live requests" in out
    assert "request-0/0 [0, 20), request-1/0 [0, 4)" in out
    follow = [*RUN, "top", str(working.pid), "--interval", "0.05"]
    with subprocess.Popen(follow, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and f"process {working.pid}" in first.stdout.readline()
        first.send_signal(signal.SIGINT)
        first.stdout.read()
        assert first.wait() == 0
    with subprocess.Popen(follow, cwd=ROOT, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None and f"process {working.pid}" in second.stdout.readline()
        print(file=working.stdin, flush=True)
        assert working.stdout.readline() == "done\n"
        assert main(["top", "--once"]) == 0
        assert "0 running, 0 waiting, 2 finished" in capsys.readouterr().out
        print(file=working.stdin, flush=True)
        assert working.wait() == 0 and not list(folder.iterdir())
        second.stdout.read()
        assert second.wait() == 0, "it ends with the process"


def test_a_terminal_shows_one_frame_in_the_place_of_the_other(working: subprocess.Popen[str]) -> None:
    assert working.stdin is not None and working.stdout is not None
    assert working.stdout.readline() == "three\n"
    watch = [*RUN, "top", "--interval", "0.05"]
    with Terminal(watch) as first, Terminal(watch) as second:
        for terminal in (first, second):
            terminal.wait_for(rf"process {working.pid} .*2 live")
        first.type("\x03")
        assert first.end() == 0
        for wanted in ("done\n", ""):
            print(file=working.stdin, flush=True)
            assert working.stdout.readline() == wanted
        second.wait_for(f"process {working.pid} has ended")
        assert second.end() == 0
