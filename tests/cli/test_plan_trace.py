"""`rorqual plan trace`: a trace written, replayed and refused from the command line."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two prompts that share 1,024 tokens, a second apart."""
    path = tmp_path / "trace.jsonl"
    first = {"timestamp": 0, "input_length": 1500, "output_length": 80, "hash_ids": [1, 2, 3]}
    second = {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 4]}
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    return str(path)


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "trace", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def values(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["figure"]: row["value"] for row in rows}


def test_a_small_trace_by_hand(trace: str, capsys: Capture) -> None:
    told = document(capsys, trace, "--pool", "1GB", "--residence", "60")
    asked, pool = values(told["trace"]), values(told["pool"])
    assert (asked["requests"], asked["span"], asked["arrival_rate"], asked["input_rate"]) == (2, 1, 2, 2600)
    assert (asked["sessions_started"], asked["sessions_peak"], asked["sessions_mean"]) == (2, 2, 1)
    assert asked["sessions_bytes"] == 2 * (2_808_960 + 202_752 + 73_728 + 64)
    assert pool["pool"] == 10**9 // 113_920 * 113_920
    assert pool["hit_rate"] == pytest.approx(1024 / 2600)
    assert (pool["reused_tokens"], pool["bytes_read"], pool["bytes_written"]) == (896, 8 * 113_920, 11 * 113_920)
    assert pool["read_rate"] == 8 * 113_920
    assert "curve" not in told


def test_curve_and_target(trace: str, capsys: Capture) -> None:
    told = document(capsys, trace, "--target-hit-rate", "0.3", "--sample-rate", "1")
    assert told["curve"][-1] == {
        "": "target",
        "pool [pages]": 8,
        "pool [B]": 8 * 113_920,
        "pool": "911.36 kB",
        "hit rate": round(1024 / 2600, 6),
    }
    assert values(told["sample"]) == {"sampling_rate": 1, "sampled_uses": 5, "ceiling": pytest.approx(1024 / 2600)}
    beyond = document(capsys, trace, "--target-hit-rate", "0.9")["curve"][-1]
    assert beyond == {"": "target", "pool [pages]": None, "pool [B]": None, "pool": "out of reach", "hit rate": None}
    assert main(["plan", "trace", trace, "--curve"]) == 0
    assert "LRU; sampled 1 of the keys" in capsys.readouterr().out


def test_policies_pages_models_and_formats(trace: str, capsys: Capture) -> None:
    ttl = document(capsys, trace, "--policy", "ttl", "--ttl", "0.5")
    assert values(ttl["pool"])["bytes_expired"] == 11 * 113_920
    pages = document(capsys, trace, "--page-tokens", "512", "--format", "mooncake")
    # The partial block of 476 tokens is no page of 512.
    assert values(pages["pool"])["bytes_written"] == 2 * 512 * 890
    other = document(capsys, trace, "--model", "real-pair", "--policy", "lfu")
    assert values(other["pool"])["hit_tokens"] == 1024


def test_csv(trace: str, capsys: Capture) -> None:
    assert main(["plan", "trace", trace, "--csv"]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["figure", "value", "unit", "shown", "formula", "evaluated"]
    assert ["hit_tokens", "1024", "tokens", "1.02 K", "whole pages found x page", "8 x 128"] in rows


def test_a_synthetic_trace_is_written_and_replayed(tmp_path: Path, capsys: Capture) -> None:
    path = str(tmp_path / "synthetic.jsonl")
    assert main(["plan", "trace", "--synthetic", "300", path]) == 0
    assert capsys.readouterr().out == ""
    assert values(document(capsys, path)["trace"])["requests"] == 300
    assert main(["plan", "trace", "--synthetic", "300", path]) == 2
    assert "File exists" in capsys.readouterr().err


def test_without_hashes(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1000,12\n2023-11-16 18:00:01,1000,1\n"
    )
    told = document(capsys, str(path))
    assert values(told["pool"])["hit_rate"] == 0
    assert values(told["pool"])["bytes_written"] == 2 * 7 * 113_920
    assert main(["plan", "trace", str(path), "--curve"]) == 2
    assert "the trace has no block ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fifo"], "policy must be one of lru, lfu, ttl; got 'fifo'"),
        (["--policy", "ttl"], "policy ttl needs a time to live"),
        (["--ttl", "3"], "a time to live is for policy ttl; policy lru has none"),
        (["--policy", "lfu", "--curve"], "the curve is that of lru; --policy lfu has none"),
        (["--sample-rate", "0.5"], "--sample-rate is for --curve and --target-hit-rate; give one of them"),
        (["--curve", "--sample-rate", "0"], "a sampling rate is above 0 and up to 1; got 0.0"),
        (["--target-hit-rate", "1.5"], "target hit rate must be in 0..1; got 1.5"),
        (["--pool", "much"], "--pool must be a number of bytes, 0 or more, with a unit of"),
        (["--format", "csv"], "format must be one of bailian, mooncake, burstgpt, azure, plain; got 'csv'"),
        (["--format", "azure"], "line 1: the header must name TIMESTAMP once"),
        (["--residence", "-1"], "a residence time must be in seconds"),
        (["--page-tokens", "100"], "page_tokens must be a multiple of 8"),
        (["--model", "nobody"], "'nobody' is neither a folder, a config file, nor a preset"),
    ],
)
def test_what_is_refused(trace: str, capsys: Capture, arguments: list[str], message: str) -> None:
    assert main(["plan", "trace", trace, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"rorqual: {message}")


def test_a_target_out_of_range_is_refused_before_the_trace_is_read(tmp_path: Path, capsys: Capture) -> None:
    for arguments in (["--target-hit-rate", "nan"], ["--json", "--csv"]):
        assert main(["plan", "trace", str(tmp_path / "absent"), *arguments]) == 2
        assert "No such file" not in capsys.readouterr().err


def test_writing_a_trace_takes_no_options_of_a_replay(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "new.jsonl"
    options = ["--curve", "--pool", "1GB", "--format", "plain", "--json"]
    assert main(["plan", "trace", "--synthetic", "3", str(path), *options]) == 2
    told = "--synthetic writes a trace and replays none; leave out --pool, --format, --curve, --json"
    assert capsys.readouterr().err == f"rorqual: {told}\n"
    assert not path.exists()


def test_a_pipe_is_read_once(trace: str, tmp_path: Path, capsys: Capture) -> None:
    content = Path(trace).read_bytes()

    def piped(*arguments: str) -> int:
        # Room enough in the pipe for both lines, so that nobody waits.
        ours, theirs = os.pipe()
        os.write(theirs, content)
        os.close(theirs)
        try:
            return main(["plan", "trace", f"/dev/fd/{ours}", *arguments])
        finally:
            os.close(ours)

    assert piped() == 2
    assert "is no ordinary file and can be read but once; give --format" in capsys.readouterr().err
    assert piped("--format", "mooncake", "--curve") == 2
    assert "whose size a rate is taken from; give --sample-rate" in capsys.readouterr().err
    assert piped("--format", "mooncake", "--json") == 0
    assert values(json.loads(capsys.readouterr().out)["pool"])["hit_tokens"] == 1024


def test_a_trace_of_empty_prompts_has_no_hit_rate(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,0,4\n")
    told = values(document(capsys, str(path))["pool"])
    assert "hit_rate" not in told and told["hit_tokens"] == 0


def test_a_file_that_is_not_there(tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", "trace", str(tmp_path / "absent"), "--curve"]) == 2
    assert "No such file or directory" in capsys.readouterr().err
