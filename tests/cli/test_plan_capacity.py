"""`rorqual plan capacity`: answers, refusals and the check of a log, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "capacity", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def refusal(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", "capacity", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_the_default_is_the_release_on_eight_h200(capsys: Capture) -> None:
    told = document(capsys)
    names = ["weights", "memory", "beside", "sessions", "storage", "padding", "roofline"]
    assert list(told) == names
    assert [row["context [tokens]"] for row in told["sessions"]] == [4096, 32_768, 131_072, 2**20]
    assert {row["global [B/token]"] for row in told["sessions"]} == {890}
    assert {row["fixed [B/session]"] for row in told["sessions"]} == {3_085_504}
    assert [row["global [B/token]"] for row in told["storage"]] == [890, 1490, 1650, 1630, 1790, 3200]
    assert told["weights"][-1]["all [B]"] == 510_286_023_000
    assert len(told["roofline"]) == 4 * 5


def test_tables_and_csv(capsys: Capture) -> None:
    assert main(["plan", "capacity", "--count", "8", "--context", "128Ki"]) == 0
    text = capsys.readouterr().out
    assert "a decode step at best, 8 x H200 SXM" in text
    assert "119,739,584" in text
    assert main(["plan", "capacity", "--context", "128Ki", "--csv"]) == 0
    sheets = capsys.readouterr().out.split("\n\n")
    assert len(sheets) == 7
    assert sheets[3].splitlines()[0].startswith("context [tokens],logical [B/session]")
    assert "--json and --csv exclude each other" in refusal(capsys, "--json", "--csv")


def test_one_h200_is_too_small(capsys: Capture) -> None:
    told = refusal(capsys, "--device", "h200", "--count", "1")
    assert "1 x H200 SXM: weights of 510.29 GB (510,286,023,000 B)" in told
    assert "short by 385.76 GB (385,764,193,368 B) a rank" in told


def test_a_mix_and_another_storage(capsys: Capture) -> None:
    packed = document(capsys, "--mix", "4Ki:70,128Ki:25,1Mi:5")["sessions"][0]
    assert packed["context [tokens]"] == "4,096 (70 %), 131,072 (25 %), 1,048,576 (5 %)"
    wide = document(capsys, "--mix", "4Ki:70,128Ki:25,1Mi:5", "--storage", "bf16")["sessions"][0]
    assert (packed["global [B/token]"], wide["global [B/token]"]) == (890, 3200)
    assert wide["sessions a rank"] < packed["sessions a rank"] / 3


def test_the_users_own_machine(capsys: Capture) -> None:
    options = ("tiny", "--device", "cpu", "--memory", "64MiB", "--utilisation", "1", "--count", "1")
    quiet = document(capsys, *options, "--page", "16", "--chunk", "64")
    assert "roofline" not in quiet
    assert [row["context [tokens]"] for row in quiet["sessions"]] == [1024]
    rated = document(capsys, *options, "--page", "16", "--chunk", "64", "--bandwidth", "20GB/s", "--flops", "1e11")
    assert len(rated["roofline"]) == 5
    assert "give --memory" in refusal(capsys, "tiny", "--device", "cpu", "--count", "1")


def test_pages_that_the_model_cannot_have(capsys: Capture) -> None:
    told = document(capsys, "--page", "256", "--context", "1000")
    assert [row["page [tokens]"] for row in told["padding"]] == [16, 32, 64, 128, 256, 512, 1024]
    assert {row["page [tokens]"]: row["at these contexts [B/session]"] for row in told["padding"]}[256] == 24 * 890
    assert "page_tokens must be a multiple of 8" in refusal(capsys, "--page", "100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "4Ki", "--mix", "4Ki:1"), "--context and --mix exclude each other"),
        (("--context", "2Mi"), "a context must be at most 1,048,576 tokens"),
        (("--context", "0"), "--context must be 1 token or more"),
        (("--tp", "16", "--count", "16"), "--tp must be"),
        (("--dp-attention", "4", "--tp", "4"), "--tp x --dp-attention must be --count"),
        (("--device", "tpu"), "--device must be one of h100"),
        (("--engram", "tape"), "--engram must be one of device, host, disk, off"),
        (("--sessions", "100000", "--context", "128Ki"), "12,500 sessions of 131,072 tokens"),
        (("--utilisation", "0"), "--utilisation must be above 0"),
        (("--utilisation", "nan"), "--utilisation must be a finite number; got nan"),
        (("--flops", "inf"), "--flops must be a finite number; got inf"),
        (("--tp", "16"), "--tp x --dp-attention must be --count; got 16 x 1, not 8"),
        (("--memory", "much"), "--memory must be a number of bytes"),
        (("--memory", "1,5TB"), "--memory must be a number of bytes"),
        (("--bandwidth", "80"), "--bandwidth must be above 0 with a unit of bytes or bits a second"),
        (("--mix", "4Ki:1e9999999"), "--mix must be context:share pairs"),
        (("--mix", "0:1"), "--mix must have contexts of 1 token or more; got '0:1'"),
        (("--count", "0"), "--count must be in 1..65536; got 0"),
        (("--count", "7"), "--count must allow an --ep, which is a divisor of --count"),
        (("--hosts", "3"), "--hosts must be a divisor of --count (8); got 3"),
        (("--chunk", "0"), "--chunk must be 1 or more"),
        (("--check", "/nonexistent/engine.log"), "--check /nonexistent/engine.log: No such file"),
    ],
)
def test_refusals(capsys: Capture, arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(capsys, *arguments)


def test_the_device_table(capsys: Capture) -> None:
    devices = document(capsys, "--devices")["devices"]
    assert [row["device"] for row in devices][:2] == ["h100", "h200"]
    assert devices[1]["memory [B]"] == 141 * 10**9


def test_checking_a_log(capsys: Capture, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Available KV cache memory: 47.17 GiB\nGPU KV cache size: 56,908,288 tokens\n")
    told = document(capsys, "--check", str(log))["check"]
    assert [row["figure"] for row in told] == ["tokens", "memory [B]", "bytes a token [B]"]
    assert told[2]["this plan"] == 890
    # No sharing between layers: 10,324 bytes a token. The answer is no, and so is the exit code.
    log.write_text(
        f"Available KV cache memory: 47.17 GiB\nGPU KV cache size: {int(47.17 * 2**30) // 10_324:,} tokens\n"
        "Maximum concurrency for 131,072 tokens per request: 37.4x\n# GPU blocks: 76654, # CPU blocks: 0\n"
    )
    assert main(["plan", "capacity", "--check", str(log)]) == 1
    text = capsys.readouterr().out
    assert "does not agree with the plan: a known mistake 'every layer counted as storing its own global KV'" in text
    assert "concurrency" in text
    log.write_bytes(b"\xff\xfe nothing here\n")
    assert "no line that is known" in refusal(capsys, "--check", str(log))
