"""`rorqual plan report`: the file it writes, its options, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rorqual.cli import main
from tests.planner.html_page import Page

Capture = pytest.CaptureFixture[str]


def made(out: Path, *arguments: str) -> Page:
    assert main(["plan", "report", *arguments, "--out", str(out)]) == 0
    return Page(out.read_text(encoding="utf-8"))


def test_bare_it_writes_the_release_on_eight_h200(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "report"]) == 0
    out = tmp_path / "report.html"
    assert capsys.readouterr().out == f"report.html: {out.stat().st_size:,} B\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    read = Page(out.read_text(encoding="utf-8"))
    assert read.headings[0] == (1, "Plan of v4.1-flash")
    assert [row[0] for row in read.sheets["capacity-sessions"].rows] == ["4,096", "32,768", "131,072", "1,048,576"]
    assert [row[0] for row in read.sheets["contexts-table"].rows][-2:] == ["1,000,000", "1,048,576"]
    assert "3,376 sessions" in read.described("sessions")
    again = tmp_path / "again.html"
    made(again, "v4.1-flash", "--context", "4Ki,32Ki,128Ki,1Mi")
    made(out, "v4.1-flash", "--context", "4Ki", "--context", "32Ki,128Ki", "--context", "1Mi")
    assert out.read_bytes() == again.read_bytes()


def test_options_reach_the_page(tmp_path: Path) -> None:
    read = made(
        tmp_path / "r.html",
        "demo",
        "--date=1 July",
        *("--context", "1Ki,4Ki", "--page", "256", "--count", "1", "--device", "cpu", "--memory", "1GiB"),
        *("--bandwidth", "80GB/s", "--flops", "2e12", "--utilisation", "0.5", "--storage", "bf16"),
        *("--engram", "disk", "--no-drafts", "--prompt", "512", "--output", "10", "--rate", "2"),
        *("--prefill-rate", "1000", "--hit-rate", "0.75", "--link", "8Gbit/s", "--target-time", "0.5"),
        *("--latency", "0.1", "--disk", "1TB", "--endurance", "1PB"),
    )
    for told in (
        "1 July",
        "256 tokens",
        "1 x CPU, tp 1, attention groups 1, ep 1, 0.5 of the memory",
        "Engram on disk, drafts left out, vision none",
        "bf16",
        "512 tokens in, 10 out, 2 a second, 75 % of the prompt in the pool",
    ):
        assert told in read.text
    assert [row[0] for row in read.sheets["contexts-table"].rows] == ["1,024", "4,096"]
    assert read.sheets["capacity-memory-0"].rows[1][1] == f"{2**29:,}"
    links = read.sheets["traffic-links"]
    assert "time at 1 GB/s [ms]" in links.columns and "link for 0.5 s [GB/s]" in links.columns
    assert "disk_life" in [row[0] for row in read.sheets["traffic-figures"].rows]
    assert "decode-roofline" in read.sheets


def test_a_model_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    read = made(tmp_path / "r.html", "--device", "rtx5090", "--count", "1", "--context", "4Ki")
    assert "Does not fit. 1 x RTX 5090" in read.text
    assert "0 sessions" in read.text


def test_a_model_too_small_for_eight_devices_gets_one(capsys: Capture, tmp_path: Path) -> None:
    read = made(tmp_path / "r.html", "tiny")
    assert "1 x H200 SXM" in read.text
    assert "512 tokens in, 512 out" in read.text
    assert main(["plan", "report", "tiny", "--count", "8", "--out", str(tmp_path / "s.html")]) == 2
    assert "--count must allow an --ep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama"], "'llama' is neither a folder, a config file, nor a preset"),
        (["--out", "no/r.html"], "--out must be in a folder that exists; no does not"),
        (["--out", "."], "--out must be an ordinary file; . is not"),
        (["--context", "2Mi"], "a context must be at most 1,048,576 tokens"),
        (["--context", "0"], "--context must be 1 token or more; got 0"),
        (["--prompt", "0"], "--prompt must be 1 token or more"),
        (["--page", "100"], "page_tokens must be a multiple of"),
        (["--device", "tpu"], "--device must be one of h100"),
        (["--storage", "int8"], "--storage must be one of"),
        (["--utilisation", "nan"], "--utilisation must be a finite number"),
        (["--hit-rate", "2"], "hit rate must be in 0..1; got 2"),
        (["--endurance", "1PB"], "--endurance needs --disk"),
        (["--json"], "No such option"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "report", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1
    assert not told.out and not list(tmp_path.iterdir())
