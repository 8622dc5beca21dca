"""The Hugging Face layout: a root with token ids and quantisation, a `text_config`, and a `vision_config` or none.

Inside `text_config` our field names are the file's own. Beyond the release's keys the root takes three of ours, written
only when they say something new: `cache_formats`, `expert_dtype` (experts quantised in a plain model), `engram_dtype`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rorqual.config.cache_formats import CacheFormats
from rorqual.config.checks import refuse
from rorqual.config.parts import RopeScaling, VisionConfig, WeightFormats
from rorqual.config.reading import Reading, cache_formats, part, require_values, section, warn_unknown
from rorqual.errors import ConfigError

if TYPE_CHECKING:
    from rorqual.config.model import ModelConfig

MODEL_TYPE = "deepseek_v41"

ROOT_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
TEXT_FIELDS = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "swiglu_limit", "rms_norm_eps"),
    *("max_position_embeddings", "rope_theta", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("scoring_func", "norm_topk_prob", "routed_scaling_factor", "gate_temp", "sliding_window", "compress_ratios"),
    *("compress_rope_theta", "kv_source_layer_ids", "index_source_layer_ids", "index_n_heads", "index_head_dim"),
    *("index_topk", "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size", "hc_mult"),
    *("hc_sinkhorn_iters", "hc_eps", "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size"),
    *("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_pad_token_id"),
    *("engram_compressed_vocab_size", "num_nextn_predict_layers", "dspark_block_size", "dspark_noise_token_id"),
    *("dspark_target_layer_ids", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"),
)

# Keys that other models vary and this one does not: a different value would be ignored, so it is refused.
TEXT_CONSTANTS: Mapping[str, object] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
VISION_CONSTANTS: Mapping[str, object] = {"model_type": "deepseek_v41_vision"}
QUANTIZATION_CONSTANTS: Mapping[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}
ARCHITECTURES = ["DeepseekV41ForCausalLM"]
# Say nothing about what is computed.
INERT_ROOT = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "text_config")
INERT_TEXT = ("initializer_range", "use_cache", "rope_scaling", "dtype", "torch_dtype")
PLAIN_DTYPES: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16"}


def read(root: Mapping[str, Any], label: str) -> Reading:
    """The fields that the file states. `model_type` has been checked."""
    text = section(root, "text_config")
    require_values(text, TEXT_CONSTANTS, "text_config.")
    stated = {name: root[name] for name in ROOT_FIELDS if name in root}
    stated |= {name: text[name] for name in TEXT_FIELDS if name in text}
    stated["rope_scaling"] = _rope_scaling(text.get("rope_scaling"))
    stated["vision"] = _vision(root, label)
    stated["weights"] = _weights(root, label)
    stated |= cache_formats(root, label)
    extensions = ("quantization_config", "vision_config", "cache_formats", "expert_dtype", "engram_dtype")
    warn_unknown(root, (*ROOT_FIELDS, *INERT_ROOT, *extensions), label)
    warn_unknown(text, (*TEXT_FIELDS, *TEXT_CONSTANTS, *INERT_TEXT), f"{label} text_config")
    return Reading(stated=stated, label=label)


def _rope_scaling(raw: object) -> RopeScaling | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise refuse("rope_scaling", "null or an object", raw)
    kind = raw.get("rope_type", raw.get("type"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise refuse("rope_scaling.rope_type", "yarn or default", kind)
    return part(RopeScaling, raw, "rope_scaling", ignore=("rope_type", "type"))


def _vision(root: Mapping[str, Any], label: str) -> VisionConfig | None:
    if root.get("vision_config") is None:
        return None
    raw = section(root, "vision_config")
    require_values(raw, VISION_CONSTANTS, "vision_config.")
    return part(VisionConfig, raw, "vision_config", ignore=tuple(VISION_CONSTANTS))


def _weights(root: Mapping[str, Any], label: str) -> WeightFormats:
    dtype = root.get("dtype", root.get("torch_dtype"))
    experts, engram = root.get("expert_dtype"), root.get("engram_dtype")
    if root.get("quantization_config") is None:
        if not isinstance(dtype, str) or dtype not in PLAIN_DTYPES:
            raise refuse("dtype", "float32 or bfloat16, with a quantization_config for FP8 weights", dtype)
        return WeightFormats.stated(PLAIN_DTYPES[dtype], experts, engram)
    quantization = section(root, "quantization_config")
    require_values({"quant_method": None, **quantization}, QUANTIZATION_CONSTANTS, "quantization_config.")
    warn_unknown(quantization, (*QUANTIZATION_CONSTANTS, "expert_dtype"), f"{label} quantization_config")
    inner = quantization.get("expert_dtype")
    if experts is not None and inner is not None and experts != inner:
        raise ConfigError(f"expert_dtype is {experts!r} at the root and {inner!r} in quantization_config; give one")
    return WeightFormats.stated("fp8", experts if inner is None else inner, engram)


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """The file in the release's key order; a key whose value is its default and that the release lacks is left out."""
    root: dict[str, Any] = {"architectures": list(ARCHITECTURES), "model_type": MODEL_TYPE}
    root |= {"dtype": "float32" if config.weights.dense == "fp32" else "bfloat16"}
    root |= {name: getattr(config, name) for name in ROOT_FIELDS}
    root |= _weights_to_dict(config.weights)
    if config.cache != CacheFormats():
        root["cache_formats"] = dataclasses.asdict(config.cache)
    root["text_config"] = _text_to_dict(config)
    if config.vision is not None:
        root["vision_config"] = {**VISION_CONSTANTS, **dataclasses.asdict(config.vision)}
    return root


def _weights_to_dict(weights: WeightFormats) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if weights.dense == "fp8":
        out["quantization_config"] = dict(QUANTIZATION_CONSTANTS)
        if weights.experts != "fp8":
            out["quantization_config"]["expert_dtype"] = weights.experts
    elif weights.experts != weights.dense:
        out["expert_dtype"] = weights.experts
    if weights.engram != weights.dense:
        out["engram_dtype"] = weights.engram
    return out


def _text_to_dict(config: ModelConfig) -> dict[str, Any]:
    out = dict(TEXT_CONSTANTS)
    for name in TEXT_FIELDS:
        value = getattr(config, name)
        if name != "gate_temp" or value != 1:
            out[name] = list(value) if isinstance(value, tuple) else value
    scaling = config.rope_scaling
    out["rope_scaling"] = None if scaling is None else {"rope_type": "yarn", **dataclasses.asdict(scaling)}
    return out
