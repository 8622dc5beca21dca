"""`rorqual plan traffic`: its tables as text, JSON and CSV, and what it refuses."""

from __future__ import annotations

import csv
import json
from typing import Any

import pytest

from rorqual.cli import main

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "traffic", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_bare_it_describes_the_release(capsys: Capture) -> None:
    told = document(capsys)
    assert [row["hand-over"] for row in told["handover"]] == ["replay", "streams", "rings"]
    # 32,768 tokens are 256 pages.
    assert told["handover"][0]["total [B]"] == 256 * 113_920 + 12_288 + 24
    values = {row["figure"]: row["value"] for row in told["figures"]}
    assert values["hit_tokens"] == 16_384
    assert "disk_life" not in values


def test_options_reach_the_figures(capsys: Capture) -> None:
    arguments = ("v4.1-flash", "--prompt", "1000", "--output", "100", "--rate", "2", "--prefill-rate", "1000")
    more = ("--hit-rate", "0.9", "--link", "8Gbit/s", "--latency", "0.1", "--handover", "rings")
    told = document(capsys, *arguments, *more, "--disk", "1TB", "--endurance", "1PB", "--target-time", "1.1")
    assert [row["hand-over"] for row in told["handover"]] == ["rings"]
    total = 8 * 113_920 + 12_288 + 24 + 2_703_360 + 202_752 + 517_120
    link = told["links"][0]
    assert link["time at 1 GB/s [ms]"] == pytest.approx(100 + total / 1e6)
    assert link["link for 1.1 s [GB/s]"] == pytest.approx(total / 1e9)
    values = {row["figure"]: row["value"] for row in told["figures"]}
    assert values["pool_write_rate"] == 2 * 113_920
    assert values["break_even_link"] == 890_000
    assert values["disk_residence"] == pytest.approx(10**12 / 227_840 / 86_400)


def test_text_and_csv(capsys: Capture) -> None:
    assert main(["plan", "traffic"]) == 0
    assert "5,242,880" in capsys.readouterr().out
    assert main(["plan", "traffic", "--csv"]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0][:2] == ["hand-over", "pages [B]"]
    assert ["streams", "29163520", "12288", "24", "1351680", "0", "5242880", "2048", "0", "0", "35772440"] in rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--handover", "half"], "--handover must be one of all, replay, streams, rings; got 'half'"),
        (["--link", "50"], "--link must be above 0 with a unit of bytes or bits a second: 50GB/s, 400Gbit/s; got '50'"),
        (["--hit-rate", "2"], "hit rate must be in 0..1; got 2"),
        (["--rate", "-1"], "rate must be a number of 0 or more; got -1"),
        (["--rate", "nan"], "--rate must be a finite number; got nan"),
        (["--prefill-rate", "0"], "prefill rate must be a number above 0; got 0"),
        (["--prompt", "0"], "--prompt must be 1 token or more"),
        (["--prompt", "x"], "--prompt must be a number of tokens such as 4096, 128Ki or 1M; got 'x'"),
        (["--endurance", "1PB"], "--endurance needs --disk, the capacity that it belongs to"),
        (["--latency", "1"], "target time must be above the latency of 1 s; got 0.1 s"),
        (["--latency", "1e308"], "--latency must be 0 or between 1e-30 and 1e30; got 1e+308"),
        (["--prompt", "1,5"], "--prompt must be a number of tokens such as 4096, 128Ki or 1M; got '1,5'"),
        (["--json", "--csv"], "--json and --csv exclude each other; give one of them"),
    ],
)
def test_what_is_refused(capsys: Capture, arguments: list[str], message: str) -> None:
    assert main(["plan", "traffic", *arguments]) == 2
    assert capsys.readouterr().err == f"rorqual: {message}\n"
