"""The documents of quick runs: everything a reader needs is there, and finite. No figure of time is judged."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import numbers

from rorqual.bench import kernels, plan
from rorqual.bench.cases import QUICK, Case, index_cases
from rorqual.cli import main
from rorqual.cli.bench import show
from rorqual.ops import cpu

Document = dict[str, Any]


def run(out: Path, what: str, repeats: int = 1) -> Document:
    random = [] if what in ("kernels", "plan") else ["--random", "tiny"]
    assert main(["bench", what, "--quick", "--repeats", str(repeats), "--out", str(out), *random]) == 0
    document: Document = json.loads(out.read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def kernel_run(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return run(tmp_path_factory.mktemp("bench") / "kernels.json", "kernels", repeats=2)


@pytest.fixture(scope="module")
def model_run(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return run(tmp_path_factory.mktemp("bench") / "model.json", "model")


def check_header(document: Document, what: str, repeats: int = 1) -> None:
    assert document["what"] == what and document["quick"] is True
    random = "" if what in ("kernels", "plan") else " --random tiny"
    assert document["command"] == f"rorqual bench {what} --repeats {repeats} --quick{random}"
    assert document["commit"] and document["date"].endswith("+00:00")
    assert {"cpu", "cores", "features", "path", "memory_bytes", "others_cpu_share"} <= document["machine"].keys()
    assert document["roofline"]["read_bytes_per_s"] > 0 and document["roofline"]["gemm_flops_per_s"] > 0
    assert document["notes"] and document["rows"]
    assert all(math.isfinite(number) for number in numbers(document))
    assert '"bar"' not in json.dumps(document["rows"]), "tiny shapes are not to be judged"


def check_times(row: Document, *contestants: str) -> None:
    for name in contestants:
        sample = row[f"{name}_s"]
        assert 0 < sample["min"] <= sample["median"] <= sample["max"]
    above, below = row["ratio_of"].replace("_s", "").split(" / ")
    assert row["ratio"] == row[f"{above}_s"]["median"] / row[f"{below}_s"]["median"] > 0


def test_kernels(kernel_run: Document) -> None:
    check_header(kernel_run, "kernels", repeats=2)
    rows = kernel_run["rows"]
    ops = ("quantize", "dequantize", "gather_rows", "index_scores", "topk_lowest", "sparse_attention", "linear")
    assert {row["name"] for row in rows} == {*ops, "experts"}
    assert [row["path"] for row in rows if row["name"] == "index_scores"] == list(cpu.PATHS)
    for row in rows:
        if "unavailable" in row:
            continue
        check_times(row, "plain", "fast")
        assert row["difference"] <= kernels.TOLERANCE
        assert row["roofline"]["share"] > 0 and row["roofline"]["formula"].startswith(("bytes", "flops"))
        assert row["roofline"]["bound"] in ("bytes", "flops")
        assert ("baseline_roofline" in row) == (row["name"] in ("linear", "experts"))


def test_a_path_that_this_cpu_lacks_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without_vnni(path: cpu.Path) -> tuple[str, ...]:
        return ("avx512vnni",) if path == "vnni" else ()

    monkeypatch.setattr(kernels, "missing", without_vnni)
    monkeypatch.setattr(kernels, "best_path", lambda: "plain")
    monkeypatch.setattr(kernels, "cases", lambda sizes: [vnni_and_plain_index_cases()])
    rows = {row["path"]: row for row in run(tmp_path / "kernels.json", "kernels")["rows"]}
    assert rows["vnni"]["unavailable"] == "not on this CPU: needs avx512vnni"
    assert rows["vnni"]["fast_s"] is None and rows["vnni"]["ratio"] is None
    check_times(rows["plain"], "plain", "fast")


def vnni_and_plain_index_cases() -> tuple[Case, ...]:
    group = index_cases(QUICK, torch.Generator().manual_seed(0))
    return tuple(case for case in group if case.path in ("vnni", "plain"))


def test_model(model_run: Document) -> None:
    check_header(model_run, "model")
    rows = {(row["name"], row["numerics"]): row for row in model_run["rows"]}
    twins = {(name, mode) for name in ("decode", "prefill ced", "prefill full") for mode in ("fp32", "native")}
    assert rows.keys() == twins | {("ced/full", "fp32")}
    for key in twins:
        check_times(rows[key], "plain", "fast")
        assert rows[key]["roofline"]["share"] > 0 and rows[key]["baseline_roofline"]["share"] > 0
    decode = rows["decode", "fp32"]
    assert decode["baseline_roofline"]["bytes"] == 2 * decode["roofline"]["flops"] > 2 * decode["roofline"]["bytes"]
    ced = rows["ced/full", "fp32"]
    check_times(ced, "ced", "full")
    assert ced["layer_tokens"]["ced"] < ced["layer_tokens"]["full"]


def test_memory_of_a_fresh_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path / "memory.json", "memory")
    check_header(document, "memory")
    assert [row["numerics"] for row in document["rows"]] == ["fp32", "native"]
    for row in document["rows"]:
        assert max(row["peaks_of_runs_bytes"]) == row["peak_rss_bytes"]
        assert row["peak_after_import_bytes"] <= row["peak_after_load_bytes"] <= row["peak_rss_bytes"] < 2e9
        assert row["cache_bytes"] > 0 and row["weight_bytes"] < row["fp32_weight_bytes"]
    out = capsys.readouterr().out
    assert "peak rss bytes" in out and "weight bytes" in out


def test_the_planner_in_processes_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = run(tmp_path / "plan.json", "plan")
    check_header(document, "plan")
    *starts, replay, memory = document["rows"]
    assert [row["shape"] for row in starts] == [f"rorqual plan {verb}" for verb in plan.VERBS]
    assert all(0 < row["start_s"]["min"] <= row["start_s"]["median"] for row in starts)
    assert (replay["name"], memory["name"]) == ("replay", "memory")
    assert (replay["shape"], memory["shape"]) == ("500 requests", "1,000 requests")
    for row in (replay, memory):
        assert row["trace_bytes"] > 0 and row["replay_s"]["median"] > 0 and row["cpu_s"]["median"] > 0
        # An interpreter and its imports; nothing where the system does not tell.
        assert row["peak_rss_bytes"] == 0 or 10**7 < row["peak_rss_bytes"] < 5e8
    assert "replay: 500 requests" in capsys.readouterr().out
    # With a bar it says which: time for the one, memory for the other.
    once = plan.Run(wall_s=2.0, cpu_s=1.0, peak_rss=6 * 10**8, told=1)
    judged = [plan.replay_row(name, 5, 9, once, [once]) for name in ("replay", "memory")]
    assert [row["bar"] for row in judged] == [
        {"at_most": 20, "reached": True},
        {"at_most": 500e6, "reached": False},
    ]
    show({**document, "rows": judged})
    out = capsys.readouterr().out
    assert "replay: 2 s <= 20: reached" in out and "peak: 600.0 MB <= 500.0 MB: MISSED" in out
    with pytest.raises(RuntimeError, match=r"ended with 2: .*no verb 'plan nothing'"):
        plan.plan("nothing")


def test_nothing_of_this_machine_but_its_processor(kernel_run: Document, model_run: Document) -> None:
    for document in (kernel_run, model_run):
        text = json.dumps(document)
        assert str(Path.cwd()) not in text and str(Path.home()) not in text and "/tmp" not in text
        assert json.dumps(platform.node()) not in text


def test_kept_documents_are_whole_runs_that_name_their_command() -> None:
    kept = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.json"))
    bench = (
        "context",
        "context-memory",
        "context-prefill",
        "engine",
        "engine-mid",
        "engine-mid-memory",
        "kernels",
        "memory",
        "model",
        "model-real-pair",
        "model-shipped",
        "plan",
        "store",
    )
    assert sorted(path.stem for path in kept) == list(bench)
    for path in kept:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        assert (
            document["command"].partition(" --")[0] == f"rorqual bench {path.stem.partition('-')[0]}"
            and document["quick"] is False
        )
        assert all(math.isfinite(number) for number in numbers(document))
        assert not any(folder in path.read_text(encoding="utf-8") for folder in ("/tmp", "/home", "/root", "/Users"))


def test_kept_studies_name_their_command() -> None:
    kept = sorted((Path(__file__).parents[2] / "benchmarks" / "lab").glob("*.json"))
    assert kept
    for path in kept:
        text = path.read_text(encoding="utf-8")
        assert json.loads(text)["command"].startswith(f"rorqual lab {path.stem.partition('-')[0]}")
        assert not any(folder in text for folder in ("/tmp", "/home", "/root", "/Users"))
