"""Random checkpoints: the release's layout, realistic values, equal bytes for equal seeds, all or nothing on disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rorqual.checkpoint import random as random_module
from rorqual.checkpoint.index import read_index
from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.random import write_random
from rorqual.config import ModelConfig, WeightFormats, presets
from rorqual.errors import CheckpointError, ConfigError, InputError
from rorqual.inventory.names import expected_tensors


def bytes_of(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[name] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def test_another_reader_finds_the_expected_tensors(tiny_folder, tiny_config):
    expected = expected_tensors(tiny_config)
    with safe_open(tiny_folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(expected)
        for name, spec in expected.items():
            part = file.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (spec.dtypes[0], spec.shape), name


def test_tensors_are_aligned_so_that_none_is_copied_on_reading(tiny_folder):
    for _, entry in read_index(tiny_folder).values():
        width = (entry.end - entry.start) // max(1, math.prod(entry.shape))
        assert entry.start % width == 0


def test_both_config_files_say_what_was_written(tiny_folder, tiny_config):
    for name in ("config.json", "inference_config.json"):
        assert ModelConfig.from_json(tiny_folder / name).fingerprint() == tiny_config.fingerprint()
    assert sorted(path.name for path in tiny_folder.iterdir()) == [
        "config.json",
        "inference_config.json",
        "model.safetensors",
    ]


def test_a_seed_fixes_every_byte_whatever_the_shards(tiny_folder, tiny_config, tmp_path):
    write_random(tiny_config, tmp_path / "sharded", seed=1, shard_bytes=300_000)
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert bytes_of(tmp_path / "sharded") == bytes_of(tiny_folder)
    Checkpoint.open(tmp_path / "sharded", tiny_config)
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, bytes_of(tiny_folder).values()))


def test_another_seed_changes_every_weight(tiny_folder, tiny_config, tmp_path):
    write_random(tiny_config, tmp_path / "other", seed=2)
    ours, other = bytes_of(tiny_folder), bytes_of(tmp_path / "other")
    assert all(ours[name] != other[name] for name in ours if not name.endswith(".scale"))


def test_blocks_change_no_shape_and_leave_no_gap(tiny_config, tmp_path, monkeypatch):
    """Many blocks a tensor, ragged last ones included: every row is written, each tile under its own scale."""
    monkeypatch.setattr(random_module, "BLOCK_VALUES", 2048)
    monkeypatch.setattr(random_module, "_SERIAL_VALUES", 1024)
    write_random(tiny_config, tmp_path / "blocks")
    checkpoint = Checkpoint.open(tmp_path / "blocks", tiny_config)
    scope = checkpoint.scope()
    for name in ("layers.0.attn.wq_b", "layers.0.attn.wo_a", "layers.0.ffn.experts.0.w1", "layers.1.engram.wkv"):
        values = scope.weight(name).expand()
        std = values.std().item() * math.sqrt(values.shape[1])
        assert 0.3 < std < 2.5
        assert (values.std(dim=1) > 0.2 * values.std()).all(), name


def test_values_are_of_the_size_that_keeps_activations_realistic(tiny_folder, tiny_config):
    scope = Checkpoint.open(tiny_folder, tiny_config).scope()
    d = tiny_config.hidden_size
    assert scope.param("norm.weight").mean() == pytest.approx(1, abs=0.1)
    assert scope.param("embed.weight").std() == pytest.approx(1, abs=0.05)
    assert scope.param("head.weight").std() * math.sqrt(d) == pytest.approx(2, abs=0.1)
    assert scope.weight("layers.0.attn.wq_a").expand().std() * math.sqrt(d) == pytest.approx(1, abs=0.1)
    depth = tiny_config.num_hidden_layers
    w2 = scope.weight("layers.0.ffn.experts.0.w2").expand()
    assert w2.std() * math.sqrt(w2.shape[1]) * math.sqrt(depth) == pytest.approx(1, abs=0.15)
    assert scope.param("layers.0.ffn.gate.bias").abs().max() < 0.3
    rows = scope.table("layers.1.engram.embed").rows(torch.arange(100))
    assert rows.std() == pytest.approx(1, abs=0.1)


def test_hyper_connection_mixes_are_not_degenerate(tiny_folder, tiny_config):
    scope = Checkpoint.open(tiny_folder, tiny_config).scope("layers.0")
    n = tiny_config.hc_mult
    base = scope.param("hc_attn_base")
    mean_comb = base[2 * n :].view(n, n).softmax(dim=1)
    assert 0.4 < mean_comb.diagonal().mean() < 0.9  # copies stay apart, and still mix
    assert ((base[:n].sigmoid() > 0.1) & (base[:n].sigmoid() < 0.9)).all()
    x = torch.randn(n * tiny_config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert 0.3 < (scope.param("hc_attn_fn") @ x).std() < 2  # the mix depends on the token


def test_plain(tiny_config, tmp_path):
    written = write_random(tiny_config, tmp_path / "plain", weights="plain")
    assert written.weights == WeightFormats(dense="bf16", experts="bf16", engram="bf16")
    assert {entry.dtype for _, entry in read_index(tmp_path / "plain").values()} == {"BF16", "F32"}
    Checkpoint.open(tmp_path / "plain", ModelConfig.from_json(tmp_path / "plain"))
    assert write_random(written, tmp_path / "native", weights="native") == tiny_config


def test_layers_and_experts(tmp_path):
    release = presets.load("v4.1-flash")
    config = release.replace(
        vocab_size=600,
        image_token_id=599,
        dspark_noise_token_id=598,
        hidden_size=64,
        moe_intermediate_size=32,
        num_attention_heads=8,
        head_dim=64,
        q_lora_rank=32,
        o_lora_rank=32,
        index_n_heads=4,
        engram_num_embeddings=(500, 600),
        engram_compressed_vocab_size=600,
    ).without("vision")
    cut = [0, 1, 2, 3, 20, 21, 24]
    written = write_random(config, tmp_path / "cut", layers=cut, experts=5)
    assert written.num_hidden_layers == 7 and written.kv_source_layer_ids == (2, 4)
    assert (written.n_routed_experts, written.num_experts_per_tok) == (5, 5)
    assert (written.dspark_n_routed_experts, written.dspark_num_experts_per_tok) == (5, 3)
    Checkpoint.open(tmp_path / "cut", ModelConfig.from_json(tmp_path / "cut"))
    assert write_random(config.without("drafts"), tmp_path / "two", layers=2, experts=4).num_hidden_layers == 2


def test_progress_reaches_the_total(tiny_config, tmp_path):
    calls = []
    write_random(tiny_config, tmp_path / "x", progress=lambda done, total: calls.append((done, total)))
    total = sum(spec.nbytes for spec in expected_tensors(tiny_config).values())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_the_release_is_refused_with_its_size(tmp_path):
    with pytest.raises(CheckpointError, match=r"510\.3 GB \(largest: layers\.14\.engram\.embed\.weight, 98\.3 GB\)"):
        write_random(presets.load("v4.1-flash"), tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_a_full_disk_is_foreseen(tiny_config, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(random_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="the disk has"):
        write_random(tiny_config, tmp_path / "new" / "deeper")
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_in_it_is_refused(tiny_config, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty \(it holds notes\.txt\)"):
        write_random(tiny_config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(CheckpointError, match="cannot be made"):
        write_random(tiny_config, tmp_path / "notes.txt")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("bug")])
def test_nothing_is_left_after_an_error(tiny_config, tmp_path, error):
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="No space left" if isinstance(error, OSError) else None):
        write_random(tiny_config, tmp_path / "new", progress=fail)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(expected):
        write_random(tiny_config, tmp_path / "empty", progress=fail)
    assert os.listdir(tmp_path / "empty") == []


def test_what_a_killed_process_left_is_cleared(tiny_config, tmp_path):
    leftover = tmp_path / "out" / ".unfinished"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    write_random(tiny_config, tmp_path / "out")
    Checkpoint.open(tmp_path / "out", tiny_config)
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weights": "fp8"}, InputError, "weights is 'fp8'; legal: native, plain"),
        ({"shard_bytes": 0}, InputError, "shard_bytes is 0; legal: 1 or more"),
        ({"experts": -1}, InputError, "experts is -1; legal: 0 or more"),
        ({"layers": [99]}, ConfigError, "layer_ids"),
        ({"layers": 0}, ConfigError, "layer_ids"),
        ({"tokenizer": "nowhere.json"}, InputError, r"nowhere\.json: no such tokenizer"),
    ],
)
def test_arguments_are_refused_by_name(tiny_config, tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        write_random(tiny_config, tmp_path / "x", **arguments)
    assert not (tmp_path / "x").exists()
