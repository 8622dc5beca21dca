"""The figures that people quote of a model, each with its value, formula and source: `numbers(config)`.

Figures of this model are computed from its config; those of other models, and the savings against them, stay as they
are. `_1m` is a context of 10^6 tokens, `_1mi` of 2^20. A figure of a technique that a config lacks is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from rorqual.config import ModelConfig
from rorqual.layout import KVLayout
from rorqual.planner.figure import Figure
from rorqual.planner.numbers import entries, sequence, sharing, techniques, vision, work

IDS: tuple[str, ...] = (
    *("mha_layer_bytes", "mha_token_bytes", "mla_entry_bytes", "mla_1m_bytes", "main_entry_elements"),
    *("hidden_over_latent", "swa_receptive_field_20", "swa_loose_20", "swa_loose_40", "sparse_read_entries"),
    *("candidate_pool", "main_entry_bytes", "index_entry_bytes", "increment_ratio2", "equivalent_entries"),
    *("main_token_bytes", "index_token_bytes", "global_token_bytes", "v4_flash_token_bytes", "v4_saving"),
    *("persistent_saving", "v3_token_bytes", "v3_token_bytes_bf16", "v3_saving", "v32_token_bytes"),
    *("v1_token_bytes", "v1_saving", "swa_total_bytes", "pool_1m_bytes", "pool_over_window_1m"),
    *("window_equals_global_tokens", "ced_prefill_ratio_32768", "active_params_prefill", "active_params_decode"),
    *("routed_params", "routed_params_per_expert", "backbone_params", "engram_params", "engram_read_bytes_token"),
    *("kv_read_bytes_decode", "index_flops_1mi", "index_read_bytes_1mi", "decode_flops_growth", "fp4_range"),
    *("mhc_traffic", "spec_tokens_per_step", "spec_accepted", "max_image_tokens", "min_pixels"),
    *("vision_patches_1008", "vision_features_1008", "vision_features_1344x756", "vision_features_1344"),
    *("vision_released_1302", "refresh_content_address_query"),
)
"""Every id there is, in the order of `numbers`: the release has them all."""


def numbers(config: ModelConfig) -> dict[str, Figure]:
    """Every figure that the config has, by id, in the order of `IDS`; each states its own unit, formula and source.

    >>> from rorqual.config import presets
    >>> figure = numbers(presets.load("v4.1-flash"))["main_token_bytes"]
    >>> figure.shown, figure.unit, figure.expression
    ('720', 'B/token', '(3 / 2 + 1 / 1) x 288')
    >>> "candidate_pool" in numbers(presets.load("v4.1-flash").without("candidates"))
    False
    """
    return {figure.id: figure for figure in _figures(KVLayout(config))}


def _figures(layout: KVLayout) -> Iterator[Figure]:
    yield from sharing.figures(layout)
    yield from entries.figures(layout)
    yield from sequence.figures(layout)
    yield from work.figures(layout)
    yield from techniques.figures(layout)
    if layout.config.vision is not None:
        yield from vision.figures(layout.config.vision)
    if layout.sources:
        yield sharing.refresh(layout)
