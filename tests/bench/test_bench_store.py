"""`rorqual bench store`: the store and bare files on the same pages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from figures import numbers

from rorqual.bench import store
from rorqual.bench.report import TimeRow
from rorqual.cli import main
from rorqual.cli.bench import show


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "store.json"
    assert main(["bench", "store", "--quick", "--repeats", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert document["command"] == "rorqual bench store --repeats 2 --quick" and document["quick"] is True
    put, get, size = document["rows"]
    assert all(math.isfinite(number) for number in numbers(document["rows"]))
    for row in (put, get):
        assert row["ratio_of"] == "raw_s / store_s" and row["raw_s"]["runs"] == row["store_s"]["runs"] == 2
        assert row["ratio"] == pytest.approx(row["store_bytes_a_second"] / row["raw_bytes_a_second"])
        assert "bar" not in row and row["shape"] == "64 pages of 113,920 bytes" and row["shape"] in shown
    assert size["bytes_a_token"] == pytest.approx(890 * size["size"]) and size["used_bytes"] > 64 * 113_920
    assert str(tmp_path) not in json.dumps(document)


def test_bars_are_the_releases(capsys: pytest.CaptureFixture[str]) -> None:
    assert (store.RATE_BAR.at_least, store.SIZE_BAR.at_most, store.FULL.pages) == (0.6, 1.02, 512)
    rows = store.run_store(repeats=1, quick=True)
    put, get, size = rows
    assert isinstance(put, TimeRow) and isinstance(get, TimeRow) and isinstance(size, dict)
    assert put.bar == get.bar == store.RATE_BAR and put.ratio_of == ("raw", "store")
    document = {"command": "", "rows": [size], "machine": {}, "roofline": {}, "notes": []}
    show(document)
    assert "size over that of the pages" in capsys.readouterr().out
