"""What `rorqual generate --stats` prints: a run against the layout's formulas, and its context in other caches."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from rorqual.cli.output import Cell, print_table
from rorqual.layout import KVLayout, gqa_bytes, mha_bytes, mla_bytes

if TYPE_CHECKING:
    from rorqual.config import ModelConfig
    from rorqual.engine.generate import Stats

GQA_HEADS = 8


def print_stats(stats: Stats, layout: KVLayout, prefill: str, kernels: str) -> None:
    """Both tables. `prefill`: the mode that ran."""
    rows = run_rows(stats, layout, prefill)
    print_table(("generation", "measured", "by the layout"), [*rows, ("kernels", kernels, None)])
    print()
    tokens = stats.prompt_tokens + stats.new_tokens
    title = f"{tokens:,} tokens of context in other caches, bf16"
    columns = ("cache", "bytes a token", "bytes of this context", "x a token", "x this context")
    print_table(columns, cache_rows(layout, tokens, stats.page_bytes + stats.sequence_bytes), title=title)


def run_rows(stats: Stats, layout: KVLayout, prefill: str) -> list[tuple[Cell, Cell, Cell]]:
    """(what, measured on this run, what the layout says of it); bytes are those of the allocated tensors."""
    prompt = stats.prompt_tokens
    return [
        ("prompt tokens", prompt, None),
        ("prompt tokens a second", stats.prefill_rate, None),
        ("new tokens", stats.new_tokens, None),
        ("new tokens a second", stats.decode_rate, None),
        ("finish reason", stats.finish_reason, None),
        ("global bytes a token", _number(stats.bytes_per_token), _number(layout.bytes_per_token)),
        ("bytes of its pages", stats.page_bytes, layout.global_bytes_allocated(stats.capacity)),
        ("bytes fixed in a sequence", stats.sequence_bytes, layout.sequence_bytes_allocated),
        (f"layer-tokens of the prefill, {prefill}", stats.layer_tokens, layout.prefill_layer_tokens(prompt, prefill)),
        ("layer-tokens of a full prefill", None, stats.layer_tokens_full),
        ("share of full", stats.layer_tokens / stats.layer_tokens_full, None),
    ]


def cache_rows(layout: KVLayout, tokens: int, held: int) -> list[tuple[Cell, ...]]:
    """(cache, bytes a token, bytes of `tokens` tokens, both as multiples of ours). `held`: what ours allocated."""
    own = layout.bytes_per_token
    rows: list[tuple[Cell, ...]] = [("this one, with windows and tails", _number(own), held, 1 if own else None, 1)]
    for name, width in other_caches(layout.config).items():
        rows.append((name, width, width * tokens, float(width / own) if own else None, width * tokens / held))
    return rows


def other_caches(config: ModelConfig) -> dict[str, int]:
    """Bytes a token of classic caches of the same depth, heads and head width.

    MLA's latent takes the width of the row that all heads share here, and its rotary key the rotary width: 512 and 64
    in the release, which are DeepSeek-V3's numbers too.
    """
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    groups, rope = min(GQA_HEADS, heads), config.qk_rope_head_dim
    gqa = f"GQA-{GQA_HEADS}" if groups == GQA_HEADS else f"GQA-{GQA_HEADS} (has {heads} heads: as MHA)"
    return {
        f"MLA, latent {width} + rotary {rope}": mla_bytes(layers, width, rope),
        f"{gqa}, {groups} x {width}": gqa_bytes(layers, heads, width, GQA_HEADS),
        f"MHA, {heads} x {width}": mha_bytes(layers, heads, width),
    }


def _number(value: Fraction | float) -> int | float:
    """Whole where it is."""
    return int(value) if value == int(value) else float(value)
