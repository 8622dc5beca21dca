"""The benchmark of the engine: what its loads and replays are, and the documents of quick runs. No time is judged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from figures import numbers

from rorqual.bench import engine as bench
from rorqual.bench import engine_load, engine_restore, engine_trace, engine_workspace
from rorqual.bench.engine_load import Load, Run, load_rows, run_load
from rorqual.bench.engine_restore import Restore
from rorqual.bench.engine_single import Single
from rorqual.bench.engine_trace import Arrival, replayed, scaled
from rorqual.bench.fresh import fresh_process
from rorqual.bench.latency import Latency, first_token, per_token
from rorqual.bench.report import Bar
from rorqual.checkpoint.random import write_random
from rorqual.cli import bench_engine, main
from rorqual.cli.bench import show, spelled
from rorqual.config import ModelConfig, presets
from rorqual.engine.engine import Engine
from rorqual.engine.output import Completion, Counts, RequestOutput, Times, compact
from rorqual.engine.stats import StepRecord
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.planner.traces import synthetic
from rorqual.planner.traces.mooncake import BLOCK_TOKENS
from rorqual.planner.traces.request import Request

Capture = pytest.CaptureFixture[str]
Document = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("engine") / "tiny"
    write_random(presets.load("tiny"), found, seed=0)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load(folder, kernels="fast")


@pytest.fixture(scope="module")
def config(model: Transformer) -> ModelConfig:
    return model.config


def run(out: Path, *arguments: str) -> Document:
    asked = ["--quick", "--repeats", "1", "--random", "tiny", "--out", str(out), *arguments]
    assert main(["bench", "engine", *asked]) == 0
    document: Document = json.loads(out.read_text(encoding="utf-8"))
    return document


def test_a_quick_run_has_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Memory is read in this process: its peaks mean little, but every number is there."""

    def here(module: str, folder: Path, tokens: int, chunk: int) -> dict[str, object]:
        assert module == "rorqual.bench.engine_workspace"
        return engine_workspace.run(folder, tokens, chunk)

    monkeypatch.setattr(bench, "fresh_process", here)
    monkeypatch.setattr(engine_restore, "fresh_process", restored_here)
    document = run(tmp_path / "engine.json", "--profile")
    assert document["what"] == "engine" and document["quick"] is True
    assert document["command"] == "rorqual bench engine --repeats 1 --quick --random tiny --profile"
    text = json.dumps(document)
    assert str(Path.cwd()) not in text and "/tmp" not in text and '"bar"' not in text
    assert all(math.isfinite(number) for number in numbers(document))
    rows = document["rows"]
    assert [row["name"] for row in rows] == [
        *["load"] * 4,
        *["bookkeeping"] * 2,
        "decode",
        "prefix",
        "restore",
        *["trace"] * 2,
        "profile",
        *["memory"] * 2,
    ]
    check_load(rows[:4])
    check_steps(rows[4:6])
    for row, pair in zip(rows[6:9], ("engine_s / bare_s", "shared_s / cold_s", "restored_s / cold_s"), strict=True):
        assert row["ratio_of"] == pair and row["ratio"] > 0
    assert rows[6]["same_tokens"] is True and rows[7]["hit_tokens"] == rows[8]["restored_tokens"] == 256
    check_traces(rows[9:11])
    assert set(rows[11]["profile"]) == {"no drafts", "drafts"}
    for parts in rows[11]["profile"].values():
        assert {"engine: plan", "engine: choose and settle", "Python between"} <= {part["part"] for part in parts}
        assert sum(part["share"] for part in parts) == pytest.approx(1)
    check_memory(rows[12:])
    out = capsys.readouterr().out
    assert "3 at once, 8 + 3 to 5 tokens" in out and "engine: choose and settle" in out and "apart" in out


def restored_here(module: str, folder: Path, store: Path, *numbers: int) -> dict[str, object]:
    assert module == engine_restore.MODULE
    return engine_restore.run(folder, store, *numbers)


def check_load(rows: list[Document]) -> None:
    assert [(row["at_once"], row["drafts"]) for row in rows] == [(1, False), (3, False), (1, True), (3, True)]
    for row in rows:
        assert row["requests"] == 2 * row["at_once"] and row["tokens_per_s"]["median"] > 0
        for name in ("first_token_s", "per_token_s"):
            assert 0 < row[name]["median"] <= row[name]["p95"] <= row[name]["max"]
            assert row[name]["count"] == row["requests"]
    assert rows[0]["speedup"] == rows[2]["speedup"] == 1.0
    for alone, many in (rows[:2], rows[2:]):
        assert many["speedup"] == many["tokens_per_s"]["median"] / alone["tokens_per_s"]["median"]


def check_steps(rows: list[Document]) -> None:
    for row in rows:
        shares = [row[f"{part}_share"] for part in ("plan", "other", "model", "draft")]
        assert sum(shares) == pytest.approx(1) and row["bookkeeping_share"] == pytest.approx(shares[0] + shares[1])
    assert rows[0]["draft_share"] < rows[1]["draft_share"]


def check_traces(rows: list[Document]) -> None:
    shared, apart = rows
    assert (shared["prefix"], apart["prefix"]) == ("shared", "apart")
    assert shared["hit_tokens"] > 0 == apart["hit_tokens"] == apart["replayed_tokens"]
    assert shared["shape"] == apart["shape"] and shared["prompt_tokens"] == apart["prompt_tokens"]
    assert shared["new_tokens"] == apart["new_tokens"] > 0 and shared["time_scale"] == 0.1


def check_memory(rows: list[Document]) -> None:
    for row, tokens in zip(rows, (64, 192), strict=True):
        parts = ("imported_bytes", "mapped_weight_bytes", "copied_weight_bytes", "cache_bytes")
        assert row["workspace_bytes"] == row["peak_rss_bytes"] - sum(row[name] for name in parts)
        assert row["shape"].startswith(f"a prompt of {tokens} tokens") and row["layer_tokens"] > tokens
    assert "workspace_growth" in rows[1] and "workspace_growth" not in rows[0]


def test_a_restore_is_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A real one finds what this one has stored."""
    layout, asked = load(folder).layout, (256, 8, 64)
    first = engine_restore.run(folder, tmp_path, *asked, 0)
    second = fresh_process(engine_restore.MODULE, folder, tmp_path, *asked, 1)
    assert first["restored_tokens"] == 0 and second["restored_tokens"] == 256
    assert second["restored_bytes"] == 256 // layout.page_tokens * layout.page_bytes
    assert all(float(str(row["first_token_s"])) > 0 for row in (first, second))


def test_a_stored_prefix_is_cut_to_the_model() -> None:
    assert Restore().within(4096, 128) == replace(Restore(), prefix=3968)
    assert Restore().within(65_536, 128) == Restore() and engine_restore.QUICK.within(1024, 128) == engine_restore.QUICK


def test_parts_run_alone(tmp_path: Path) -> None:
    assert bench_engine.PARTS == bench.PARTS == tuple(bench.REPEATS)
    document = run(tmp_path / "engine.json", "--part", "prefix")
    assert [row["name"] for row in document["rows"]] == ["prefix"]
    assert document["command"] == "rorqual bench engine --part prefix --repeats 1 --quick --random tiny"


def test_a_prompt_in_a_fresh_process(folder: Path) -> None:
    sizes = replace(bench.QUICK, workspaces=(40, 80))
    rows: list[Any] = bench.memory_rows(folder, sizes, 1, None, lambda: None)
    assert all(row["peak_rss_bytes"] > row["imported_bytes"] > 10**7 for row in rows)


def test_latencies_are_those_of_most() -> None:
    assert Latency.of([float(wait) for wait in range(100, 0, -1)]) == Latency(
        median=50.5, p95=95.0, max=100.0, count=100
    )
    assert Latency.of([2.0]).p95 == 2.0
    times = Times(arrived=1.0, admitted=2.0, first_token=4.0, last_token=7.0)
    output = RequestOutput(
        request="r",
        prompt_ids=compact([1]),
        completions=[Completion(index=0, token_ids=[5, 6, 7, 8])],
        counts=Counts(),
        times=times,
    )
    assert (first_token(output), first_token(output, due=0.5), per_token(output)) == (3.0, 3.5, 1.0)


def test_places_are_taken_again(model: Transformer) -> None:
    """A new request for each that ends; drafts change no token."""
    load = Load(at_once=(3,), judged=3, waves=3, prompt=6, new=(4, 2, 7))
    said = []
    for drafts in engine_load.settings(model):
        found = run_load(engine_load.new_engine(model, load, drafts), load, 3, seed=5)
        assert [len(output.token_ids) for output in found.outputs] == [4, 2, 7] * 3
        assert max(len(step.sequences) for step in found.steps) == 3
        assert sum(step.tokens for step in found.steps) == 39
        assert all(output.counts.hit == 0 for output in found.outputs)
        assert 0 < len(found.full_steps) < len(found.steps)
        said.append([output.token_ids for output in found.outputs])
    assert said[0] == said[1]


def test_the_judged_concurrency_has_the_bars(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at once take as long as one here: four times the tokens a second. A tenth of a step is bookkeeping."""
    record = StepRecord(
        number=0,
        at=0.0,
        sequences=(("a", 8, 9, 0), ("b", 8, 9, 0), ("c", 9, 12, 2), ("d", 20, 21, 0)),
        preempted=(),
        tokens=4,
        accepted=0,
        plan_seconds=0.04,
        model_seconds=0.7,
        draft_seconds=0.2,
        other_seconds=0.06,
    )
    prefill = replace(record, sequences=(("a", 0, 9, 0), *record.sequences[1:]), model_seconds=100.0)

    def timed(engine: Engine, load: Load, at_once: int, seed: int) -> Run:
        found = run_load(engine, load, at_once, seed)
        return Run(2.0, at_once, found.outputs, (prefill, record) if at_once == 4 else ())

    monkeypatch.setattr(engine_load, "run_load", timed)
    load = Load(at_once=(1, 4), judged=4, prompt=4, new=(3,))
    turns: list[int] = []
    rows: list[Any] = load_rows(
        model,
        load,
        2,
        speedup_bar=Bar(at_least=4),
        share_bar=Bar(at_most=0.05),
        stepped=lambda: turns.append(1),
    )
    assert len(turns) == 2 * 2 * 2 and [row["tokens_per_s"]["median"] for row in rows[:2]] == [3.0, 12.0]
    reached, missed = {"at_least": 4, "reached": True}, {"at_most": 0.05, "reached": False}
    assert [row.get("bar") for row in rows] == [None, reached, None, reached, missed, missed]
    assert rows[4]["shape"] == "4 at once, 2 steps" and rows[4]["bookkeeping_share"] == pytest.approx(0.1)
    assert rows[4]["plan_share"] == pytest.approx(0.04) and rows[4]["draft_share"] == pytest.approx(0.2)


def test_a_trace_keeps_its_prefixes(config: ModelConfig) -> None:
    asked = [
        Request(5_000_000, 3 * BLOCK_TOKENS + 100, 400, [7, 8, 9, 11]),
        Request(4_000_000, 3 * BLOCK_TOKENS, 4, [7, 8, -3]),
        Request(9_000_000, 0, 0, []),
    ]
    one, two, three = scaled(asked, BLOCK_TOKENS, config, 259, 0.5)
    # The longest has 2,036 tokens in all, so an eighth of everything is left: blocks of 64.
    assert (len(one.prompt), len(two.prompt), len(three.prompt)) == (205, 193, 1)
    assert (one.new, two.new, three.new) == (50, 2, 2)
    block = int(BLOCK_TOKENS * (259 - 3) / (3 * BLOCK_TOKENS + 500))
    assert one.prompt[: 2 * block] == two.prompt[: 2 * block] and one.prompt[2 * block :] != two.prompt[2 * block :]
    assert [arrival.due for arrival in (one, two, three)] == [0.0, 0.0, 2.0], "a clock that ran backwards stands still"
    same = scaled(asked, BLOCK_TOKENS, config, 259, 0.5)
    assert same == [one, two, three]


def test_a_trace_without_blocks_shares_nothing(config: ModelConfig) -> None:
    one, two = scaled([Request(0, 300, 5), Request(0, 300, 5)], 0, config, 1000, 1.0)
    assert len(one.prompt) == len(two.prompt) == 300 and one.new == 5
    assert one.prompt[:8] != two.prompt[:8]


@pytest.mark.parametrize("seed", [0, 1])
def test_every_request_fits(config: ModelConfig, seed: int) -> None:
    made = synthetic.generate(40, seed)
    requests = [Request(1000 * ms, tokens, new, ids) for ms, tokens, new, ids in made]
    arrivals = scaled(requests, BLOCK_TOKENS, config, 512, 1.0)
    assert max(len(arrival.prompt) + arrival.new for arrival in arrivals) in range(480, 513)


class FakeClock:
    """A millisecond passes at every look at it; who sleeps moves it on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_replay_is_on_the_clock(model: Transformer) -> None:
    """Nobody comes before it is due; the second finds the first's pages, unless they are tenants apart."""
    prompt = [3 + i % 500 for i in range(300)]
    arrivals = [Arrival(due=due, prompt=prompt, new=3) for due in (0.0, 50.0, 50.0)]
    said = []
    for apart in (False, True):
        clock = FakeClock()
        engine = Engine(model, slots=2, pages=12, clock=clock)
        found, seconds = replayed(engine, arrivals, apart=apart, clock=clock, sleep=clock.sleep)
        assert len(clock.slept) == 1 and 49 < clock.slept[0] < 50 < seconds < 52
        for arrival, (due, output) in zip(arrivals, found, strict=True):
            assert due == pytest.approx(100.001 + arrival.due) and due <= output.times.arrived < due + 1
            assert len(output.token_ids) == 3 and first_token(output, due) > 0
        hits = [output.counts.hit for _, output in found]
        assert hits == ([0, 0, 0] if apart else [0, 256, 256])
        said.append([output.token_ids for _, output in found])
    # A bounded replay need not give the very bits of a whole prefill; three whole ones do.
    assert said[1][0] == said[1][1] == said[1][2]


def test_a_file_is_replayed(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    synthetic.write(str(path), 9, seed=3)
    given = ["--part", "trace", "--trace", str(path), "--time-scale", "0"]
    document = run(tmp_path / "engine.json", *given)
    shared, apart = document["rows"]
    assert shared["shape"].startswith("4 requests in 0 s, ") and apart["time_scale"] == 0
    assert document["command"].endswith("--random tiny --trace trace.jsonl --time-scale 0")
    path.write_text('{"timestamp": 1}\n', encoding="utf-8")
    assert main(["bench", "engine", "--quick", "--random", "tiny", *given]) == 2
    assert "line 1 is of no known format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--part", "decode"], "part: 'decode' is none of engine's; legal: load, single, prefix, restore, "),
        (["model", "--trace", "x"], "trace: nothing is replayed here; legal: with engine and its part trace"),
        (["engine", "--part", "load", "--time-scale", "1"], "time-scale: nothing is replayed here"),
        (["engine", "--trace", "no-such-file"], "trace: no-such-file is not a file"),
        (["engine", "--time-scale", "-1"], "time-scale: -1.0 is not legal; legal: 0 (all at once) or a positive"),
        (["engine", "--time-scale", "nan"], "time-scale: nan is not legal"),
        (["engine", "--model", "no-such-folder", "--quick"], "model: no-such-folder is not a folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_who_is_judged() -> None:
    assert bench.bars_of(None, None).share == Bar(at_most=0.05) and bench.bars_of(None, None).prefix is None
    assert bench.bars_of(None, "mid").prefix == Bar(at_most=0.1) == bench.BARS["mid"].prefix
    assert bench.bars_of(None, "tiny") == bench.bars_of(Path("mid"), None) == bench.Bars()
    assert bench.bars_of(None, None).restore == Bar(at_most=1 / 6)
    assert set(bench.BARS) - {bench.SHIPPED} <= set(presets.NAMES)


def test_growth_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {16_384: 100, 131_072: 111}
    monkeypatch.setattr(bench, "fresh_process", lambda *given: {"workspace_bytes": found[given[2]]})
    rows: list[Any] = bench.memory_rows(Path(), bench.FULL, 2, Bar(at_most=1.1), lambda: None)
    assert [row.get("bar") for row in rows] == [None, {"at_most": 1.1, "reached": False}]
    assert rows[1]["workspaces_of_runs_bytes"] == [111, 111]


def test_sizes_are_cut_to_the_model() -> None:
    full = Single()
    assert full.within(65_536, 128) == full
    assert full.within(4096, 128) == replace(full, context=2048, shared=3072)
    assert full.within(1024, 128) == replace(full, context=512, shared=768)
    assert engine_trace.FULL.tokens == 4096


def test_tables_say_what_was_reached(capsys: Capture) -> None:
    wait = {"median": 0.25, "p95": 0.5, "max": 0.75, "count": 3}
    rows = [
        {
            "name": "load",
            "shape": "16 at once",
            "drafts": True,
            "tokens_per_s": {"median": 300.0},
            "speedup": 3.5,
            "first_token_s": wait,
            "per_token_s": wait,
            "accepted_share": 0.41,
            "bar": {"at_least": 4, "reached": False},
        },
        {
            "name": "bookkeeping",
            "shape": "16 at once, 9 steps",
            "drafts": False,
            "step_s": {"median": 0.05},
            **{f"{part}_share": 0.01 for part in ("plan", "other", "model", "draft", "bookkeeping")},
            "bar": {"at_most": 0.05, "reached": True},
        },
    ]
    show({"rows": rows, "command": "c", "machine": {}, "roofline": {}, "notes": []})
    out = capsys.readouterr().out
    for said in (">= 4: MISSED", "<= 5%: reached", "250 ms", "500 ms", "41%", "1.0%"):
        assert said in out
    said = spelled("engine", None, False, None, None, ("load",), trace=Path("/home/someone/a.jsonl"), time_scale=2.0)
    assert said == "rorqual bench engine --part load --trace a.jsonl --time-scale 2"
