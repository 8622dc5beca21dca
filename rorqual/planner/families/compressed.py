"""V4's attention: CSA layers (an entry and an index key every 4 tokens), HCA layers (an entry every 128), windows.

Every layer has a window of its own; a layer of ratio 0 has nothing else. K and V are one row of one head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rorqual.config.checks import number, refuse
from rorqual.errors import ConfigError
from rorqual.planner.families.family import BF16, Family, Group, Storage
from rorqual.planner.families.fields import Fields, stores_fp8
from rorqual.planner.families.formulas import (
    BF16_BYTES,
    INDEX_FP4_GROUP,
    V4_SCALE_GROUP,
    fp4_index_bytes,
    v4_row_bytes,
)

MODEL_TYPES = ("deepseek_v4",)
WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: WINDOW, 4: CSA, 128: HCA}
"""What a ratio in `compress_ratios` stands for."""
RATES = {CSA: 4, HCA: 128}
"""Tokens an entry where the config names layer types only."""

NATIVE = "v4-rows"
NATIVE_SOURCE = "DeepSeek-V4 report (2026) and FlashMLA: FP8 rows of 584 bytes, rotary part in bf16, FP4 index keys"


def read(root: Mapping[str, Any], name: str) -> Family:
    """The cache of a `deepseek_v4` config; bytes by `formulas.v4_row_bytes` and `fp4_index_bytes`.

    Source: `NATIVE_SOURCE`.

    >>> fields = {"num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    >>> fields |= {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "sliding_window": 128}
    >>> float(read({"model_type": "deepseek_v4", **fields}, "small").token_bytes())
    167.5625

    Raises:
        ConfigError: a field that is missing, illegal or not understood, by name.
    """
    fields = Fields(root)
    kinds = _kinds(fields, fields.layers())
    rates = _rates(fields)
    if fields.integer("num_key_value_heads") != 1:
        raise refuse("num_key_value_heads", "1", root["num_key_value_heads"])
    head_dim, window = fields.integer("head_dim"), fields.integer("sliding_window")
    rope, index = _rope(fields, head_dim), _index(fields, CSA in kinds)
    max_tokens = fields.optional("max_position_embeddings")
    fields.ignore("num_attention_heads", "quantization_config", "compress_rope_theta", "mlp_layer_types")
    fields.finish(root["model_type"])
    stores_fp8(root)  # FP8 is what its rows are anyway; anything else is refused
    native = _groups(kinds, rates, window, (v4_row_bytes(head_dim, rope), _row_text(head_dim, rope)), _fp4_index(index))
    row = (head_dim * BF16_BYTES, f"{head_dim} x {BF16_BYTES}")
    bf16 = _groups(kinds, rates, window, row, (index * BF16_BYTES, f"{index} index key x {BF16_BYTES}"))
    return Family(
        name=name,
        model_type=root["model_type"],
        attention="CSA and HCA",
        max_tokens=max_tokens,
        storages=(
            Storage(name=NATIVE, groups=native, source=NATIVE_SOURCE),
            Storage(name=BF16, groups=bf16, source="the same elements, two bytes each"),
        ),
    )


def _kinds(fields: Fields, layers: int) -> list[str]:
    """The kind of every backbone layer, from `compress_ratios` (drafts last) or `layer_types`; both must agree."""
    drafts = fields.optional("num_nextn_predict_layers", low=0) or 0
    by_ratio, by_type = None, None
    if fields.stated("compress_ratios"):
        ratios = fields.one_of_each("compress_ratios", tuple(RATIOS), (layers, layers + drafts))
        by_ratio = [RATIOS[ratio] for ratio in ratios[:layers]]
    if fields.stated("layer_types"):
        by_type = fields.one_of_each("layer_types", (WINDOW, CSA, HCA), (layers,))
    if by_ratio is not None and by_type is not None and by_ratio != by_type:
        raise ConfigError("layer_types must name the same layers as compress_ratios; they differ")
    kinds = by_ratio or by_type
    if kinds is None:
        raise ConfigError("compress_ratios is missing, and so is layer_types")
    return kinds


def _rates(fields: Fields) -> dict[str, int]:
    """Tokens an entry of each kind. `compress_ratios` knows 4 and 128 only; other fields must not contradict it."""
    rates = dict(RATES)
    if fields.stated("compress_rates"):
        stated = fields.raw["compress_rates"]
        if not isinstance(stated, Mapping) or not set(stated) <= set(RATES):
            raise refuse("compress_rates", f"an object with {', '.join(RATES)}", stated)
        nested = Fields(stated, "compress_rates.")
        rates |= {kind: nested.integer(kind) for kind in stated}
    for name, kind in (("compress_rate_csa", CSA), ("compress_rate_hca", HCA)):
        rates[kind] = fields.optional(name) or rates[kind]
    if fields.stated("compress_ratios") and rates != RATES:
        raise ConfigError(f"compress_rates must be 4 and 128 beside compress_ratios; got {rates[CSA]} and {rates[HCA]}")
    return rates


def _rope(fields: Fields, head_dim: int) -> int:
    """Rotary channels, stated or as a share of the head."""
    rope = fields.optional("qk_rope_head_dim", low=0, high=head_dim)
    if rope is not None:
        return rope
    if not fields.stated("partial_rotary_factor"):
        raise ConfigError("qk_rope_head_dim is missing, and so is partial_rotary_factor")
    share = number(0, 1)("partial_rotary_factor", fields.raw["partial_rotary_factor"])
    assert isinstance(share, float)
    return int(head_dim * share)


def _index(fields: Fields, needed: bool) -> int:
    """Width of an index key; only CSA layers have one."""
    fields.optional("index_n_heads", low=0)
    fields.optional("index_topk", low=0)
    return fields.integer("index_head_dim") if needed else fields.optional("index_head_dim", low=0) or 0


Bytes = tuple[int, str]
"""Bytes and how they come about."""


def _groups(kinds: list[str], rates: Mapping[str, int], window: int, row: Bytes, index: Bytes) -> tuple[Group, ...]:
    groups = []
    for name, kind, key in (("CSA", CSA, index), ("HCA", HCA, (0, ""))):
        if kind in kinds:
            groups.append(
                Group(
                    name=name,
                    layers=kinds.count(kind),
                    entry_bytes=row[0] + key[0],
                    entry=f"{row[1]} + {key[1]}" if key[1] else row[1],
                    entry_tokens=rates[kind],
                )
            )
    return (*groups, Group(name="window", layers=len(kinds), entry_bytes=row[0], entry=row[1], window=window))


def _row_text(head_dim: int, rope: int) -> str:
    plain = head_dim - rope
    scales = -(-plain // V4_SCALE_GROUP)
    padding = v4_row_bytes(head_dim, rope) - plain - rope * BF16_BYTES - scales
    return f"{plain} codes + {rope} rotary x {BF16_BYTES} + {scales} scales + {padding} padding"


def _fp4_index(width: int) -> Bytes:
    scales = -(-width // INDEX_FP4_GROUP)
    return fp4_index_bytes(width), f"{fp4_index_bytes(width) - scales} index key + {scales} scales"
