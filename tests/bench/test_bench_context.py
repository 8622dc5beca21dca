"""The benchmark of long contexts: what its forty layers are, and the documents of quick runs. No time is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.bench import context, workspace
from rorqual.bench.clocked import Clock, Given
from rorqual.bench.context import tiny_pair
from rorqual.bench.stack import RELEASE, composition, decode_work, stacked, stacked_model
from rorqual.checkpoint.random import write_random
from rorqual.cli import bench, main
from rorqual.config import presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.layout import KVLayout
from rorqual.ops.dispatch import reference_ops

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "pair"
    write_random(tiny_pair(), folder, seed=3)
    return folder


def test_the_layers_and_the_cache_are_the_releases() -> None:
    release, config = presets.load(RELEASE), stacked(presets.load("real-pair"))
    assert config.roles == tuple(
        role.__class__(**{name: getattr(role, name) for name in role.__slots__} | {"engram_index": None})
        for role in release.roles[: release.num_hidden_layers]
    )
    same = ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_lora_rank", "sliding_window")
    same += ("moe_intermediate_size", "num_experts_per_tok", "hc_mult", "max_position_embeddings", "rope_scaling")
    same += ("index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size", "cache")
    for name in same:
        assert getattr(config, name) == getattr(release, name), name
    assert KVLayout(config).bytes_per_token == 890
    assert round(KVLayout(config).global_bytes_allocated(1 << 20) / 2**30, 2) == 0.87


def test_the_composition_counts_the_releases_roles() -> None:
    said = composition(stacked(presets.load("real-pair")))
    assert said.startswith("2 SWA + 3 Full (ratio 2) + 15 Reuse (ratio 2) + 1 Full (ratio 1, candidate source) + ")
    assert "4 Reindex (ratio 1, from the pool)" in said and "= 40 layers" in said and said.endswith("each read 20 x")


def test_the_work_of_a_token_is_every_scan_and_selection() -> None:
    config = stacked(presets.load("real-pair"))
    short, long = (decode_work(config, tokens).bytes for tokens in (4096, 1 << 20))
    scanned = {tokens: 3 * tokens // 2 + tokens + 4 * min(tokens, 16_384) for tokens in (4096, 1 << 20)}
    assert long - short == 68 * (scanned[1 << 20] - scanned[4096])


def test_forty_layers_share_the_weights_of_two(pair: Path) -> None:
    model = stacked_model(pair, Given(reference_ops()))
    body = model.backbone
    layers = [*body.encoder, *body.decoder]
    assert len(layers) == 40 and len(body.encoder) == 20
    assert all(layer.ffn.w1[0] is layers[i % 2].ffn.w1[0] for i, layer in enumerate(layers))
    assert layers[24].attn.indexer.wq_b is layers[2].attn.indexer.wq_b
    assert layers[2].attn.compressor.wgate is layers[2].attn.compressor.wkv and layers[3].attn.compressor is None
    sequence = Sequence(model, new_cache(model, 64))
    (output,) = sequence.prefill(Prompt(ids=torch.arange(3, 40)))
    assert output.logits is not None and torch.isfinite(output.logits).all()


def test_a_clock_counts_what_an_op_takes() -> None:
    clock = Clock(reference_ops(), ("topk_lowest",))
    assert torch.equal(clock.ops.topk_lowest(torch.ones(1, 5), 2), torch.tensor([[0, 1]]))
    assert clock.seconds["topk_lowest"] > 0
    clock.reset()
    assert clock.seconds == {"topk_lowest": 0.0}


def run(out: Path, *parts: str) -> dict[str, Any]:
    chosen = [word for part in parts for word in ("--part", part)]
    assert main(["bench", "context", "--quick", "--repeats", "1", "--out", str(out), *chosen]) == 0
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert document["what"] == "context" and document["quick"] is True
    assert not any("bar" in row for row in document["rows"]), "tiny shapes are not to be judged"
    assert str(Path.cwd()) not in json.dumps(document) and "/tmp" not in json.dumps(document)
    return document


def test_decode_has_a_row_an_index_path(tmp_path: Path, capsys: Capture) -> None:
    document = run(tmp_path / "decode.json", "decode")
    assert document["command"] == "rorqual bench context --part decode --repeats 1 --quick"
    assert [row["path"] for row in document["rows"]] == ["vnni", "vector"]
    for row in document["rows"]:
        assert "40 layers" in row["composition"] and row["cache_bytes"] > row["global_bytes"] > 0
        if "unavailable" in row:
            continue
        assert row["ratio_of"] == "long_s / short_s" and math.isfinite(row["ratio"]) and row["ratio"] > 0
        assert row["roofline"]["share"] > 0 and "index keys" in row["roofline"]["formula"]
        for parts in row["ops"].values():
            scores = parts["index_scores"] + parts.get("region.index_choose", 0)
            assert 0 < scores < parts["step"] and parts["sparse_attention"] + parts.get("region.finish", 0) > 0
    assert "each read 20 x" in capsys.readouterr().out


def test_memory_and_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """In this process: its peaks mean little, but every number is there. `bench memory` has tests of a fresh one."""

    def here(module: str, folder: Path, mode: str, tokens: int, chunk: int) -> dict[str, object]:
        assert module == "rorqual.bench.workspace"
        return workspace.run(folder, mode, tokens, chunk)

    monkeypatch.setattr(context, "fresh_process", here)
    rows = run(tmp_path / "rest.json", "memory", "prefill")["rows"]
    sizes, times = rows[:-2], rows[-2:]
    assert [row["shape"].split(",")[0] for row in sizes] == [
        *(f"prefill ced of {tokens} tokens" for tokens in (64, 128, 192)),
        *(f"prefill full of {tokens} tokens" for tokens in (64, 128)),
    ]
    for row in sizes:
        parts = ("imported_bytes", "mapped_weight_bytes", "copied_weight_bytes", "cache_bytes")
        assert row["workspace_bytes"] == row["peak_rss_bytes"] - sum(row[name] for name in parts)
        assert row["cache_bytes"] > 0 and row["layer_tokens"] > 0
    assert [("workspace_growth" in row) for row in sizes] == [False, True, False, False, True]
    for row in times:
        assert row["ratio_of"] == "ced_s / full_s" and row["layer_tokens"]["ced"] < row["layer_tokens"]["full"]
    assert "workspace bytes" in capsys.readouterr().out


def test_the_parts_are_those_of_the_command() -> None:
    assert bench.PARTS["context"] == context.PARTS and set(context.REPEATS) == set(context.PARTS)


def test_full_runs_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full run's memory rows carry them: growth of either mode's medians, and the longest prompt's one workspace."""
    found = {16_384: 100, 65_536: 140, 262_144: 600_000_000}
    odd = iter([0, 50] * 4)
    monkeypatch.setattr(
        context,
        "fresh_process",
        lambda *given: {"workspace_bytes": found[given[3]] + (next(odd) if given[3] in (16_384, 65_536) else 0)},
    )
    rows: list[Any] = context.memory_rows(Path(), context.FULL, 2, lambda: None)
    assert [len(row["workspaces_of_runs_bytes"]) for row in rows] == [2, 2, 1, 2, 2]
    assert rows[0]["workspace_bytes"] == 150 and rows[0]["workspace_median_bytes"] == 125
    assert rows[1]["workspace_growth"] == 165 / 125
    bars = [row.get("bar") for row in rows]
    grown = {"at_most": 1.1, "reached": False}
    assert bars == [None, grown, {"at_most": 512e6, "reached": False}, None, grown]
    assert [bar.at_most for bar in context.CED_BARS.values()] == [0.55, 0.52]
