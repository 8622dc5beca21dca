"""`rorqual bench transfer`: Mooncake on loopback and copies of the same bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from figures import numbers
from mooncake_here import needs_mooncake

from rorqual.cli import main


@needs_mooncake
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "transfer.json"
    assert main(["bench", "transfer", "--quick", "--repeats", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert document["command"] == "rorqual bench transfer --repeats 2 --quick" and document["quick"] is True
    assert [row["name"] for row in document["rows"]] == ["pull", "put", "get"]
    assert all(math.isfinite(number) for number in numbers(document["rows"]))
    for row in document["rows"]:
        assert row["ratio_of"] == "copy_s / mooncake_s" and row["copy_s"]["runs"] == row["mooncake_s"]["runs"] == 2
        assert row["ratio"] == pytest.approx(row["mooncake_bytes_a_second"] / row["copy_bytes_a_second"])
        assert "bar" not in row and row["shape"] in shown
