"""Multi-head latent attention (V2, V3) and, on top of it, V3.2's sparse attention with an index key a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rorqual.planner.families.family import BF16, Family, Group, Storage
from rorqual.planner.families.fields import Fields, stores_fp8
from rorqual.planner.families.formulas import (
    BF16_BYTES,
    DSA_SCALE_GROUP,
    FP32_BYTES,
    dsa_index_bytes,
    dsa_row_bytes,
    mla_entry_bytes,
)

INDEXED = ("indexed_attention", "deepseek_sparse_attention")

BF16_SOURCES = {
    "deepseek_v2": "the weights' own 16 bits; the makers' service used 6 bits an element on average (arXiv 2405.04434)",
    "deepseek_v3": "DeepSeek-V3/R1 Inference System Overview (2025): attention runs in BF16",
    "kimi_k2": "the weights' own 16 bits",
}
MLA_TYPES = tuple(BF16_SOURCES)
DSA_TYPES = ("deepseek_v32",)
FP8_SOURCE = "one byte an element, scales left out: the FP8 figure that V3 is quoted with"
DSA_SOURCE = "DeepSeek-V3.2-Exp and its kernels in FlashMLA (2025): FP8 rows with fp32 scales, rotary part in bf16"
# Of queries, values before absorption, and heads: none of it is stored.
UNSTORED = ("head_dim", "qk_head_dim", "qk_nope_head_dim", "v_head_dim", "num_key_value_heads", "quantization_config")


def read_mla(root: Mapping[str, Any], name: str) -> Family:
    """The cache of a config whose `model_type` is one of MLA_TYPES; bytes by `formulas.mla_entry_bytes`.

    Source: the config; DeepSeek-V2 (arXiv 2405.04434).

    >>> fields = {"num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    >>> read_mla({"model_type": "deepseek_v2", **fields}, "deepseek-v2").token_bytes()
    Fraction(69120, 1)

    Raises:
        ConfigError: a field that is missing, illegal or not understood, by name.
    """
    fields = Fields(root)
    layers, latent, rope = _shape(fields)
    max_tokens = fields.optional("max_position_embeddings")
    fields.finish(root["model_type"])
    model_type = root["model_type"]
    bf16 = _mla_storage(BF16, BF16_BYTES, BF16_SOURCES[model_type], layers, latent, rope)
    fp8 = _mla_storage("fp8", 1, FP8_SOURCE, layers, latent, rope)
    return Family(
        name=name,
        model_type=model_type,
        attention="MLA",
        max_tokens=max_tokens,
        storages=(fp8, bf16) if stores_fp8(root) else (bf16, fp8),
    )


def read_dsa(root: Mapping[str, Any], name: str) -> Family:
    """The cache of a config whose `model_type` is one of DSA_TYPES; bytes by `formulas.dsa_token_bytes`.

    Source: the config; `DSA_SOURCE`.

    >>> fields = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_n_heads": 64}
    >>> fields |= {"index_head_dim": 128, "index_topk": 2048}
    >>> read_dsa({"model_type": "deepseek_v32", **fields}, "deepseek-v3.2").token_bytes()
    Fraction(48068, 1)

    Raises:
        ConfigError: a field that is missing, illegal or not understood, by name.
    """
    fields = Fields(root)
    layers, latent, rope = _shape(fields)
    index = fields.integer("index_head_dim")
    fields.integer("index_n_heads")
    fields.integer("index_topk")
    if fields.stated("layer_types"):
        fields.one_of_each("layer_types", INDEXED, (layers,))
    max_tokens = fields.optional("max_position_embeddings")
    fields.finish(root["model_type"])
    stores_fp8(root)  # FP8 is what it stores anyway; anything else is refused
    fp8, bf16 = _dsa_group(layers, latent, rope, index), _dsa_bf16_group(layers, latent, rope, index)
    return Family(
        name=name,
        model_type=root["model_type"],
        attention="MLA with DSA",
        max_tokens=max_tokens,
        storages=(
            Storage(name="fp8", groups=(fp8,), source=DSA_SOURCE),
            Storage(name=BF16, groups=(bf16,), source="the same elements, two bytes each"),
        ),
    )


def _shape(fields: Fields) -> tuple[int, int, int]:
    """Layers, latent width, rotary width."""
    fields.ignore("num_attention_heads", *UNSTORED)
    return fields.layers(), fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", low=0)


def _mla_storage(name: str, element_bytes: int, source: str, layers: int, latent: int, rope: int) -> Storage:
    group = Group(
        name="latent",
        layers=layers,
        entry_bytes=mla_entry_bytes(latent, rope, element_bytes),
        entry=f"({latent} latent + {rope} rotary) x {element_bytes}",
    )
    return Storage(name=name, groups=(group,), source=source)


def _dsa_group(layers: int, latent: int, rope: int, index: int) -> Group:
    scales = f"{-(-latent // DSA_SCALE_GROUP)} scales x {FP32_BYTES}"
    index_scales = f"{-(-index // DSA_SCALE_GROUP)} x {FP32_BYTES}"
    return Group(
        name="latent and index key",
        layers=layers,
        entry_bytes=dsa_row_bytes(latent, rope) + dsa_index_bytes(index),
        entry=f"{latent} latent + {scales} + {rope} rotary x {BF16_BYTES} + {index} index key + {index_scales}",
    )


def _dsa_bf16_group(layers: int, latent: int, rope: int, index: int) -> Group:
    return Group(
        name="latent and index key",
        layers=layers,
        entry_bytes=mla_entry_bytes(latent, rope) + index * BF16_BYTES,
        entry=f"({latent} latent + {rope} rotary + {index} index key) x {BF16_BYTES}",
    )
