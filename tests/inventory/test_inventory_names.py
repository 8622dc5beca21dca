"""Names, shapes and dtypes: against the release's counts, and against the headers of every reference checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rorqual.checkpoint.header import read_header
from rorqual.config import ModelConfig, WeightFormats, presets
from rorqual.inventory.names import PARTS, TensorSpec, expected_tensors


@pytest.fixture(scope="module")
def release() -> dict[str, TensorSpec]:
    return expected_tensors(presets.load("v4.1-flash"))


def golden_cases() -> list[str]:
    goldens = Path(__file__).resolve().parents[1] / "goldens"
    return sorted(folder.name for folder in goldens.iterdir() if (folder / "model.safetensors").exists())


def test_the_release_has_96085_tensors_and_its_published_bytes(release):
    assert len(release) == 96_085
    assert sum(spec.nbytes for spec in release.values()) == 510_286_023_000


def test_the_release_by_layer(release):
    counts = Counter(int(name.split(".")[1]) for name in release if name.startswith("layers."))
    special = {1: 2340, 14: 2348, 20: 2341} | dict.fromkeys((2, 8), 2342) | dict.fromkeys((24, 28, 32, 36), 2337)
    assert counts == {layer: special.get(layer, 2334) for layer in range(40)}


def test_the_release_by_category(release):
    def category(name: str) -> str:
        if ".experts." in name:
            return "routed experts"
        if name.startswith("mtp."):
            return "mtp"
        if name.startswith(("vision.", "aligner.", "image_")):
            return "vision"
        for kind in ("engram", "shared_experts"):
            if kind in name:
                return kind
        if not name.startswith("layers."):
            return "ends"
        return "attention" if name.split(".")[2].startswith("attn") else "norms, hc, gate"

    assert Counter(map(category, release)) == {
        "routed experts": 94_464,
        "engram": 12,
        "attention": 603,
        "ends": 3,
        "shared_experts": 240,
        "vision": 266,
        "mtp": 97,
        "norms, hc, gate": 400,
    }


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("layers.7.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
        ("layers.7.attn.wq_b.scale", (1024, 40), "F8_E8M0"),
        ("layers.0.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("layers.14.engram.embed.weight", (384_016_682, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384_016_682, 8), "F8_E8M0"),
        ("layers.1.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("layers.3.hc_attn_fn", (24, 20480), "F32"),
        ("layers.3.hc_ffn_scale", (3,), "F32"),
        ("mtp.2.ffn.gate.bias_vl", (128,), "F32"),
        ("mtp.0.main_proj.weight", (5120, 15360), "F8_E4M3"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
    ],
)
def test_rows_of_the_layout(release, name, shape, dtype):
    assert release[name].shape == shape
    assert release[name].dtypes[0] == dtype


def test_what_the_release_leaves_out(release):
    assert "layers.20.attn.compressor.wkv.weight" in release
    assert "layers.20.attn.compressor.wgate.weight" not in release  # ratio 1 weighs nothing
    assert "layers.24.attn.indexer.wq_b.weight" in release
    assert "layers.24.attn.indexer.wk.weight" not in release  # reads another's index keys
    drafts = [name for name in release if name.startswith("mtp.")]
    assert [name for name in drafts if "embed." in name] == ["mtp.2.markov_head.embed.weight"]  # else tied


def test_dtypes_not_confirmed_by_the_layout_are_accepted_both_ways(release):
    for name in ("layers.0.hc_attn_fn", "vision.norm.weight", "layers.0.attn.attn_sink", "layers.0.ffn.gate.bias_vl"):
        assert set(release[name].dtypes) == {"BF16", "F32"}


@pytest.mark.parametrize("layout", ["config.json", "inference_config.json"])
@pytest.mark.parametrize("case", golden_cases())
def test_reference_checkpoints_hold_exactly_the_expected_tensors(goldens, case, layout):
    expected = expected_tensors(ModelConfig.from_json(goldens / case / layout))
    header = read_header(goldens / case / "model.safetensors")
    assert set(header) == set(expected)
    for name, spec in expected.items():
        assert header[name].shape == spec.shape, name
        assert header[name].dtype in spec.dtypes, name


def test_plain_formats_have_no_scales_and_take_either_dtype(tiny_config):
    for stored, first in (("bf16", "BF16"), ("fp32", "F32")):
        formats = WeightFormats(dense=stored, experts=stored, engram=stored)
        specs = expected_tensors(tiny_config.replace(weights=formats))
        assert not any(name.endswith(".scale") for name in specs)
        assert all(set(spec.dtypes) == {"BF16", "F32"} for spec in specs.values())
        for name in ("layers.0.attn.wq_a.weight", "layers.0.ffn.experts.0.w1.weight"):
            assert specs[name].dtypes[0] == first
            assert specs[name].shape[1] == tiny_config.hidden_size


def test_parts_are_mixed_freely(tiny_config):
    specs = expected_tensors(tiny_config.replace(weights=WeightFormats(dense="bf16", experts="fp8", engram="bf16")))
    assert specs["layers.0.ffn.experts.0.w1.weight"].dtypes == ("F8_E4M3",)
    assert "layers.0.ffn.experts.0.w1.scale" in specs
    assert "layers.0.attn.wq_a.scale" not in specs


def test_techniques_that_are_off_have_no_tensors(tiny_config):
    whole = set(expected_tensors(tiny_config))
    assert {spec.part for spec in expected_tensors(tiny_config).values()} == set(PARTS)
    absent = {
        "routed_experts": (".gate.", ".experts."),
        "shared_expert": (".shared_experts.",),
        "engram": (".engram.",),
        "drafts": ("mtp.",),
        "vision": ("vision.", "aligner.", "image_", ".bias_vl"),
        "compression": (".compressor.", ".indexer."),
    }
    for technique, marks in absent.items():
        left = set(expected_tensors(tiny_config.without(technique)))
        gone = {name for name in whole if any(mark in name for mark in marks)}
        assert gone and left == whole - gone, technique


def test_one_copy_of_the_stream_keeps_its_mix_of_three(tiny_config):
    specs = expected_tensors(tiny_config.without("mhc"))
    assert specs["layers.0.hc_attn_fn"].shape == (3, tiny_config.hidden_size)
    assert specs["layers.0.hc_ffn_base"].shape == (3,)
    assert specs["layers.0.hc_ffn_scale"].shape == (3,)


def test_a_single_draft_is_first_and_last(tiny_config):
    ratios = (*tiny_config.compress_ratios[: tiny_config.num_hidden_layers], 0)
    specs = expected_tensors(tiny_config.replace(num_nextn_predict_layers=1, compress_ratios=ratios))
    for name in ("main_proj.weight", "norm.weight", "markov_head.head.weight", "confidence_head.proj.weight"):
        assert f"mtp.0.{name}" in specs
    assert not any(name.startswith("mtp.1") for name in specs)


def test_names_and_parameters_need_no_torch():
    code = "import sys, rorqual.inventory.parameters, rorqual.checkpoint.index; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
