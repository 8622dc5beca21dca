"""`rorqual plan ledger`: the bare verb, its options, JSON, CSV, refusals, and no torch."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main
from rorqual.config import presets

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "ledger", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_bare_plan_is_the_ledger_of_the_release(capsys: Capture) -> None:
    assert main(["plan"]) == 0
    bare = capsys.readouterr().out
    assert main(["plan", "ledger", "v4.1-flash"]) == 0
    assert capsys.readouterr().out == bare
    for text in ("512 / 2 + 512 / 16", "720 + 170", "2.58 MiB", "3,037.5", "892.92 MB", "10,324"):
        assert text in bare


def test_json(capsys: Capture) -> None:
    told = document(capsys)
    assert len(told["layers"]) == 43
    assert told["token"][-1] == {"by": "sum", "part": "global KV", "formula": "720 + 170", "bytes [B/token]": 890}
    assert [row["bytes [B]"] for row in told["entries"]] == [288, 68, 356, 528]
    assert told["sequence"][-1]["allocated [B]"] == 3_085_504
    assert told["contexts"][3]["global KV [B]"] == 890_000_000
    assert told["crossing"][0]["context [tokens]"] == pytest.approx(2_703_360 / 890)


def test_contexts_pages_and_drafts(capsys: Capture) -> None:
    told = document(capsys, "--context", "4096", "--context", "1M", "--page-tokens", "1024", "--draft-rows", "0")
    assert [row["context [tokens]"] for row in told["contexts"]] == [4096, 10**6]
    # 10^6 tokens in pages of 1,024: the last one is not full.
    assert told["contexts"][1]["global KV in pages [B]"] == 977 * 1024 * 890
    assert [row["state"] for row in told["sequence"]] == ["windows", "tails", "Engram history", "sum"]
    assert told["sequence"][-1]["allocated [B]"] == told["sequence"][-1]["logical [B]"] == 2_703_360 + 12_288 + 24


def test_csv(capsys: Capture) -> None:
    assert main(["plan", "ledger", "tiny", "--csv"]) == 0
    tables = [list(csv.DictReader(io.StringIO(part))) for part in capsys.readouterr().out.split("\n\n")]
    assert [len(table) for table in tables] == [9, 4, 5, 5, 1, 2, 5, 4]
    assert sum(float(row["increment [B/token]"]) for row in tables[0]) == 79.5


def test_a_config_file(capsys: Capture, tmp_path: Path) -> None:
    config = presets.load("demo").without("compression", "engram", "drafts")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_hf_dict()), encoding="utf-8")
    told = document(capsys, str(path))
    assert "crossing" not in told and "wrong_answers" not in told
    assert told["sequence"] == document(capsys, str(tmp_path))["sequence"]
    assert main(["plan", "ledger", str(path)]) == 0
    assert "does not grow" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["v4-flash"], "'v4-flash' is neither a folder, a config file, nor a preset"),
        (["--context", "1.5M"], "--context must be a number of tokens such as 4096, 128Ki or 1M; got '1.5M'"),
        (["--page-tokens", "12"], "page_tokens must be a multiple of 8"),
        (["--draft-rows", "-1"], "draft_rows must be an integer in 0..4096; got -1"),
        (["--json", "--csv"], "--json and --csv exclude each other"),
    ],
)
def test_refusals(arguments: list[str], complaint: str, capsys: Capture) -> None:
    assert main(["plan", "ledger", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert complaint in error and error.count("\n") == 1


@pytest.mark.parametrize("verb", ["ledger", "numbers"])
def test_no_torch(verb: str) -> None:
    script = (
        f"import sys; from rorqual.cli import main; main(['plan', '{verb}', '--json']); "
        "print(sorted({'torch', 'numpy', 'numba'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"
