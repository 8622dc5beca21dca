"""Every trained parameter is sorted once, by the names of a checkpoint and of learners with names of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rorqual.config import presets
from rorqual.inventory.names import expected_tensors
from rorqual.training.optim import Groups, query_heads, sort_parameters

SUFFIXES = {
    "muon": """attn.wq_a.weight attn.wq_b.weight attn.wkv.weight attn.wo_a.weight attn.wo_b.weight
        attn.compressor.wkv.weight attn.compressor.wgate.weight attn.indexer.wq_b.weight
        attn.indexer.weights_proj.weight attn.indexer.wk.weight ffn.experts.0.w1.weight ffn.experts.0.w2.weight
        ffn.experts.0.w3.weight ffn.shared_experts.w1.weight ffn.shared_experts.w2.weight ffn.shared_experts.w3.weight
        engram.wkv.weight""",
    "decayed": "hc_attn_fn hc_ffn_fn ffn.gate.weight",
    "plain": """attn_norm.weight ffn_norm.weight hc_attn_base hc_attn_scale hc_ffn_base hc_ffn_scale attn.attn_sink
        attn.q_norm.weight attn.kv_norm.weight attn.compressor.norm.weight attn.indexer.k_norm.weight
        engram.q_weight engram.k_weight""",
}


def parameters_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}


def checkpoint_parameters(preset: str) -> dict[str, nn.Parameter]:
    """Plain weights of a preset's names; quantised widths do not matter to sorting."""
    specs = expected_tensors(presets.load(preset))
    return parameters_of({name: spec.shape for name, spec in specs.items() if not name.endswith(".scale")})


@pytest.fixture(scope="module")
def tiny() -> tuple[dict[str, nn.Parameter], Groups]:
    parameters = checkpoint_parameters("tiny")
    for name, parameter in parameters.items():
        parameter.requires_grad_("gate.bias" not in name)
    return parameters, sort_parameters(parameters)


def test_every_trained_parameter_is_sorted_exactly_once(tiny: tuple[dict[str, nn.Parameter], Groups]) -> None:
    parameters, groups = tiny
    names = [*groups.muon, *groups.tables, *groups.decayed, *groups.plain]
    assert sorted(names) == sorted(name for name, p in parameters.items() if p.requires_grad)
    assert len(names) < len(parameters), "the router's biases are left out"


@pytest.mark.parametrize("group", SUFFIXES)
def test_each_kind_of_layer_weight_is_where_it_belongs(
    tiny: tuple[dict[str, nn.Parameter], Groups], group: str
) -> None:
    parameters, groups = tiny
    for suffix in SUFFIXES[group].split():
        named = {name for name in parameters if name.split(".", 2)[2:] == [suffix]}
        assert named, suffix
        assert named <= set(getattr(groups, group)), suffix


def test_tables_are_exactly_the_weights_whose_rows_stand_for_ids(
    tiny: tuple[dict[str, nn.Parameter], Groups],
) -> None:
    parameters, groups = tiny
    ends = ("embed.weight", "head.weight")
    assert set(groups.tables) == {n for n in parameters if n in ends or n.endswith(tuple(f".{e}" for e in ends))}
    assert {"embed.weight", "head.weight"} < set(groups.tables)
    assert any("engram.embed" in name for name in groups.tables)
    assert sum("markov_head" in name for name in groups.tables) == 2


def test_draft_ends(tiny: tuple[dict[str, nn.Parameter], Groups]) -> None:
    _, groups = tiny
    assert "mtp.0.main_proj.weight" in groups.muon
    assert "mtp.0.main_norm.weight" in groups.plain
    assert [name for name in groups.decayed if "confidence_head" in name]


def test_other_names_fall_back_to_shapes() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embedding.weight": (50, 8),
        "embed_tokens.weight": (50, 8),
        "lm_head.weight": (50, 8),
        "blocks.0.mlp.up.weight": (16, 8),
        "vision.patch_embed.proj.weight": (8, 12),
        "aligner.w1.weight": (8, 8),
        "blocks.0.norm1.weight": (8,),
        "blocks.0.mlp.up.bias": (16,),
        "blocks.0.conv.weight": (3, 4, 5),
        "one_row.weight": (1, 8),
        "bare": (4, 4),
    }
    assert sort_parameters(parameters_of(shapes)) == Groups(
        muon=("blocks.0.mlp.up.weight", "vision.patch_embed.proj.weight", "aligner.w1.weight"),
        tables=("tok_embedding.weight", "embed_tokens.weight", "lm_head.weight"),
        decayed=("blocks.0.conv.weight", "one_row.weight", "bare"),
        plain=("blocks.0.norm1.weight", "blocks.0.mlp.up.bias"),
    )


def test_query_heads_names_the_query_weights_only(tiny: tuple[dict[str, nn.Parameter], Groups]) -> None:
    parameters, groups = tiny
    config = presets.load("tiny")
    heads = query_heads(parameters, config)
    assert set(heads) == {name for name in parameters if name.endswith("wq_b.weight")} <= set(groups.muon)
    assert set(heads.values()) == {config.num_attention_heads, config.index_n_heads}
    for name, count in heads.items():
        width = config.index_head_dim if "indexer" in name else config.head_dim
        assert parameters[name].shape[0] == count * width
