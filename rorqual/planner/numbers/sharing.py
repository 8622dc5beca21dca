"""What a token would cost without sharing, how far windows reach, and how few entries a query reads."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.layout import BF16_BYTES, KVLayout, mha_bytes
from rorqual.planner.figure import Figure
from rorqual.planner.numbers.exact import MILLION, Proportion, exact
from rorqual.planner.units import decimal_bytes, number_text


def figures(layout: KVLayout) -> Iterator[Figure]:
    """From `mha_layer_bytes` to `candidate_pool`. Bytes, tokens and entries; from the config, SPEC 5 and 11.

    >>> from rorqual.config import presets
    >>> [figure.shown for figure in figures(KVLayout(presets.load("v4.1-flash")))][:4]
    ['131,072', '5,242,880', '1,024', '40.96 GB']
    """
    yield from _heads(layout)
    yield from _latent(layout)
    yield from _reach(layout)
    yield from _reads(layout)


def refresh(layout: KVLayout) -> Proportion:
    """Layers that make anew what is stored, where to look, and what to look for. From the config, SPEC 1. Unit: layers.

    >>> from rorqual.config import presets
    >>> refresh(KVLayout(presets.load("v4.1-flash"))).shown
    '4 : 8 : 40'
    """
    config = layout.config
    terms = (len(config.kv_source_layer_ids), len(config.index_source_layer_ids), config.num_hidden_layers)
    shown = " : ".join(f"{term:,}" for term in terms)
    return Proportion(
        id="refresh_content_address_query",
        terms=terms,
        value=exact(Fraction(terms[-1], terms[0])),
        shown=shown,
        unit="layers",
        formula="len(kv_source_layer_ids) : len(index_source_layer_ids) : num_hidden_layers",
        expression=shown,
        provenance="config",
        note="Content is main KV, address a Top-K, query every layer's own; a KV source refreshes the address too.",
    )


def _heads(layout: KVLayout) -> Iterator[Figure]:
    config = layout.config
    layers, heads, dim = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    layer, token = mha_bytes(1, heads, dim), mha_bytes(layers, heads, dim)
    yield Figure(
        id="mha_layer_bytes",
        value=layer,
        shown=f"{layer:,}",
        unit="B/token/layer",
        formula=f"2 x num_attention_heads x head_dim x {BF16_BYTES}",
        expression=f"2 x {heads:,} x {dim:,} x {BF16_BYTES}",
        provenance="derived",
        note="A key and a value of every head, bf16: what this model would store as plain multi-head attention.",
    )
    yield Figure(
        id="mha_token_bytes",
        value=token,
        shown=f"{token:,}",
        unit="B/token",
        formula=f"num_hidden_layers x 2 x num_attention_heads x head_dim x {BF16_BYTES}",
        expression=f"{layers} x 2 x {heads:,} x {dim:,} x {BF16_BYTES}",
        provenance="derived",
    )


def _latent(layout: KVLayout) -> Iterator[Figure]:
    config = layout.config
    layers, dim, hidden = config.num_hidden_layers, config.head_dim, config.hidden_size
    entry = dim * BF16_BYTES
    yield Figure(
        id="mla_entry_bytes",
        value=entry,
        shown=f"{entry:,}",
        unit="B/token/layer",
        formula=f"head_dim x {BF16_BYTES}",
        expression=f"{dim:,} x {BF16_BYTES}",
        provenance="derived",
        note="One latent for all heads, key and value at once, the rotary channels within it, bf16.",
    )
    yield Figure(
        id="mla_1m_bytes",
        value=layers * entry * MILLION,
        shown=decimal_bytes(layers * entry * MILLION),
        unit="B",
        formula=f"num_hidden_layers x head_dim x {BF16_BYTES} x 10^6 tokens",
        expression=f"{layers} x {dim:,} x {BF16_BYTES} x 10^6",
        provenance="derived",
    )
    if layout.sources:
        yield Figure(
            id="main_entry_elements",
            value=dim,
            shown=f"{dim:,}",
            unit="elements",
            formula="head_dim",
            expression=f"{dim:,}",
            provenance="config",
            note="K = V: an entry is one row, its trailing qk_rope_head_dim channels rotated.",
        )
    yield Figure(
        id="hidden_over_latent",
        value=exact(Fraction(hidden, dim)),
        shown=number_text(Fraction(hidden, dim)),
        unit="1",
        formula="hidden_size / head_dim",
        expression=f"{hidden:,} / {dim:,}",
        provenance="derived",
    )


def _reach(layout: KVLayout) -> Iterator[Figure]:
    """Figures of 20 and of 40 layers of windows; a model of fewer layers has them not."""
    window, layers = layout.config.sliding_window, layout.config.num_hidden_layers
    reach = 1 + 20 * (window - 1)
    if layers >= 20:
        yield Figure(
            id="swa_receptive_field_20",
            value=reach,
            shown=f"{reach:,}",
            unit="tokens",
            formula="1 + 20 x (sliding_window - 1)",
            expression=f"1 + 20 x ({window:,} - 1)",
            provenance="derived",
            note=f"{reach - 1:,} tokens for an exact replay to compute again, and the row itself.",
        )
    for depth in (20, 40):
        if layers >= depth:
            yield Figure(
                id=f"swa_loose_{depth}",
                value=depth * window,
                shown=f"{depth * window:,}",
                unit="tokens",
                formula=f"{depth} x sliding_window",
                expression=f"{depth} x {window:,}",
                provenance="derived",
                note="The loose bound: it counts the row that two neighbouring windows share twice.",
            )


def _reads(layout: KVLayout) -> Iterator[Figure]:
    config = layout.config
    read, pool = config.sliding_window + config.index_topk, config.candidate_topk_blocks * config.candidate_block_size
    if layout.sources:
        yield Figure(
            id="sparse_read_entries",
            value=read,
            shown=f"{read:,}",
            unit="entries",
            formula="sliding_window + index_topk",
            expression=f"{config.sliding_window:,} + {config.index_topk:,}",
            provenance="derived",
            note="A query of a layer with a ratio, whatever the context.",
        )
    if config.candidate_source_layer_id >= 0:
        yield Figure(
            id="candidate_pool",
            value=pool,
            shown=f"{pool:,}",
            unit="entries",
            formula="candidate_topk_blocks x candidate_block_size",
            expression=f"{config.candidate_topk_blocks:,} x {config.candidate_block_size:,}",
            provenance="derived",
            note="What an index source after the candidate source scores at most.",
        )
