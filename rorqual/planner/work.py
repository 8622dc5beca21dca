"""What one decoded token computes and reads, as functions of the context: the terms that other figures are made of.

Sources: the attention, indexer and Engram formulas of the V4.1 report and the release's config; groups and keys are
counts, everything else is bytes or FLOPs. A context is the tokens that the new one sees, itself included.

FLOPs count a multiplication and an addition as two. Embedding look-ups, norms, RoPE, softmax and sampling are left out:
each is far below a percent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from rorqual.config import LayerRole, ModelConfig
from rorqual.formats.spec import FORMATS
from rorqual.inventory.names import expected_tensors
from rorqual.inventory.parameters import expert_parameters, parameter_count
from rorqual.layout import KVLayout
from rorqual.planner.counts import active_counts, few_experts

# `weights.engram` -> the format of a table's row.
ENGRAM_FORMATS = {"fp8": FORMATS["e4m3_e8m0_32"], "bf16": FORMATS["bf16"], "fp32": FORMATS["fp32"]}


def visible_groups(tokens: int, ratio: int) -> int:
    """Complete groups that a query at the end of `tokens` tokens sees. Source: SPEC 5.

    >>> visible_groups(1_048_576, 2), visible_groups(5, 2), visible_groups(5, 0)
    (524288, 2, 0)
    """
    return tokens // ratio if ratio else 0


def scored_groups(config: ModelConfig, role: LayerRole, tokens: int) -> int:
    """Index keys that a layer's indexer scores for one query; a user of the candidate pool no more than the pool.

    Source: SPEC 5.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> [scored_groups(release, release.roles[i], 2**20) for i in (2, 3, 20, 24)]
    [524288, 0, 1048576, 16384]
    """
    if not role.is_index_source:
        return 0
    groups = visible_groups(tokens, role.ratio)
    pool = config.candidate_topk_blocks * config.candidate_block_size
    return min(groups, pool) if role.uses_candidates else groups


def index_groups(config: ModelConfig, tokens: int) -> int:
    """Index keys scored for one decoded token, all layers together. Source: SPEC 5.

    >>> from rorqual.config import presets
    >>> index_groups(presets.load("v4.1-flash"), 2**20)
    2686976
    """
    return sum(scored_groups(config, role, tokens) for role in config.backbone_roles)


def index_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of the index scores of one token: 2 x heads x head dim for each key. Source: SPEC 5.

    >>> from rorqual.config import presets
    >>> index_flops(presets.load("v4.1-flash"), 2**20)
    22011707392
    """
    return 2 * config.index_n_heads * config.index_head_dim * index_groups(config, tokens)


def index_read_bytes(layout: KVLayout, tokens: int) -> int:
    """Bytes of index keys read for one decoded token. Source: SPEC 2 and 5.

    >>> from rorqual.config import presets
    >>> index_read_bytes(KVLayout(presets.load("v4.1-flash")), 2**20)
    182714368
    """
    config = layout.config
    return index_groups(config, tokens) * layout.index_format.row_bytes(config.index_head_dim) if layout.sources else 0


def selected_groups(config: ModelConfig, role: LayerRole, tokens: int) -> int:
    """Groups of global KV that one query of a layer attends to: its Top-K, all visible ones where they are fewer.

    Source: SPEC 5.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> [selected_groups(release, release.roles[i], 600) for i in (0, 2, 20)]
    [0, 300, 512]
    """
    return min(config.index_topk, visible_groups(tokens, role.ratio))


def attended(config: ModelConfig, role: LayerRole, tokens: int) -> int:
    """Keys that one query of a layer attends to: its window and its Top-K. Source: SPEC 5.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> attended(release, release.roles[0], 2**20), attended(release, release.roles[2], 2**20)
    (128, 640)
    """
    return min(config.sliding_window, tokens) + selected_groups(config, role, tokens)


def attention_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of scores and weighted sums of one decoded token: 4 x heads x head dim for each key of each layer.

    Source: SPEC 5.

    >>> from rorqual.config import presets
    >>> attention_flops(presets.load("v4.1-flash"), 2**20)
    3221225472
    """
    keys = sum(attended(config, role, tokens) for role in config.backbone_roles)
    return 4 * config.num_attention_heads * config.head_dim * keys


def kv_read_bytes(layout: KVLayout, tokens: int) -> int:
    """Bytes of main KV and of windows that one decoded token reads; a layer that shares reads for itself.

    Source: SPEC 2 and 5.

    >>> from rorqual.config import presets
    >>> kv_read_bytes(KVLayout(presets.load("v4.1-flash")), 2**20)
    8306688
    """
    config = layout.config
    groups = sum(selected_groups(config, role, tokens) for role in config.backbone_roles)
    window = config.num_hidden_layers * min(config.sliding_window, tokens) * layout.window_row_bytes
    return groups * layout.main_format.row_bytes(config.head_dim) + window if layout.sources else window


def engram_read_bytes(config: ModelConfig) -> int:
    """Bytes of Engram rows that one token reads, all tables: layers x columns x row. Source: SPEC 2 and 8.

    >>> from rorqual.config import presets
    >>> engram_read_bytes(presets.load("v4.1-flash"))
    12672
    """
    if not config.engram_layer_ids:
        return 0
    row = ENGRAM_FORMATS[config.weights.engram].row_bytes(config.engram_head_dim)
    return len(config.engram_layer_ids) * config.engram_columns * row


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """FLOPs of one decoded token by the width that its products run at."""

    fp4: int
    fp8: int
    bf16: int

    @property
    def total(self) -> int:
        """Each counted once, whatever its width."""
        return self.fp4 + self.fp8 + self.bf16

    @property
    def fp8_equivalent(self) -> float:
        """As FP8 work: a BF16 (or FP32) product counts twice, an FP4 one half."""
        return self.fp4 / 2 + self.fp8 + 2 * self.bf16


def decode_flops(config: ModelConfig, tokens: int) -> Precision:
    """FLOPs of one decoded token at a context, head included, drafts not.

    FP8: products with quantised weights, whose activations are FP8 (FP4 experts too). BF16: attention, plain weights,
    the head, and Wo_a, which is stored FP8 and used as BF16 (SPEC 3). FP4: index scores, FP4 on both sides; they
    count at the width of `cache.index_key` where a config keeps its index keys wider.

    >>> from rorqual.config import presets
    >>> decode_flops(presets.load("v4.1-flash"), 2**20).fp4
    22011707392
    """
    quantised, plain = _active_by_width(config)
    index = index_flops(config, tokens)
    bits = FORMATS[config.cache.index_key].bits
    return Precision(
        fp4=index if bits == 4 else 0,
        fp8=2 * quantised + (index if bits == 8 else 0),
        bf16=2 * plain + attention_flops(config, tokens) + (index if bits > 8 else 0),
    )


@lru_cache(maxsize=16)
def _active_by_width(config: ModelConfig) -> tuple[int, int]:
    """Active parameters, head included: those multiplied in FP8, those in BF16 or wider."""
    active = active_counts(config)
    # Routers are never quantised: beyond the chosen experts, their number changes nothing here. Nor do drafts.
    quantised = sum(_quantised(few_experts(config.without("drafts"))))
    return quantised, active.decode_with_head - quantised


def _quantised(config: ModelConfig) -> Iterator[int]:
    """Active parameters of quantised weights: fixed ones of the backbone, then the chosen experts'."""
    for name, spec in expected_tensors(config).items():
        if spec.part in ("experts", "engram_tables") or not name.startswith("layers."):
            continue
        if spec.dtypes[0] in ("F8_E4M3", "I8") and not name.endswith("attn.wo_a.weight"):
            yield parameter_count(spec)
    if config.n_routed_experts and config.weights.experts in ("fp4", "fp8"):
        chosen = min(config.num_experts_per_tok, config.n_routed_experts)
        yield config.num_hidden_layers * chosen * expert_parameters(config)
