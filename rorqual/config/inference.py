"""The release's own layout, `inference/config.json`: flat, with other names for the same things.

It does not state the positions (the trained length times the YaRN factor is meant) or the bos, eos and pad ids (the
release's are meant). Where a config differs from that, the Hugging Face names are added, so that what is written reads
back equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rorqual.config.cache_formats import CacheFormats
from rorqual.config.checks import refuse
from rorqual.config.parts import MAX_POSITIONS, RopeScaling, VisionConfig, WeightFormats
from rorqual.config.reading import Reading, cache_formats, part, warn_unknown
from rorqual.errors import ConfigError

if TYPE_CHECKING:
    from rorqual.config.model import ModelConfig

RENAMED: Mapping[str, str] = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}
SAME = (
    *("vocab_size", "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank"),
    *("dspark_n_routed_experts", "n_routed_experts", "n_shared_experts", "swiglu_limit", "q_lora_rank", "head_dim"),
    *("o_groups", "o_lora_rank", "rope_theta", "compress_rope_theta", "index_n_heads", "index_head_dim", "index_topk"),
    *("candidate_topk_blocks", "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "engram_layer_ids"),
    *("engram_vocab_size", "engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim"),
    *("engram_compressed_vocab_size", "compress_ratios", "image_token_id"),
)
OPTIONAL = ("gate_temp", "norm_topk_prob", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
KEYS: Mapping[str, str] = {**{name: name for name in (*SAME, *OPTIONAL)}, **RENAMED}
"""Field -> key in this layout."""

ROPE_KEYS: Mapping[str, str] = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
}
VISION_KEYS: Mapping[str, str] = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
ERROR_KEYS: Mapping[str, str] = {
    **KEYS,
    **{f"rope_scaling.{name}": key for name, key in ROPE_KEYS.items()},
    **{f"vision_config.{name}": key for name, key in VISION_KEYS.items()},
}
"""Name in an error -> key in this layout."""
# Older DeepSeek models have a file of this kind, without these two.
MARKS = ("kv_source_layers", "index_source_layers")


def looks_like(root: Mapping[str, Any]) -> bool:
    return "model_type" not in root and "dim" in root and "n_layers" in root


def read(root: Mapping[str, Any], label: str) -> Reading:
    """The fields that the file states, and the positions it implies."""
    for mark in MARKS:
        if mark not in root:
            raise ConfigError(f"{mark} is missing: {label} is not the inference config of a deepseek_v41 model")
    stated = {name: root[key] for name, key in KEYS.items() if key in root}
    stated["rope_scaling"] = scaling = _rope_scaling(root)
    stated["vision"] = _vision(root)
    stated["weights"] = _weights(root)
    stated |= cache_formats(root, label)
    implied: dict[str, Any] = {}
    if scaling is not None:
        implied["max_position_embeddings"] = implied_positions(scaling)
    extensions = ("dtype", "expert_dtype", "engram_dtype", "cache_formats")
    warn_unknown(root, (*KEYS.values(), *ROPE_KEYS.values(), *VISION_KEYS.values(), *extensions), label)
    return Reading(stated=stated, implied=implied, label=label, keys=ERROR_KEYS)


def implied_positions(scaling: RopeScaling) -> int:
    """Trained length times YaRN factor: 65,536 x 16 = 1,048,576 in the release."""
    return min(MAX_POSITIONS, int(scaling.original_max_position_embeddings * scaling.factor))


def _rope_scaling(root: Mapping[str, Any]) -> RopeScaling | None:
    """`original_seq_len` 0 means no YaRN in this layout."""
    if "original_seq_len" not in root:
        raise ConfigError("original_seq_len is missing; give the trained length, or 0 for no YaRN")
    if type(root["original_seq_len"]) is int and root["original_seq_len"] == 0:
        return None
    return part(RopeScaling, {name: root[key] for name, key in ROPE_KEYS.items() if key in root}, "rope_scaling")


def _vision(root: Mapping[str, Any]) -> VisionConfig | None:
    layers = root.get("vision_n_layers", 0)
    if type(layers) is int and layers == 0:
        return None
    return part(VisionConfig, {name: root[key] for name, key in VISION_KEYS.items() if key in root}, "vision_config")


def _weights(root: Mapping[str, Any]) -> WeightFormats:
    dtype = root.get("dtype")
    if dtype not in ("fp8", "bf16", "fp32"):
        raise refuse("dtype", "one of fp8, bf16, fp32", dtype)
    return WeightFormats.stated(dtype, root.get("expert_dtype"), root.get("engram_dtype"))


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """The flat file; keys that the release's own lacks appear only where the config is not the default."""
    weights = config.weights
    out: dict[str, Any] = {"dtype": weights.dense}
    out["expert_dtype"] = None if weights.experts == weights.dense else weights.experts
    if weights.engram != weights.dense:
        out["engram_dtype"] = weights.engram
    for name in (*SAME, *RENAMED, *_optional_to_write(config)):
        value = getattr(config, name)
        out[KEYS[name]] = list(value) if isinstance(value, tuple) else value
    scaling = config.rope_scaling
    out |= {"original_seq_len": 0} if scaling is None else {k: getattr(scaling, n) for n, k in ROPE_KEYS.items()}
    vision = config.vision
    out |= {"vision_n_layers": 0} if vision is None else {k: getattr(vision, n) for n, k in VISION_KEYS.items()}
    if config.cache != CacheFormats():
        out["cache_formats"] = dataclasses.asdict(config.cache)
    return out


def _optional_to_write(config: ModelConfig) -> list[str]:
    usual = {f.name: f.default for f in dataclasses.fields(config)}
    if config.rope_scaling is not None:
        usual["max_position_embeddings"] = implied_positions(config.rope_scaling)
    return [name for name in OPTIONAL if getattr(config, name) != usual[name]]
