"""What each field may hold on its own: its type and its range, in tables from field name to check.

Upper bounds are far above any real model; they keep a hostile file from asking for a list of 2^31 layers before
anything else is looked at. How fields must fit each other is in `rorqual.config.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rorqual.config.cache_formats import CacheFormats
from rorqual.config.checks import Check, choice, flag, instance, integer, integers, number, optional
from rorqual.config.parts import MAX_POSITIONS, RopeScaling, VisionConfig, WeightFormats

RATIOS = (0, 1, 2, 4)
SCORING_FUNCTIONS = ("sqrtsoftplus", "sigmoid", "softmax")

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_ROWS = (1 << 31) - 1

_layers, _width, _count = integer(1, MAX_LAYERS), integer(1, MAX_WIDTH), integer(1, 65536)
_width_or_off, _count_or_off = integer(0, MAX_WIDTH), integer(0, 65536)
_layer_ids = integers(0, MAX_LAYERS - 1, ascending=True)
_token = integer(0, MAX_VOCAB - 1)
_theta = number(1, 1e9, open_low=True)
_epsilon = number(0, 1, open_low=True)

FIELD_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "vocab_size": integer(1, MAX_VOCAB),
        "hidden_size": _width,
        "num_hidden_layers": _layers,
        "max_position_embeddings": integer(1, MAX_POSITIONS),
        "rms_norm_eps": _epsilon,
        "num_attention_heads": _count,
        "head_dim": _width,
        "qk_rope_head_dim": integer(2, MAX_WIDTH),
        "q_lora_rank": _width,
        "o_lora_rank": _width,
        "o_groups": _count,
        "sliding_window": _width,
        "rope_theta": _theta,
        "compress_rope_theta": _theta,
        "compress_ratios": integers(0, max(RATIOS)),
        "kv_source_layer_ids": _layer_ids,
        "index_source_layer_ids": _layer_ids,
        "index_n_heads": _count_or_off,
        "index_head_dim": _width_or_off,
        "index_topk": _width_or_off,
        "candidate_source_layer_id": integer(-1, MAX_LAYERS - 1),
        "candidate_topk_blocks": _width_or_off,
        "candidate_block_size": _width_or_off,
        "moe_intermediate_size": _width,
        "n_routed_experts": _count_or_off,
        "n_shared_experts": integer(0, 1),
        "num_experts_per_tok": _count_or_off,
        "scoring_func": choice(SCORING_FUNCTIONS),
        "norm_topk_prob": flag,
        "routed_scaling_factor": number(0, 1e6, open_low=True),
        "gate_temp": number(0, 1e6, open_low=True),
        "swiglu_limit": number(0, 1e6),
        "hc_mult": integer(1, 64),
        "hc_sinkhorn_iters": integer(1, 1000),
        "hc_eps": _epsilon,
        "engram_layer_ids": _layer_ids,
        "engram_num_embeddings": integers(1, MAX_ROWS),
        "engram_max_ngram_size": integer(0, 64),
        "engram_vocab_size": integer(0, MAX_ROWS),
        "engram_n_heads": _count_or_off,
        "engram_head_dim": _width_or_off,
        "engram_pad_token_id": _token,
        "engram_compressed_vocab_size": integer(0, MAX_VOCAB),
        "num_nextn_predict_layers": integer(0, 64),
        "dspark_block_size": integer(0, 1024),
        "dspark_noise_token_id": _token,
        "dspark_target_layer_ids": _layer_ids,
        "dspark_markov_rank": _width_or_off,
        "dspark_n_routed_experts": _count_or_off,
        "dspark_num_experts_per_tok": _count_or_off,
        "bos_token_id": _token,
        "eos_token_id": _token,
        "pad_token_id": _token,
        "image_token_id": integer(-1, MAX_VOCAB - 1),
        "rope_scaling": optional(instance(RopeScaling)),
        "vision": optional(instance(VisionConfig)),
        "weights": instance(WeightFormats),
        "cache": instance(CacheFormats),
    }
)
