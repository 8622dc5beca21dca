"""`rorqual inspect` tells the truth about the release's config, from any spelling of it, and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main
from rorqual.cli.output import bytes_text, cell_text, count_text, print_json
from rorqual.config import presets
from rorqual.layout import KVLayout

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["inspect", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_layers_of_the_release(capsys: Capture) -> None:
    layers = document(capsys, "v4.1-flash")["layers"]
    assert [layer["layer"] for layer in layers] == list(range(43))
    by_part = {
        part: [row["layer"] for row in layers if row["part"] == part] for part in ("encoder", "decoder", "draft")
    }
    assert by_part == {
        "encoder": list(range(20)),
        "decoder": list(range(20, 40)),
        "draft": [40, 41, 42],
    }
    modes = {mode: [row["layer"] for row in layers if row["mode"] == mode] for mode in ("swa", "full", "reindex")}
    assert modes == {"swa": [0, 1, 40, 41, 42], "full": [2, 8, 14, 20], "reindex": [24, 28, 32, 36]}
    stored = {row["layer"]: row["bytes_per_token"] for row in layers if row["bytes_per_token"]}
    assert stored == {2: 178, 8: 178, 14: 178, 20: 356}
    assert {row["layer"]: row["engram"] for row in layers if row["engram"] is not None} == {1: 0, 14: 1}
    candidates = {row["layer"]: row["candidates"] for row in layers if row["candidates"]}
    assert candidates == {20: "source", 24: "user", 28: "user", 32: "user", 36: "user"}
    reuse = layers[26]
    assert (reuse["kv_source"], reuse["index_source"], reuse["ratio"]) == (20, 24, 1)


def test_sums_of_the_release(capsys: Capture) -> None:
    told = document(capsys, "v4.1-flash")
    assert told["fingerprint"] == presets.load("v4.1-flash").fingerprint()
    assert told["checkpoint"] == {"tensors": 96_085, "tensor_bytes": 510_286_023_000}
    parameters = told["parameters"]
    sums = ("total", "backbone", "active_decode", "active_prefill", "active_head")
    assert parameters["total"] == sum(count for name, count in parameters.items() if name not in sums)
    assert parameters["experts"] == 40 * 384 * 3 * 5120 * 2304
    assert parameters["engram_tables"] == (384_006_168 + 384_016_682) * 256
    cache = told["cache"]
    assert cache["bytes_per_token"] == 890
    assert (cache["page_tokens"], cache["page_bytes"]) == (128, 113_920)
    assert (cache["window_bytes_logical"], cache["window_bytes_allocated"]) == (2_703_360, 2_808_960)
    assert (cache["tail_bytes_logical"], cache["tail_bytes_allocated"]) == (12_288, 73_728)
    assert cache["draft_window_bytes"] == 202_752


@pytest.mark.parametrize("name", presets.NAMES)
def test_every_preset_and_layout_agree(name: str, capsys: Capture) -> None:
    config = presets.load(name)
    layout = KVLayout(config)
    told = document(capsys, name)
    assert sum(row["bytes_per_token"] for row in told["layers"]) == told["cache"]["bytes_per_token"]
    assert told["cache"]["bytes_per_token"] * layout.page_tokens == layout.page_bytes
    assert told["cache"]["sequence_bytes_allocated"] == layout.sequence_bytes_allocated


def test_folder_either_file_and_preset_are_one_config(capsys: Capture, goldens: Path, tmp_path: Path) -> None:
    case = goldens / "fp32-dspark"
    fingerprints = set()
    for file in ("config.json", "inference_config.json"):
        alone = tmp_path / file.removesuffix(".json")
        alone.mkdir()
        shutil.copy(case / file, alone)
        fingerprints.add(document(capsys, str(alone))["fingerprint"])
        fingerprints.add(document(capsys, str(case / file))["fingerprint"])
    fingerprints.add(document(capsys, str(case))["fingerprint"])
    assert len(fingerprints) == 1


def test_page_tokens_change_the_page_and_nothing_else(capsys: Capture) -> None:
    default, small = document(capsys, "tiny"), document(capsys, "tiny", "--page-tokens", "16")
    assert small["cache"].pop("page_tokens") == 16
    assert default["cache"].pop("page_tokens") == 128
    assert small["cache"].pop("page_bytes") * 8 == default["cache"].pop("page_bytes")
    assert small == default


def test_table_shows_what_the_document_says(capsys: Capture) -> None:
    assert main(["inspect", "v4.1-flash"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["20"] == ["decoder", "full", "1", "20", "20", "source", "-", "356"]
    assert rows["42"] == ["draft", "swa", "0", "-", "-", "-", "-", "0"]
    for fact in ("113,920", "2,703,360", "2,808,960", "510,286,023,000", "510.3 GB", "763.2 billion"):
        assert fact in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no-such-preset"], ["no-such-preset", *presets.NAMES]),
        (["/nowhere/config.json"], ["/nowhere/config.json"]),
        (["{tmp}"], ["config.json"]),
        (["{tmp}/torn.json"], ["torn.json"]),
        (["tiny", "--page-tokens", "3"], ["page_tokens", "3"]),
        (["tiny", "--page-tokens", "0"], ["page_tokens", "0"]),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: list[str], capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"model_type": "deepseek_v41", ', encoding="utf-8")
    assert main(["inspect", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("rorqual: ")
    assert streams.err.count("\n") == 1
    for part in named:
        assert part in streams.err


def test_other_model_type_is_refused(capsys: Capture, goldens: Path, tmp_path: Path) -> None:
    config = json.loads((goldens / "fp32-text" / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "deepseek_v4"
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["inspect", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "deepseek_v41" in message
    assert "deepseek_v4" in message.replace("deepseek_v41", "")


@pytest.mark.parametrize(
    ("count", "as_bytes", "as_count"),
    [
        (0, "0 B", "0"),
        (999, "999 B", "999"),
        (1000, "1.0 KB", "1.0 thousand"),
        (2_703_360, "2.7 MB", "2.7 million"),
        (510_286_023_000, "510.3 GB", "510.3 billion"),
        (10**19, "10000.0 PB", "10000000.0 trillion"),
    ],
)
def test_numbers_in_words(count: int, as_bytes: str, as_count: str) -> None:
    assert bytes_text(count) == as_bytes
    assert count_text(count) == as_count


def test_cells() -> None:
    cells = (None, True, False, 1234567, -5, 0.123456, "word")
    assert [cell_text(cell) for cell in cells] == ["-", "yes", "no", "1,234,567", "-5", "0.1235", "word"]
    assert cell_text(3514.25) == "3,514.25"


def test_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="JSON"):
        print_json({"rate": float("nan")})
