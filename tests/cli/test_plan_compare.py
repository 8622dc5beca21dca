"""`rorqual plan compare` prints what `compare` returns, from names, files and folders."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main

Capture = pytest.CaptureFixture[str]
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "compare", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_default_models(capsys: Capture) -> None:
    told = document(capsys)
    assert list(told) == ["compare", "ratios", "totals", "groups", "storages"]
    sizes = {row["model"]: row["native [B a token]"] for row in told["compare"]}
    assert sizes == {
        "v4.1-flash": 890,
        "deepseek-v4-flash": 3514.25,
        "deepseek-v3.2": 48_068,
        "deepseek-v3": 70_272,
        "deepseek-llm-67b": 389_120,
    }


def test_names_files_and_folders(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    # 2 layers x 2 x 4 heads x 64 x 2 B = 2,048 B a token.
    told = document(capsys, str(folder), str(folder / "config.json"), "tiny", "--context", "1Ki", "--context", "5")
    assert [row["model"] for row in told["compare"]] == ["mine", "mine", "tiny"]
    totals = [(row["context [tokens]"], row["native [B]"]) for row in told["totals"] if row["model"] == "mine"]
    assert totals == [(1024, 1024 * 2048)] * 2 + [(5, 5 * 2048)] * 2
    assert told["ratios"][1]["native / first [1]"] == 1


def test_csv_holds_the_same_rows(capsys: Capture) -> None:
    told = document(capsys, "tiny", "mid", "--context", "100")
    assert main(["plan", "compare", "tiny", "mid", "--context", "100", "--csv"]) == 0
    parts = [list(csv.reader(part.splitlines())) for part in capsys.readouterr().out.split("\n\n")]
    assert [part[0] for part in parts] == [list(table[0]) for table in told.values()]
    assert [len(part) - 1 for part in parts] == [len(table) for table in told.values()]
    assert parts[0][1][:4] == ["tiny", "CSA2", "packed", "79.5"]


def test_tables_for_people(capsys: Capture) -> None:
    assert main(["plan", "compare", "v4.1-flash", "llama-3.1-70b", "--context", "128Ki"]) == 0
    text = capsys.readouterr().out
    for fact in ("327,680", "119,357,440", "42,949,672,960", "80 layers x 2 x 8 KV heads x 128 x 2 B a token"):
        assert fact in text
    assert "model card meta-llama/Meta-Llama-3.1-70B" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no-such-model"], ["no-such-model", "deepseek-v3.2", "v4.1-flash"]),
        (["{tmp}"], ["config.json"]),
        (["{tmp}/mamba.json"], ["model_type", "'mamba'", "mamba.json"]),
        (["{tmp}/odd.json"], ["kv_lora_rank", "llama", "odd.json"]),
        (["tiny", "--context", "many"], ["--context", "many"]),
        (["tiny", "--context", "0"], ["contexts", "0"]),
        (["tiny", "--context", "1M"], ["max_position_embeddings", "1,000,000"]),
        (["tiny", "--json", "--csv"], ["--json", "--csv"]),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: list[str], capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "mamba.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    (tmp_path / "odd.json").write_text(json.dumps({**LLAMA, "kv_lora_rank": 8}), encoding="utf-8")
    assert main(["plan", "compare", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("rorqual: ")
    assert streams.err.count("\n") == 1
    for part in named:
        assert part in streams.err


def test_no_torch_and_no_numpy() -> None:
    code = (
        "import sys; from rorqual.cli import main; code = main(['plan', 'compare', '--json']);"
        "sys.exit(code or 3 * bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 0
