"""Techniques that store or score fewer entries: windows, compression, sharing across layers, reuse, the pool."""

from __future__ import annotations

from fractions import Fraction

from rorqual.config import LayerRole, Mode, ModelConfig
from rorqual.layout import KVLayout
from rorqual.planner.explain.entries import row_text
from rorqual.planner.explain.technique import Technique
from rorqual.planner.explain.text import by_ratio, exact, groups_text, saving, summed, times
from rorqual.planner.figure import Figure
from rorqual.planner.work import visible_groups


def _swa(config: ModelConfig) -> tuple[Figure, ...]:
    layout, tokens, window = KVLayout(config), config.max_position_embeddings, config.sliding_window
    layers, row = config.num_hidden_layers, row_text(layout.window_format, config.head_dim)
    seen = f"{tokens:,} - min({window:,}, {tokens:,})"
    beyond = max(0, tokens - window)
    figures = [
        saving(
            "swa_token",
            layers * layout.window_row_bytes,
            "B a token beyond the window",
            formula="layers x window row",
            expression=f"{layers} x ({row})",
            against="every layer keeping its own row of every token, in the window's format",
        ),
        saving(
            "swa_sequence",
            layers * layout.window_row_bytes * beyond,
            f"B a sequence of {tokens:,}",
            formula="layers x window row x (tokens - window)",
            expression=f"{layers} x ({row}) x ({seen})",
            against="the same at the longest context",
        ),
    ]
    plain = sum(role.mode is Mode.SWA for role in config.backbone_roles)
    if plain:
        heads, width = config.num_attention_heads, config.head_dim
        figures.append(
            saving(
                "swa_flops",
                4 * plain * heads * width * beyond,
                f"FLOP a token at {tokens:,}",
                formula="layers without a ratio x 4 x heads x head_dim x (tokens - window)",
                expression=f"{plain} x 4 x {heads} x {width:,} x ({seen})",
                against="attention over every token in the layers that read no global KV",
            )
        )
    return tuple(figures)


SWA = Technique(
    id="swa",
    aliases=("sliding-window",),
    name="sliding-window attention (SWA)",
    factor="number of entries",
    moves="A layer keeps its own entries of the last W tokens only: a fixed number, whatever the length.",
    approximation="In a layer without a ratio, tokens older than the window are not seen; in the others they are seen "
    "only through the groups that the indexer selects.",
    expressiveness="Through windows alone content travels W - 1 tokens a layer. The window is state of one sequence: "
    "it cannot be shared, and a prefix hit does not bring it back (see bounded-replay).",
    training="None worth naming: a mask.",
    used=lambda config: True,
    count=_swa,
)


def _compression(config: ModelConfig) -> tuple[Figure, ...]:
    layout, tokens = KVLayout(config), config.max_position_embeddings
    coarse = [source for source in config.kv_sources if source.ratio > 1]
    entry = layout.sources[0].entry_bytes
    figures = [
        saving(
            "compression_token",
            entry * sum((1 - Fraction(1, source.ratio) for source in coarse), Fraction(0)),
            "B a token",
            formula="sum over KV sources of entry x (1 - 1 / ratio)",
            expression=summed(f"{count} x {entry} x (1 - 1/{ratio})" for count, ratio in by_ratio(coarse)),
            against="the same sources at a ratio of 1",
        )
    ]
    scored = [role for role in config.backbone_roles if role.is_index_source and role.ratio > 1]
    free = [role for role in scored if not role.uses_candidates]
    if free:
        saved = sum(tokens - visible_groups(tokens, role.ratio) for role in free)
        keys = summed(times(count, f"({tokens:,} - {groups_text(tokens, ratio)})") for count, ratio in by_ratio(free))
        figures.append(_score_flops(config, "compression_index_flops", saved, keys, "one index key a token"))
    return tuple(figures)


COMPRESSION = Technique(
    id="compression",
    name="compression",
    factor="number of entries",
    moves="A KV source of ratio m stores one entry, main KV and index key, for each m tokens.",
    approximation="A group's tokens become one weighted sum, a softmax over the group taken channel by channel, at the "
    "position of its first token. A group is seen once it is complete; until then the window shows its tokens.",
    expressiveness="Beyond the window two tokens of a group cannot be attended to apart.",
    training="A gate projection a source, and groups that must not straddle documents. While a group fills, a tail of "
    "fp32 rows is kept with the sequence.",
    used=lambda config: any(source.ratio > 1 for source in config.kv_sources),
    count=_compression,
)


def _readers(config: ModelConfig) -> list[LayerRole]:
    return [role for role in config.backbone_roles if role.ratio and not role.is_kv_source]


def _cross_layer(config: ModelConfig) -> tuple[Figure, ...]:
    entry, readers = KVLayout(config).sources[0].entry_bytes, _readers(config)
    return (
        saving(
            "cross_layer_token",
            entry * sum((Fraction(1, role.ratio) for role in readers), Fraction(0)),
            "B a token",
            formula="sum over layers that read another's global KV of entry / ratio",
            expression=summed(f"{count} x {entry}/{ratio}" for count, ratio in by_ratio(readers)),
            against="every layer that reads global KV being a source of its own",
        ),
    )


CROSS_LAYER_SHARING = Technique(
    id="cross-layer-sharing",
    aliases=("sharing",),
    name="cross-layer sharing",
    factor="number of layers",
    moves="Only the KV sources store global KV; every other layer with a ratio reads the nearest source before it.",
    approximation="None: the model is built so.",
    expressiveness="A reading layer attends to what an earlier layer knew. Its own are the queries, the window and the "
    "output projection; it cannot leave keys of its own for distant tokens.",
    training="One projection a source receives the gradients of all layers that read it, and must serve them all.",
    used=lambda config: bool(_readers(config)),
    count=_cross_layer,
)


def _reusers(config: ModelConfig) -> list[LayerRole]:
    return [role for role in config.backbone_roles if role.mode is Mode.REUSE]


def _pool(config: ModelConfig) -> int:
    return config.candidate_topk_blocks * config.candidate_block_size


def _in_pool(config: ModelConfig, role: LayerRole) -> bool:
    """Whether an indexer in this layer would score the candidate pool only."""
    return 0 <= config.candidate_source_layer_id < role.layer_id


def _topk_reuse(config: ModelConfig) -> tuple[Figure, ...]:
    tokens, pool, reusers = config.max_position_embeddings, _pool(config), _reusers(config)
    free = [role for role in reusers if not _in_pool(config, role)]
    held = [role for role in reusers if _in_pool(config, role)]
    saved = sum(visible_groups(tokens, role.ratio) for role in free)
    saved += sum(min(visible_groups(tokens, role.ratio), pool) for role in held)
    terms = [times(count, groups_text(tokens, ratio)) for count, ratio in by_ratio(free)]
    terms += [times(count, f"min({groups_text(tokens, ratio)}, {pool:,})") for count, ratio in by_ratio(held)]
    keys, against = summed(terms), "each of these layers with an indexer of its own (Reindex)"
    heads, width = config.index_n_heads, config.index_head_dim
    return (
        _score_flops(config, "topk_reuse_flops", saved, keys, against),
        _score_bytes(config, "topk_reuse_bytes", saved, keys, against),
        saving(
            "topk_reuse_projections",
            2 * len(reusers) * heads * (width * config.q_lora_rank + config.hidden_size),
            "FLOP a token",
            formula="layers that reuse x 2 x index heads x (index_head_dim x q_lora_rank + hidden)",
            expression=f"{len(reusers)} x 2 x {heads} x ({width} x {config.q_lora_rank:,} + {config.hidden_size:,})",
            against="index queries and head weights of its own in each of these layers",
        ),
    )


TOPK_REUSE = Technique(
    id="topk-reuse",
    aliases=("top-k-reuse", "reuse"),
    name="Top-K reuse",
    factor="work",
    moves="A Reuse layer computes no index query and scores nothing: it attends to the groups that the nearest index "
    "source before it selected.",
    approximation="A layer attends to groups that were chosen for another layer's query.",
    expressiveness="Layers that share a Top-K cannot look at different distant places; only their windows and their "
    "weights within the choice differ.",
    training="The choice passes no gradient, so the indexer needs a loss of its own. The report does not disclose it; "
    "here its teacher is the attention of the index source's own layer (extrapolated).",
    used=lambda config: bool(_reusers(config)),
    count=_topk_reuse,
)


def _users(config: ModelConfig) -> list[LayerRole]:
    return [role for role in config.backbone_roles if role.uses_candidates]


def _hsi(config: ModelConfig) -> tuple[Figure, ...]:
    tokens, pool, users = config.max_position_embeddings, _pool(config), _users(config)
    groups = [visible_groups(tokens, role.ratio) for role in users]
    saved = sum(count - min(count, pool) for count in groups)
    terms = [(count, groups_text(tokens, ratio)) for count, ratio in by_ratio(users)]
    keys = summed(times(count, f"({seen} - min({seen}, {pool:,}))") for count, seen in terms)
    against = "every index source scoring all groups it sees"
    return (
        _score_flops(config, "hsi_flops", saved, keys, against),
        _score_bytes(config, "hsi_bytes", saved, keys, against),
    )


HSI = Technique(
    id="hsi",
    aliases=("candidates", "candidate-pool"),
    name="hierarchical sparse indexer (HSI)",
    factor="work",
    moves="One index source, the candidate source, scores everything and keeps the best blocks as a pool; every later "
    "index source scores the pool only, so its cost a query stops growing with the context.",
    approximation="A group outside the pool is never selected by a later layer, however high it would score there. A "
    "block is judged by its best group and kept or dropped whole.",
    expressiveness="Later layers search where one layer found something. The candidate source itself still scores "
    "every group: what is left of the cost grows with the context.",
    training="The pool must act in training as it does at inference, or later layers learn to select what they will "
    "not be offered. It passes no gradient.",
    used=lambda config: bool(_users(config)),
    count=_hsi,
)


def _score_flops(config: ModelConfig, name: str, keys: int, expression: str, against: str) -> Figure:
    heads, width = config.index_n_heads, config.index_head_dim
    return saving(
        name,
        2 * heads * width * keys,
        f"FLOP a token at {config.max_position_embeddings:,}",
        formula="2 x index heads x index_head_dim x index keys not scored",
        expression=f"2 x {heads} x {width} x ({expression})",
        against=against,
    )


def _score_bytes(config: ModelConfig, name: str, keys: int, expression: str, against: str) -> Figure:
    row = KVLayout(config).index_format.row_bytes(config.index_head_dim)
    return saving(
        name,
        row * keys,
        f"B read a token at {config.max_position_embeddings:,}",
        formula="index key x index keys not scored",
        expression=f"{exact(row)} x ({expression})",
        against=against,
    )
