"""What a step needs beside weights and cache: an estimate of this project's own engine, until the engine measures it.

With T rows a step (a prefill chunk), everything in bf16 unless said otherwise:

    streams     T x (2 n d x 2 + (2 + n) n x 4): the n residual copies before and after a sub-layer, mixing in fp32
    attention   T x 2 (2 d + q_lora + 2 heads c / tp + 2 c + o_groups o_lora / tp + index heads x index dim)
                + T x 4 (index_topk + candidate blocks) + one tile of index scores, 256 x 4,096 in fp32
    experts     T x 2 (2 d + k (2 width + d) + 2 shared width) + T x d x 4: the chosen experts' rows, the sum in fp32
    Engram      T x 2 (columns x row width + (n + 1) d)
    vision      patches x 2 (5 width + 2 inner), for the largest image
    logits      sampled rows x vocabulary x 4
    carry       prefills x W x n d x 2: the streams of the rows that a chunked CED prefill keeps for its last chunk

Sub-layers follow each other, so a step needs streams + the largest of attention, experts, Engram and vision + logits +
carry. Under expert parallelism the rows that a rank receives are counted as those it sends: balanced routing. The
allocator's own waste, kernels and communication buffers are what a utilisation below 1 leaves room for.
"""

from __future__ import annotations

from rorqual.config import ModelConfig
from rorqual.errors import InputError

CHUNK_TOKENS = 8192
SAMPLED_ROWS = 256
PREFILLS = 1
SCORE_TILE = 256 * 4096
BF16_BYTES, FP32_BYTES, ID_BYTES = 2, 4, 4
_SHARING = ("attention", "experts", "engram", "vision")  # one after another in the same memory


def workspace_parts(
    config: ModelConfig,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    sampled_rows: int = SAMPLED_ROWS,
    prefills: int = PREFILLS,
    tp: int = 1,
) -> dict[str, int]:
    """Bytes of each term of the formula above on one rank.

    chunk_tokens: rows of the largest step. sampled_rows: rows that need logits at once. prefills: prompts that are
    between two chunks at once. tp: ranks that split the heads.

    >>> from rorqual.config import presets
    >>> parts = workspace_parts(presets.load("v4.1-flash"), 1)
    >>> parts["streams"], parts["experts"], parts["carry"]
    (82016, 166912, 5242880)

    Unit: bytes. Source: an estimate from the config's shapes: 2 x 4 x 5,120 x 2 + 24 x 4;
    2 x (10,240 + 6 x 9,728 + 4,608) + 20,480; 128 x 20,480 x 2. Raises InputError for a count below 1.
    """
    for name, value in (("chunk", chunk_tokens), ("sampled-rows", sampled_rows), ("prefills", prefills), ("tp", tp)):
        if value < 1:
            raise InputError(f"--{name} must be 1 or more; got {value}")
    d, n = config.hidden_size, config.hc_mult
    return {
        "streams": chunk_tokens * (2 * n * d * BF16_BYTES + (2 + n) * n * FP32_BYTES),
        "attention": _attention(config, chunk_tokens, tp),
        "experts": _experts(config, chunk_tokens),
        "engram": chunk_tokens * BF16_BYTES * _engram_width(config),
        "vision": _vision(config),
        "logits": sampled_rows * config.vocab_size * FP32_BYTES,
        "carry": prefills * config.sliding_window * n * d * BF16_BYTES,
    }


def workspace_bytes(
    config: ModelConfig,
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    sampled_rows: int = SAMPLED_ROWS,
    prefills: int = PREFILLS,
    tp: int = 1,
) -> int:
    """Bytes of a step on one rank: terms that are alive together, added. It grows with the chunk, not the prompt.

    >>> from rorqual.config import presets
    >>> workspace_bytes(presets.load("v4.1-flash"), 8192)
    2378170368

    Source: an estimate, `workspace_parts`. Raises InputError as it does.
    """
    parts = workspace_parts(config, chunk_tokens, sampled_rows=sampled_rows, prefills=prefills, tp=tp)
    return parts["streams"] + max(parts[name] for name in _SHARING) + parts["logits"] + parts["carry"]


def _attention(config: ModelConfig, rows: int, tp: int) -> int:
    heads = 2 * config.num_attention_heads * config.head_dim // tp  # queries, and what attention gives back
    output = config.o_groups * config.o_lora_rank // tp
    width = 2 * config.hidden_size + config.q_lora_rank + heads + 2 * config.head_dim + output
    if not config.kv_source_layer_ids:
        return rows * BF16_BYTES * width
    width += config.index_n_heads * config.index_head_dim
    blocks = config.candidate_topk_blocks if config.candidate_source_layer_id >= 0 else 0
    return rows * (BF16_BYTES * width + ID_BYTES * (config.index_topk + blocks)) + SCORE_TILE * FP32_BYTES


def _experts(config: ModelConfig, rows: int) -> int:
    d, width = config.hidden_size, config.moe_intermediate_size
    chosen = min(config.num_experts_per_tok, config.n_routed_experts)
    columns = 2 * d + chosen * (2 * width + d) + 2 * width * config.n_shared_experts
    return rows * (BF16_BYTES * columns + FP32_BYTES * d)


def _engram_width(config: ModelConfig) -> int:
    if not config.engram_layer_ids:
        return 0
    return config.engram_columns * config.engram_head_dim + (config.hc_mult + 1) * config.hidden_size


def _vision(config: ModelConfig) -> int:
    if config.vision is None:
        return 0
    tower = config.vision
    patches = tower.max_image_tokens * tower.downsample_ratio**2
    return patches * BF16_BYTES * (5 * tower.hidden_size + 2 * tower.intermediate_size)
