"""Parameters a token meets, bytes it reads and FLOPs it costs."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.config import ModelConfig
from rorqual.inventory.parameters import backbone_parameters, expert_parameters
from rorqual.layout import KVLayout
from rorqual.planner import work
from rorqual.planner.counts import active_counts, part_counts
from rorqual.planner.figure import Figure
from rorqual.planner.numbers.exact import MEBI, exact
from rorqual.planner.spelling import row_formula, runs
from rorqual.planner.units import count_text, fixed_text, flops_text

PROMPT = 32_768
SHORT = 4096


def figures(layout: KVLayout) -> Iterator[Figure]:
    """From `ced_prefill_ratio_32768` to `decode_flops_growth`. Parameters, bytes and FLOPs; config, SPEC 3, 5, 8, 11.

    >>> from rorqual.config import presets
    >>> shown = {figure.id: figure.shown for figure in figures(KVLayout(presets.load("v4.1-flash")))}
    >>> shown["active_params_decode"], shown["index_flops_1mi"], shown["decode_flops_growth"]
    ('15.47 B', '22.01 G', '1.25')
    """
    config = layout.config
    if layout.sources:
        yield _ced(layout)
    yield from _active(config)
    yield from _parameters(config)
    yield from _reads(layout)
    if layout.sources:
        yield from _index(layout)
    yield _growth(config)


def _ced(layout: KVLayout) -> Figure:
    config = layout.config
    encoder, layers = config.decoder_start, config.num_hidden_layers
    tail = min(config.sliding_window, PROMPT)
    value = Fraction(layout.prefill_layer_tokens(PROMPT), layout.prefill_layer_tokens(PROMPT, "full"))
    return Figure(
        id=f"ced_prefill_ratio_{PROMPT}",
        value=exact(value),
        shown=fixed_text(value, 3),
        unit="1",
        formula="(E x N + D x sliding_window) / (num_hidden_layers x N), "
        f"E = the last of kv_source_layer_ids, D = num_hidden_layers - E, N = {PROMPT:,}",
        expression=f"({encoder} x {PROMPT:,} + {layers - encoder} x {tail:,}) / ({layers} x {PROMPT:,})",
        provenance="derived",
        note="Layer-tokens. Where E = D it is 1/2 + sliding_window / (2 N).",
    )


def _active(config: ModelConfig) -> Iterator[Figure]:
    active, encoder, layers = active_counts(config), config.decoder_start, config.num_hidden_layers
    seam = f"the decoder's source adds {active.seam:,} for every token of the prompt" if active.seam else "all layers"
    head = f"{count_text(active.decode_with_head)} with the output head"
    prefill = f"CED: encoder layers; {seam}. The release's is quoted as 8 B."
    for id, which, depth, value, note in (
        ("active_params_prefill", "encoder", encoder, active.prefill, prefill),
        ("active_params_decode", "backbone", layers, active.decode, f"{head}. The release's is quoted as 16 B."),
    ):
        chosen = min(config.num_experts_per_tok, config.n_routed_experts)
        fixed = value - depth * chosen * expert_parameters(config)
        yield Figure(
            id=id,
            value=value,
            shown=count_text(value),
            unit="parameters",
            formula=f"fixed parameters of the {which} layers"
            + (f" + {which} layers x num_experts_per_tok x routed_params_per_expert" if chosen else ""),
            expression=f"{fixed:,} + {depth} x {chosen} x {expert_parameters(config):,}" if chosen else f"{fixed:,}",
            provenance="derived",
            note=note,
        )


def _parameters(config: ModelConfig) -> Iterator[Figure]:
    if config.n_routed_experts:
        yield from _routed(config)
    parts = {name: count for name, count in part_counts(config).items() if backbone_parameters({name: count})}
    yield Figure(
        id="backbone_params",
        value=sum(parts.values()),
        shown=count_text(sum(parts.values()), 1),
        unit="parameters",
        formula=" + ".join(parts),
        expression=" + ".join(f"{count:,}" for count in parts.values()),
        provenance="derived",
        note="Without Engram, drafts and vision. A scale is no parameter; an FP4 byte holds two.",
    )
    if config.engram_layer_ids:
        yield from _engram(config)


def _routed(config: ModelConfig) -> Iterator[Figure]:
    layers, experts, one = config.num_hidden_layers, config.n_routed_experts, expert_parameters(config)
    yield Figure(
        id="routed_params",
        value=layers * experts * one,
        shown=count_text(layers * experts * one),
        unit="parameters",
        formula="num_hidden_layers x n_routed_experts x routed_params_per_expert",
        expression=f"{layers} x {experts} x {one:,}",
        provenance="derived",
        note="The backbone's; the drafts have experts of their own.",
    )
    yield Figure(
        id="routed_params_per_expert",
        value=one,
        shown=f"{one:,}",
        unit="parameters",
        formula="3 x hidden_size x moe_intermediate_size",
        expression=f"3 x {config.hidden_size:,} x {config.moe_intermediate_size:,}",
        provenance="derived",
    )


def _engram(config: ModelConfig) -> Iterator[Figure]:
    rows, width = config.engram_num_embeddings, config.engram_head_dim
    row = work.ENGRAM_FORMATS[config.weights.engram]
    yield Figure(
        id="engram_params",
        value=sum(rows) * width,
        shown=count_text(sum(rows) * width, 1),
        unit="parameters",
        formula="sum(engram_num_embeddings) x engram_head_dim",
        expression=f"({' + '.join(f'{count:,}' for count in rows)}) x {width:,}",
        provenance="derived",
        note=f"The tables; projections and gates add {part_counts(config)['engram']:,}.",
    )
    value, columns = work.engram_read_bytes(config), config.engram_columns
    yield Figure(
        id="engram_read_bytes_token",
        value=value,
        shown=f"{value:,}",
        unit="B/token",
        formula="len(engram_layer_ids) x (engram_max_ngram_size - 1) x engram_n_heads "
        f"x ({row_formula(row, 'engram_head_dim')})",
        expression=f"{len(config.engram_layer_ids)} x {columns} x ({row_formula(row, width)})",
        provenance="derived",
        note=f"{row.row_bytes(width):,} bytes a row.",
    )


def _reads(layout: KVLayout) -> Iterator[Figure]:
    config, windows = layout.config, layout.window_bytes_logical
    readers = [role for role in config.backbone_roles if role.ratio]
    # Long enough for a full Top-K and a full window, whatever they are.
    value = work.kv_read_bytes(layout, max(4 * config.index_topk, config.sliding_window))
    row = layout.main_format.row_bytes(config.head_dim)
    sparse = f"{len(readers)} x {config.index_topk:,} x {row:,} + " if readers else ""
    yield Figure(
        id="kv_read_bytes_decode",
        value=value,
        shown=f"{value:,}",
        unit="B/token",
        formula=("layers with a ratio x index_topk x main_entry_bytes + " if readers else "") + "swa_total_bytes",
        expression=f"{sparse}{windows:,}",
        provenance="derived",
        note="Once index_topk groups are visible; index keys come on top. A layer that shares reads for itself.",
    )


def _index(layout: KVLayout) -> Iterator[Figure]:
    config = layout.config
    heads, dim = config.index_n_heads, config.index_head_dim
    scored = runs(filter(None, (work.scored_groups(config, role, MEBI) for role in config.backbone_roles)))
    keys = "sum over index_source_layer_ids of 2^20 / compress_ratios[id]"
    if config.candidate_source_layer_id >= 0:
        keys += ", candidate_pool at most after candidate_source_layer_id"
    row = layout.index_format.row_bytes(dim)
    flops, read = work.index_flops(config, MEBI), work.index_read_bytes(layout, MEBI)
    yield Figure(
        id="index_flops_1mi",
        value=flops,
        shown=flops_text(flops),
        unit="FLOP/token",
        formula=f"2 x index_n_heads x index_head_dim x ({keys})",
        expression=f"2 x {heads} x {dim} x ({scored})",
        provenance="derived",
    )
    yield Figure(
        id="index_read_bytes_1mi",
        value=read,
        shown=f"{read:,}",
        unit="B/token",
        formula=f"index_entry_bytes x ({keys})",
        expression=f"{row:,} x ({scored})",
        provenance="derived",
    )


def _growth(config: ModelConfig) -> Figure:
    long, short = work.decode_flops(config, MEBI), work.decode_flops(config, SHORT)
    terms = [Fraction(flops.fp4, 2) + flops.fp8 + 2 * flops.bf16 for flops in (long, short)]
    spelled = [f"({flops.fp4:,} / 2 + {flops.fp8:,} + 2 x {flops.bf16:,})" for flops in (long, short)]
    return Figure(
        id="decode_flops_growth",
        value=exact(terms[0] / terms[1]),
        shown=fixed_text(terms[0] / terms[1], 2),
        unit="1",
        formula=f"(fp4 / 2 + fp8 + 2 x bf16) at {MEBI:,} tokens over the same at {SHORT:,}",
        expression=" / ".join(spelled),
        provenance="derived",
        note="FP8-equivalent FLOPs of one decoded token. FP4, counted half: index scores. FP8: products of quantised "
        "weights, FP4 experts too, since their activations are FP8. BF16, counted twice: attention, plain weights, "
        "the output head, Wo_a. Left out: look-ups, norms, RoPE, softmax, sampling, drafts.",
    )
