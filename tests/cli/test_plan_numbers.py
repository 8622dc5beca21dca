"""`rorqual plan numbers`: all figures, some figures, and what is said to an id that is none."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main
from rorqual.config import presets
from rorqual.planner.numbers import IDS, numbers

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "numbers", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_json_is_every_figure_by_id(capsys: Capture) -> None:
    told = document(capsys)
    assert tuple(told) == IDS
    assert told["index_read_bytes_1mi"] == {
        "value": 182_714_368,
        "shown": "182,714,368",
        "unit": "B/token",
        "formula": told["index_read_bytes_1mi"]["formula"],
        "expression": "68 x (3 x 524,288 + 1,048,576 + 4 x 16,384)",
        "provenance": "derived",
    }


def test_some_figures_with_and_without_a_model(capsys: Capture) -> None:
    chosen = ["spec_accepted", "candidate_pool"]
    assert list(document(capsys, "v4.1-flash", *chosen)) == chosen
    assert document(capsys, "global_token_bytes")["global_token_bytes"]["value"] == 890
    assert document(capsys, "tiny", "global_token_bytes")["global_token_bytes"]["value"] == 79.5
    assert tuple(document(capsys, "demo")) == tuple(numbers(presets.load("demo")))


def test_text_shows_notes_of_what_was_asked(capsys: Capture) -> None:
    assert main(["plan", "numbers", "spec_tokens_per_step"]) == 0
    text = capsys.readouterr().out
    assert "3.69" in text and "(1 - 0.8^6) / 0.2" in text and "4.69 the output" in text
    assert main(["plan", "numbers"]) == 0
    everything = capsys.readouterr().out
    assert all(id in everything for id in IDS) and "4.69" not in everything


def test_csv_has_the_unrounded_values(capsys: Capture) -> None:
    assert main(["plan", "numbers", "v4_saving", "refresh_content_address_query", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["shown"] == "3.95" and float(rows[0]["value"]) == pytest.approx(3514.25 / 890, abs=1e-12)
    assert rows[1]["value"] == "4 : 8 : 40"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["v4.1-flash", "global_token_byte"], "no figure 'global_token_byte'; near it are global_token_bytes"),
        (["golbal_token_bytes"], "no figure 'golbal_token_bytes'; near it are global_token_bytes"),
        (["demo", "swa_loose_40"], "'swa_loose_40' is not a figure of demo: its config lacks what it counts"),
        (["tiny", "vision"], "near it are vision_"),
        (["tiny", "§"], "shows all 55"),
        (["demmo"], "'demmo' is neither a folder, a config file, nor a preset"),
        (["--json", "--csv"], "exclude each other"),
    ],
)
def test_refusals(arguments: list[str], complaint: str, capsys: Capture) -> None:
    assert main(["plan", "numbers", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert complaint in error and error.count("\n") == 1


def test_a_file_of_a_figures_name_is_a_model(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "candidate_pool").mkdir()
    config = presets.load("tiny").to_hf_dict()
    (tmp_path / "candidate_pool" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert document(capsys, "candidate_pool")["candidate_pool"]["value"] == 12
