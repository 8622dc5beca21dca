"""What the shipped model's user waits for. No time is judged here, only that it is taken of the right thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rorqual.bench import first_token as bench
from rorqual.bench import model
from rorqual.checkpoint.shipped import FOLDER, shipped_model
from rorqual.cli.bench import show


def test_the_first_token_of_a_process() -> None:
    assert 0.1 < bench.first_token(FOLDER, "fp32", RORQUAL_UNUSED="1") < 300
    with pytest.raises(RuntimeError, match=r"ended with 2: .*no-such-folder is not a folder"):
        bench.first_token(Path("no-such-folder"), "fp32")


@pytest.mark.full
def test_a_cold_cache_is_an_empty_folder(tmp_path: Path) -> None:
    assert 0.1 < bench.first_token(FOLDER, "fp32", NUMBA_CACHE_DIR=str(tmp_path)) < 600
    assert list(tmp_path.iterdir()), "the kernels went elsewhere"


def test_the_rate_is_that_of_a_generation() -> None:
    row: Any = bench.rate_row(FOLDER, "native", repeats=2, tokens=3)
    assert row["shape"].startswith("3 new tokens after ") and row["bar"] is None
    assert row["tokens_per_s"]["runs"] == 2 and row["tokens_per_s"]["min"] > 0


def test_rows_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    caches: list[str | None] = []

    def first_token(folder: Path, numerics: str, **variables: str) -> float:
        cache = variables.get("NUMBA_CACHE_DIR")
        assert cache is None or not list(Path(cache).iterdir()), "a cold cache holds nothing"
        caches.append(cache)
        return 3.0 if cache is None else 11.0

    rates = {"name": "generate", "shape": "s", "tokens_per_s": {"median": 160.0}, "bar": {"at_least": 150}}
    monkeypatch.setattr(bench, "first_token", first_token)
    monkeypatch.setattr(
        bench, "rate_row", lambda folder, numerics, *rest: {**rates, "bar": bench.RATE_BAR.as_json(160)}
    )
    steps: list[int] = []
    rows: list[Any] = bench.shipped_rows(FOLDER, 2, False, lambda: steps.append(1))
    assert len(steps) == bench.STEPS == len(rows)
    assert caches[:6] == [None] * 6 and len(set(caches[6:])) == 2 and None not in caches[6:]
    assert [row["bar"] for row in rows[2:]] == [
        {"at_most": 4, "reached": True},
        None,
        {"at_most": 10, "reached": False},
    ]
    show({"rows": rows, "command": "c", "machine": {}, "roofline": {}, "notes": []})
    out = capsys.readouterr().out
    for said in (
        "first token: 3 s <= 4: reached",
        "first token: 11 s <= 10: MISSED",
        "tokens a second: 160 >= 150: reached",
    ):
        assert said in out


def test_only_the_shipped_model_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(model, "_parts", lambda *given: [])

    def shipped_rows(folder: Path, *rest: object) -> list[Any]:
        asked.append(folder)
        return []

    monkeypatch.setattr(bench, "shipped_rows", shipped_rows)
    model.run_model(random="tiny", quick=True)
    model.run_model(model=FOLDER, quick=True)
    assert not asked
    model.run_model(quick=True)
    assert asked == [shipped_model()]
