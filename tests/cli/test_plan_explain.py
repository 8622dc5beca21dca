"""`rorqual plan explain`: the overview, one technique, the chart, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main
from rorqual.config import presets
from rorqual.planner.explain import NAMES

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "explain", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_overview(capsys: Capture) -> None:
    assert main(["plan", "explain"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    for bytes_ in ("5,242,880", "40,960", "4,096", "2,560", "720", "890"):
        assert bytes_ in printed
    assert "content : address : query = 4 : 8 : 40" in printed
    assert "do not add up" in printed


def test_overview_as_json(capsys: Capture) -> None:
    told = document(capsys)
    assert list(told) == ["model", "techniques", "waterfall", "chain"]
    assert list(told["techniques"]) == list(NAMES)
    assert [row["after [B a token]"] for row in told["waterfall"]] == [5_242_880, 40_960, 4_096, 2_560, 720, 890]
    assert {row["symbol"]: row["value"] for row in told["chain"]}["crossing"] == 2_703_360 / 890
    saves = told["techniques"]["cross-layer-sharing"]["saves"]["cross_layer_token"]
    assert (saves["value"], saves["unit"]) == (9_434, "B a token")
    assert saves["expression"] == "15 x 356/2 + 19 x 356/1"


def test_one_technique(capsys: Capture) -> None:
    assert main(["plan", "explain", "HSI"]) == 0
    printed = capsys.readouterr().out
    assert "which factor it moves" in printed
    assert "33,822,867,456" in printed
    told = document(capsys, "hsi", "--model", "demo")
    assert (told["technique"], told["status"], told["factor"]) == ("hsi", "on", "work")
    assert told["saves"]["hsi_bytes"]["value"] == (4_096 - 256) * 17
    assert set(told["pays"]) == {"approximation", "expressiveness", "training"}


def test_a_technique_that_is_off(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(presets.load("v4.1-flash").without("engram").to_hf_dict()))
    assert main(["plan", "explain", "engram", "--model", str(path)]) == 0
    assert "nothing: off in this config" in capsys.readouterr().out
    told = document(capsys, "engram", "--model", str(path))
    assert (told["status"], told["saves"]) == ("off in this config", {})


def test_csv(capsys: Capture) -> None:
    assert main(["plan", "explain", "--csv"]) == 0
    first, second, third = capsys.readouterr().out.split("\n\n")
    assert [row[0] for row in csv.reader(io.StringIO(first))] == ["technique", *NAMES]
    assert next(csv.reader(io.StringIO(second)))[0] == "step"
    assert next(csv.reader(io.StringIO(third)))[0] == "symbol"


def test_chart(capsys: Capture, tmp_path: Path) -> None:
    chart = tmp_path / "waterfall.svg"
    assert main(["plan", "explain", "--chart", str(chart), "--csv"]) == 0
    assert "main KV in FP4 with scales" in chart.read_text(encoding="utf-8")
    assert capsys.readouterr().out.startswith("technique,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny",), "'tiny' is a model, not a technique; give it as --model tiny"),
        (("nsa",), "technique must be one of shared-latent, swa"),
        (("--json", "--csv"), "--json and --csv exclude each other"),
        (("--chart", "w.pdf"), "--chart must end in .png or .svg; got w.pdf"),
        (("--chart", "nowhere/w.svg"), "--chart must be in a folder that exists; nowhere does not"),
        (("ced", "--chart", "w.svg"), "--chart draws the waterfall of the overview; leave the technique out"),
        (("--model", "llama"), "'llama' is neither a folder, a config file, nor a preset"),
    ],
)
def test_what_is_refused(capsys: Capture, arguments: tuple[str, ...], message: str) -> None:
    assert main(["plan", "explain", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert not told.out
