"""`ModelConfig`: the one description of a model, with the field names of the Hugging Face `text_config`.

Every technique has a value that turns it off: compression and indexing (all ratios 0, no sources), the candidate pool
(`candidate_source_layer_id` -1), mHC (`hc_mult` 1), routed experts (`n_routed_experts` 0), the shared expert
(`n_shared_experts` 0), the SwiGLU clamp (`swiglu_limit` 0), YaRN (`rope_scaling` None, or a factor of 1), Engram (no
layer ids), drafts (`num_nextn_predict_layers` 0), vision (None). `without()` does it by name, for those that span
several fields too. Settings of a technique that is off are kept; only their type and range are checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rorqual.config import depth, files, huggingface, inference, validate
from rorqual.config.cache_formats import CacheFormats
from rorqual.config.parts import RopeScaling, VisionConfig, WeightFormats
from rorqual.config.roles import LayerRole, Part, derive_roles
from rorqual.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Frozen and valid once made; legal values are in `rorqual.config.validate`. Lists are taken and kept as tuples."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None = None

    compress_ratios: tuple[int, ...]
    """One per layer, the drafts' last: 43 for 40 layers and 3 drafts. Names the cache a layer reads; 0 reads none."""
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0

    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    gate_temp: float = 1.0
    swiglu_limit: float

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    """Table rows, one entry per Engram layer: the sums of that layer's primes (SPEC 8)."""
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0

    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    # The inference layout does not state the first three; these are the release's.
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = -1
    """-1 is legal for a text-only model."""

    vision: VisionConfig | None = None
    weights: WeightFormats = field(default_factory=WeightFormats)
    cache: CacheFormats = field(default_factory=CacheFormats)

    roles: tuple[LayerRole, ...] = field(init=False, repr=False, compare=False)
    """Backbone layers, then drafts: `roles[i].layer_id == i`."""

    def __post_init__(self) -> None:
        validate.config(self)
        object.__setattr__(self, "roles", derive_roles(self))

    @property
    def decoder_start(self) -> int:
        """The last KV source, wherever it lies; `num_hidden_layers` (everything is encoder) when there is none."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else self.num_hidden_layers

    @property
    def backbone_roles(self) -> tuple[LayerRole, ...]:
        return self.roles[: self.num_hidden_layers]

    @property
    def draft_roles(self) -> tuple[LayerRole, ...]:
        return tuple(role for role in self.roles if role.part is Part.DRAFT)

    @property
    def kv_sources(self) -> tuple[LayerRole, ...]:
        """The roles that own global KV, in layer order."""
        return tuple(self.roles[layer_id] for layer_id in self.kv_source_layer_ids)

    @property
    def engram_columns(self) -> int:
        """Row ids a token looks up in each table: 3 n-gram sizes x 8 heads = 24 in the release; 0 without Engram."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads if self.engram_layer_ids else 0

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """From a `config.json` or `inference_config.json`, parsed or by path, or a folder that holds one or both.

        In a folder the Hugging Face file is preferred; a field that both files state must have the same value.
        Errors: ConfigError naming the field, or the model type when it is not exactly `deepseek_v41`.
        """
        reading = files.read(source)
        with reading.located():
            stated = reading.constructor_fields()
            for f in dataclasses.fields(cls):
                if f.init and f.name not in stated and f.default is f.default_factory is dataclasses.MISSING:
                    raise ConfigError(f"{f.name} is missing")
            return cls(**stated)

    def to_hf_dict(self) -> dict[str, Any]:
        """As the Hugging Face `config.json`. `from_json` of it gives an equal config."""
        return huggingface.to_dict(self)

    def to_inference_dict(self) -> dict[str, Any]:
        """As the release's `inference/config.json`; what that layout has no key for is added only if not default."""
        return inference.to_dict(self)

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, validated afresh."""
        legal = {f.name for f in dataclasses.fields(self) if f.init}
        for name in changes:
            if name not in legal:
                raise ConfigError(f"{name} is not a field of ModelConfig; legal: {', '.join(sorted(legal))}")
        return dataclasses.replace(self, **changes)

    def with_depth(self, layer_ids: Sequence[int]) -> ModelConfig:
        """A depth cut: only these backbone layers, renumbered from 0, every role as before (`rorqual.config.depth`)."""
        return self.replace(**depth.cut(self, layer_ids))

    def without(self, *techniques: str) -> ModelConfig:
        """A copy with whole techniques turned off; names in `rorqual.config.depth.TECHNIQUES`."""
        return self.replace(**depth.switched_off(self, techniques))

    def fingerprint(self) -> str:
        """sha256 (hex) of the canonical JSON: equal for equal configs, whatever file they were read from."""
        stated = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}
        text = json.dumps(stated, sort_keys=True, separators=(",", ":"), default=dataclasses.asdict)
        return hashlib.sha256(text.encode()).hexdigest()
