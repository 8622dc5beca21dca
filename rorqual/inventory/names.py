"""Every tensor a checkpoint of a config holds: name, shape, accepted dtypes, and the part of the model it belongs to.

The names are those of deepseek-ai/DeepSeek-V4.1-Flash: no `model.` prefix, linear weights `[out, in]`, `.scale` a
sibling of `.weight`. The released config gives 96,085 of them, 510,286,023,000 bytes.

A quantised weight is a pair:
  FP8    `.weight` F8_E4M3 [N, K],    `.scale` F8_E8M0 [ceil(N/32), ceil(K/32)]  (32 x 32 tiles)
  FP4    `.weight` I8 [N, K/2],       `.scale` F8_E8M0 [N, K/32]                 (two codes a byte, low nibble = even k)
  tables `.weight` F8_E4M3 [rows, D], `.scale` F8_E8M0 [rows, ceil(D/32)]        (groups along the row)
A plain checkpoint stores BF16 or F32 wherever a quantised weight would be, and no scales.

Dtypes are the safetensors spellings; where several are accepted the first is what we write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from rorqual.config import Mode, ModelConfig
from rorqual.config import Part as LayerPart

GROUP = 32  # the side of an FP8 tile, and the group of every E8M0 scale

BYTES_PER_ELEMENT = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}

PARTS = (
    "embed",
    "head",
    "norms",
    "mhc",
    "attention",
    "compressor",
    "indexer",
    "router",
    "experts",
    "shared",
    "engram_tables",
    "engram",
    "vision",
    "draft",
    "draft_experts",
)
"""Parts of the model. `draft` is everything of the draft layers but their routed experts."""

_BF16 = ("BF16", "F32")  # stored BF16 in the release; a wider copy is as good
_F32 = ("F32", "BF16")  # the layout's notes 1 and 3: seen as F32, BF16 reported


class TensorSpec(NamedTuple):
    """What one tensor of a checkpoint must be."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    part: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the dtype that we write."""
        return self.elements * BYTES_PER_ELEMENT[self.dtypes[0]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint, by name, in file order: embedding, head, backbone layers, drafts, vision."""
    return {spec.name: spec for spec in _all_tensors(config)}


def is_quantised_pair(spec: TensorSpec) -> bool:
    """Whether a `.weight` carries codes that mean nothing without its `.scale`."""
    return spec.dtypes[0] in ("F8_E4M3", "I8")


def scale_name(weight_name: str) -> str:
    return weight_name.removesuffix(".weight") + ".scale"


def layer_prefix(config: ModelConfig, layer_id: int) -> str:
    """`layers.N` for a backbone layer, `mtp.K` for draft K."""
    backbone = config.num_hidden_layers
    return f"layers.{layer_id}" if layer_id < backbone else f"mtp.{layer_id - backbone}"


def _all_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    vocabulary = (config.vocab_size, config.hidden_size)
    yield TensorSpec("embed.weight", vocabulary, _BF16, "embed")
    yield TensorSpec("head.weight", vocabulary, _BF16, "head")
    yield TensorSpec("norm.weight", (config.hidden_size,), _BF16, "norms")
    for role in config.roles:
        names = _LayerNames(config, layer_prefix(config, role.layer_id), draft=role.part is LayerPart.DRAFT)
        yield from names.mixing()
        yield from names.attention()
        if role.mode is Mode.FULL:
            yield from names.compressor(role.ratio)
        if role.mode in (Mode.FULL, Mode.REINDEX):
            yield from names.indexer(has_key=role.mode is Mode.FULL)
        yield from names.feed_forward()
        if role.engram_index is not None:
            yield from names.engram(config.engram_num_embeddings[role.engram_index])
    if config.num_nextn_predict_layers:
        yield from _draft_ends(config)
    if config.vision is not None:
        yield from _vision(config)


class _LayerNames:
    """The tensors of one layer under `prefix`; in a draft layer they all count as draft."""

    def __init__(self, config: ModelConfig, prefix: str, draft: bool) -> None:
        self.config = config
        self.prefix = prefix
        self.draft = draft

    def _plain(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], part: str) -> TensorSpec:
        return TensorSpec(f"{self.prefix}.{name}", shape, dtypes, "draft" if self.draft else part)

    def _dense(self, name: str, out: int, inner: int, part: str) -> Iterator[TensorSpec]:
        part = "draft" if self.draft else part
        return linear(f"{self.prefix}.{name}", out, inner, self.config.weights.dense, part)

    def mixing(self) -> Iterator[TensorSpec]:
        """The two norms, and mHC's mixing: rows of fn, base = [pre n | post n | comb n x n]."""
        d, n = self.config.hidden_size, self.config.hc_mult
        for sub in ("attn", "ffn"):
            yield self._plain(f"{sub}_norm.weight", (d,), _BF16, "norms")
        for sub in ("attn", "ffn"):
            yield self._plain(f"hc_{sub}_fn", ((2 + n) * n, n * d), _F32, "mhc")
            yield self._plain(f"hc_{sub}_base", ((2 + n) * n,), _F32, "mhc")
            yield self._plain(f"hc_{sub}_scale", (3,), _F32, "mhc")

    def attention(self) -> Iterator[TensorSpec]:
        c = self.config
        part = "attention"
        yield self._plain("attn.attn_sink", (c.num_attention_heads,), _F32, part)
        yield from self._dense("attn.wq_a", c.q_lora_rank, c.hidden_size, part)
        yield self._plain("attn.q_norm.weight", (c.q_lora_rank,), _BF16, part)
        yield from self._dense("attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank, part)
        yield from self._dense("attn.wkv", c.head_dim, c.hidden_size, part)
        yield self._plain("attn.kv_norm.weight", (c.head_dim,), _BF16, part)
        group_width = c.num_attention_heads * c.head_dim // c.o_groups
        yield from self._dense("attn.wo_a", c.o_groups * c.o_lora_rank, group_width, part)
        yield from self._dense("attn.wo_b", c.hidden_size, c.o_groups * c.o_lora_rank, part)

    def compressor(self, ratio: int) -> Iterator[TensorSpec]:
        """A source of ratio 1 has nothing to weigh, hence no gate."""
        c = self.config
        yield self._plain("attn.compressor.wkv.weight", (c.head_dim, c.hidden_size), _BF16, "compressor")
        if ratio > 1:
            yield self._plain("attn.compressor.wgate.weight", (c.head_dim, c.hidden_size), _BF16, "compressor")
        yield self._plain("attn.compressor.norm.weight", (c.head_dim,), _BF16, "compressor")

    def indexer(self, has_key: bool) -> Iterator[TensorSpec]:
        c = self.config
        part = "indexer"
        yield from self._dense("attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, part)
        yield self._plain("attn.indexer.weights_proj.weight", (c.index_n_heads, c.hidden_size), _BF16, part)
        if has_key:
            yield self._plain("attn.indexer.wk.weight", (c.index_head_dim, c.head_dim), _BF16, part)
            yield self._plain("attn.indexer.k_norm.weight", (c.index_head_dim,), _BF16, part)

    def feed_forward(self) -> Iterator[TensorSpec]:
        c = self.config
        d, width = c.hidden_size, c.moe_intermediate_size
        experts = c.dspark_n_routed_experts if self.draft else c.n_routed_experts
        if experts:
            yield self._plain("ffn.gate.weight", (experts, d), _BF16, "router")
            yield self._plain("ffn.gate.bias", (experts,), _F32, "router")
            if c.vision is not None:  # drafts hold one too and never use it
                yield self._plain("ffn.gate.bias_vl", (experts,), _F32, "router")
        part = "draft_experts" if self.draft else "experts"
        for expert in range(experts):
            stem = f"{self.prefix}.ffn.experts.{expert}"
            yield from linear(f"{stem}.w1", width, d, c.weights.experts, part)
            yield from linear(f"{stem}.w2", d, width, c.weights.experts, part)
            yield from linear(f"{stem}.w3", width, d, c.weights.experts, part)
        if c.n_shared_experts:
            shared = width * c.n_shared_experts
            yield from self._dense("ffn.shared_experts.w1", shared, d, "shared")
            yield from self._dense("ffn.shared_experts.w2", d, shared, "shared")
            yield from self._dense("ffn.shared_experts.w3", shared, d, "shared")

    def engram(self, rows: int) -> Iterator[TensorSpec]:
        """One table a layer; its rows of (max_ngram - 1) x heads buckets feed n keys and one value."""
        c = self.config
        inner = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
        yield from table(f"{self.prefix}.engram.embed", rows, c.engram_head_dim, c.weights.engram, "engram_tables")
        yield from self._dense("engram.wkv", c.hidden_size * (c.hc_mult + 1), inner, "engram")
        yield self._plain("engram.q_weight", (c.hc_mult, c.hidden_size), _BF16, "engram")
        yield self._plain("engram.k_weight", (c.hc_mult, c.hidden_size), _BF16, "engram")


def linear(stem: str, out: int, inner: int, stored: str, part: str) -> Iterator[TensorSpec]:
    """A weight [out, inner] stored as "fp8", "fp4", or plain ("bf16", "fp32")."""
    if stored == "fp8":
        yield TensorSpec(f"{stem}.weight", (out, inner), ("F8_E4M3",), part)
        yield TensorSpec(f"{stem}.scale", (_groups(out), _groups(inner)), ("F8_E8M0",), part)
    elif stored == "fp4":
        yield TensorSpec(f"{stem}.weight", (out, inner // 2), ("I8",), part)
        yield TensorSpec(f"{stem}.scale", (out, inner // GROUP), ("F8_E8M0",), part)
    else:
        yield TensorSpec(f"{stem}.weight", (out, inner), _plain_dtypes(stored), part)


def table(stem: str, rows: int, width: int, stored: str, part: str) -> Iterator[TensorSpec]:
    """A look-up table [rows, width]; unlike a linear weight its FP8 scales run along the row."""
    if stored == "fp8":
        yield TensorSpec(f"{stem}.weight", (rows, width), ("F8_E4M3",), part)
        yield TensorSpec(f"{stem}.scale", (rows, _groups(width)), ("F8_E8M0",), part)
    else:
        yield TensorSpec(f"{stem}.weight", (rows, width), _plain_dtypes(stored), part)


def _plain_dtypes(stored: str) -> tuple[str, ...]:
    assert stored in ("bf16", "fp32"), stored
    return _BF16 if stored == "bf16" else _F32


def _groups(width: int) -> int:
    return -(-width // GROUP)


def _draft_ends(config: ModelConfig) -> Iterator[TensorSpec]:
    """What the drafts share: the projection into the first, the norm and heads after the last."""
    d, rank = config.hidden_size, config.dspark_markov_rank
    inner = d * len(config.dspark_target_layer_ids)
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    yield from linear("mtp.0.main_proj", d, inner, config.weights.dense, "draft")
    yield TensorSpec("mtp.0.main_norm.weight", (d,), _BF16, "draft")
    yield TensorSpec(f"{last}.norm.weight", (d,), _BF16, "draft")
    if rank:
        yield TensorSpec(f"{last}.markov_head.embed.weight", (config.vocab_size, rank), _BF16, "draft")
        yield TensorSpec(f"{last}.markov_head.head.weight", (config.vocab_size, rank), _BF16, "draft")
    yield TensorSpec(f"{last}.confidence_head.proj.weight", (1, d + rank), _BF16, "draft")


def _vision(config: ModelConfig) -> Iterator[TensorSpec]:
    """The tower, the aligner, and the three learned vectors around an image's features. Never quantised."""
    vision = config.vision
    assert vision is not None
    width, inner = vision.hidden_size, vision.intermediate_size
    patch = 3 * vision.patch_size**2
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("vision.patch_embed.proj.weight", (width, patch)),
        ("vision.patch_embed.proj.bias", (width,)),
    ]
    for block in range(vision.num_hidden_layers):
        stem = f"vision.blocks.{block}"
        shapes += [
            (f"{stem}.norm1.weight", (width,)),
            (f"{stem}.attn.wqkv.weight", (3 * width, width)),
            (f"{stem}.attn.wqkv.bias", (3 * width,)),
            (f"{stem}.attn.wo.weight", (width, width)),
            (f"{stem}.attn.wo.bias", (width,)),
            (f"{stem}.norm2.weight", (width,)),
            (f"{stem}.mlp.w1.weight", (2 * inner, width)),
            (f"{stem}.mlp.w2.weight", (width, inner)),
        ]
    d, unshuffled = config.hidden_size, width * vision.downsample_ratio**2
    shapes += [("vision.norm.weight", (width,))]
    shapes += [("aligner.w1.weight", (d, unshuffled)), ("aligner.w1.bias", (d,))]
    shapes += [("aligner.w2.weight", (d, d)), ("aligner.w2.bias", (d,))]
    shapes += [(name, (d,)) for name in ("image_start", "image_end", "image_newline")]
    for name, shape in shapes:
        yield TensorSpec(name, shape, _BF16, "vision")
