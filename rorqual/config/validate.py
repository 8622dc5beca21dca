"""How the fields of a config must fit each other: every rule in one place, naming the field and the legal values.

Runs after `rorqual.config.rules` has passed every field alone, so the relations may trust types and ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rorqual.config import rules
from rorqual.config.cache_formats import FORMAT_GROUPS
from rorqual.config.checks import apply, refuse
from rorqual.errors import ConfigError

if TYPE_CHECKING:
    from rorqual.config.model import ModelConfig

WEIGHT_GROUP = 32
"""Side of an FP8 weight tile, length of an FP4 weight group and of an activation group (SPEC 2)."""


def config(c: ModelConfig) -> None:
    """Every rule of a ModelConfig. Normalises its fields in place; ConfigError on the first that is refused."""
    apply(c, rules.FIELD_CHECKS)
    _lengths(c)
    _attention(c)
    _sources(c)
    _readers(c)
    if c.kv_source_layer_ids:
        _indexer(c)
    if c.candidate_source_layer_id >= 0:
        _candidates(c)
    _experts(c)
    if c.engram_layer_ids:
        _engram(c)
    if c.num_nextn_predict_layers:
        _drafts(c)
    _tokens(c)
    _quantised_widths(c)


def _lengths(c: ModelConfig) -> None:
    layers, drafts, given = c.num_hidden_layers, c.num_nextn_predict_layers, len(c.compress_ratios)
    if given != layers + drafts:
        raise ConfigError(
            f"compress_ratios must have num_hidden_layers + num_nextn_predict_layers = {layers} + {drafts} entries; "
            f"got {given}, which means {given - layers} drafts"
            if given >= layers
            else f"compress_ratios must have one entry for each of {layers} layers and {drafts} drafts; got {given}"
        )
    for layer_id, ratio in enumerate(c.compress_ratios):
        if ratio not in rules.RATIOS:
            raise refuse(f"compress_ratios[{layer_id}]", "one of 0, 1, 2, 4", ratio)
        if layer_id >= layers and ratio:
            raise refuse(f"compress_ratios[{layer_id}]", "0: a draft layer reads no global KV", ratio)


def _attention(c: ModelConfig) -> None:
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        raise refuse("qk_rope_head_dim", f"even and at most head_dim ({c.head_dim})", c.qk_rope_head_dim)
    if c.num_attention_heads % c.o_groups:
        raise refuse("o_groups", f"a divisor of num_attention_heads ({c.num_attention_heads})", c.o_groups)


def _sources(c: ModelConfig) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer_id in getattr(c, name):
            _in_backbone(c, name, layer_id)
            if not c.compress_ratios[layer_id]:
                raise refuse(name, "layers with a ratio above 0", layer_id)
    for layer_id in c.kv_source_layer_ids:
        if layer_id not in c.index_source_layer_ids:
            raise ConfigError(
                f"index_source_layer_ids must include every KV source; got {list(c.index_source_layer_ids)} "
                f"without layer {layer_id}, which kv_source_layer_ids names"
            )


def _readers(c: ModelConfig) -> None:
    """A ratio names the cache a layer reads: that of the nearest KV source at or before it (SPEC 1)."""
    source: int | None = None
    for layer_id in range(c.num_hidden_layers):
        ratio = c.compress_ratios[layer_id]
        if layer_id in c.kv_source_layer_ids:
            source = layer_id
        elif ratio and source is None:
            raise ConfigError(
                f"kv_source_layer_ids must name a layer at or before {layer_id}, whose ratio {ratio} reads one; "
                f"got {list(c.kv_source_layer_ids)}"
            )
        elif ratio and source is not None and ratio != c.compress_ratios[source]:
            legal = f"0 or {c.compress_ratios[source]}, the ratio of KV source {source} that the layer reads"
            raise refuse(f"compress_ratios[{layer_id}]", legal, ratio)


def _indexer(c: ModelConfig) -> None:
    _needed(c, "index_n_heads", "index_head_dim", "index_topk", when="there are KV sources")
    if c.index_head_dim < c.qk_rope_head_dim:
        raise refuse("index_head_dim", f"at least qk_rope_head_dim ({c.qk_rope_head_dim})", c.index_head_dim)


def _candidates(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    if source not in c.index_source_layer_ids:
        legal = f"-1 (no pool) or one of index_source_layer_ids {list(c.index_source_layer_ids)}"
        raise refuse("candidate_source_layer_id", legal, source)
    _needed(c, "candidate_topk_blocks", "candidate_block_size", when="there is a candidate source")
    for user in c.index_source_layer_ids:
        if user > source and c.compress_ratios[user] != c.compress_ratios[source]:
            raise ConfigError(
                f"candidate_source_layer_id must have the ratio of every later index source: layer {source} has "
                f"{c.compress_ratios[source]}, layer {user} has {c.compress_ratios[user]}"
            )


def _experts(c: ModelConfig) -> None:
    _top_k_of(c, "num_experts_per_tok", "n_routed_experts")
    if not c.n_routed_experts and not c.n_shared_experts:
        raise refuse("n_shared_experts", "1 when n_routed_experts is 0", 0)


def _engram(c: ModelConfig) -> None:
    for layer_id in c.engram_layer_ids:
        _in_backbone(c, "engram_layer_ids", layer_id)
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        legal = f"one entry for each of engram_layer_ids {list(c.engram_layer_ids)}"
        raise refuse("engram_num_embeddings", legal, list(c.engram_num_embeddings))
    names = ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size")
    _needed(c, *names, when="there are Engram layers")
    if c.engram_max_ngram_size < 2:
        raise refuse("engram_max_ngram_size", "2 or more when there are Engram layers", c.engram_max_ngram_size)
    if c.engram_compressed_vocab_size > c.vocab_size:
        legal = f"at most vocab_size ({c.vocab_size})"
        raise refuse("engram_compressed_vocab_size", legal, c.engram_compressed_vocab_size)


def _drafts(c: ModelConfig) -> None:
    _needed(c, "dspark_block_size", "dspark_markov_rank", when="there are draft layers")
    if not c.dspark_target_layer_ids:
        raise refuse("dspark_target_layer_ids", "one layer or more when there are draft layers", [])
    for layer_id in c.dspark_target_layer_ids:
        _in_backbone(c, "dspark_target_layer_ids", layer_id)
    _top_k_of(c, "dspark_num_experts_per_tok", "dspark_n_routed_experts")
    if not c.dspark_n_routed_experts and not c.n_shared_experts:
        raise refuse("dspark_n_routed_experts", "1 or more when n_shared_experts is 0", 0)


def _tokens(c: ModelConfig) -> None:
    """Ids index the embedding, so they are below `vocab_size`; those of a technique that is off are left alone."""
    names = ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"]
    names += ["engram_pad_token_id"] if c.engram_layer_ids else []
    names += ["dspark_noise_token_id"] if c.num_nextn_predict_layers else []
    for name in names:
        if getattr(c, name) >= c.vocab_size:
            raise refuse(name, f"below vocab_size ({c.vocab_size})", getattr(c, name))
    if c.vision is None:
        return
    if c.image_token_id < 0:
        raise refuse("image_token_id", f"in 0..{c.vocab_size - 1} for a model with vision", c.image_token_id)
    if c.vision.max_image_tokens > c.max_position_embeddings:
        legal = f"at most max_position_embeddings ({c.max_position_embeddings})"
        raise refuse("vision_config.max_image_tokens", legal, c.vision.max_image_tokens)


def _quantised_widths(c: ModelConfig) -> None:
    """Whole scale groups only: cache rows by their format, weights (and the activations they meet) by 32."""
    _multiple("head_dim", c.head_dim, FORMAT_GROUPS[c.cache.main], f"cache_formats.main {c.cache.main}")
    _multiple("head_dim", c.head_dim, FORMAT_GROUPS[c.cache.window], f"cache_formats.window {c.cache.window}")
    if c.kv_source_layer_ids:
        group = FORMAT_GROUPS[c.cache.index_key]
        _multiple("index_head_dim", c.index_head_dim, group, f"cache_formats.index_key {c.cache.index_key}")
    if c.weights.dense == "fp8":
        widths = {"hidden_size": c.hidden_size, "q_lora_rank": c.q_lora_rank}
        widths["o_groups * o_lora_rank"] = c.o_groups * c.o_lora_rank
        widths["moe_intermediate_size"] = c.moe_intermediate_size
        if c.engram_layer_ids:
            widths["engram_head_dim * columns"] = c.engram_columns * c.engram_head_dim
        for name, width in widths.items():
            _multiple(name, width, WEIGHT_GROUP, "fp8 weights")
    if c.weights.experts in ("fp4", "fp8"):
        _multiple("hidden_size", c.hidden_size, WEIGHT_GROUP, f"{c.weights.experts} experts")
        _multiple("moe_intermediate_size", c.moe_intermediate_size, WEIGHT_GROUP, f"{c.weights.experts} experts")
    if c.engram_layer_ids and c.weights.engram == "fp8":
        _multiple("engram_head_dim", c.engram_head_dim, WEIGHT_GROUP, "fp8 Engram tables")


def _in_backbone(c: ModelConfig, name: str, layer_id: int) -> None:
    if layer_id >= c.num_hidden_layers:
        raise refuse(name, f"layers in 0..{c.num_hidden_layers - 1}", layer_id)


def _needed(c: ModelConfig, *names: str, when: str) -> None:
    for name in names:
        if getattr(c, name) < 1:
            raise refuse(name, f"1 or more when {when}", getattr(c, name))


def _top_k_of(c: ModelConfig, chosen: str, total: str) -> None:
    if getattr(c, total) and not 1 <= getattr(c, chosen) <= getattr(c, total):
        raise refuse(chosen, f"an integer in 1..{getattr(c, total)} ({total})", getattr(c, chosen))


def _multiple(name: str, width: int, group: int, why: str) -> None:
    if width % group:
        raise refuse(name, f"a multiple of {group} for {why}", width)
