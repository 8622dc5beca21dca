"""How many parameters a config has, by part, and how many one token uses. Pure functions of the config; no torch.

A parameter is a value the model was trained for: an FP4 byte holds two, a scale is none. Everything is counted from
`names.expected_tensors`, the same table that a checkpoint is read and written by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rorqual.config import LayerRole, ModelConfig, Part
from rorqual.inventory.names import PARTS, TensorSpec, expected_tensors, layer_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveParameters:
    """Parameters that one token is multiplied with, embedding look-ups left out.

    decode: all backbone layers, the chosen experts only, Engram's projection but not its table.
    head: the output head, needed once a sampled token.
    prefill: what every prompt token meets under CED, the encoder layers. The decoder's layers run on the last window
        only, whatever the prompt.
    seam: the one thing of the decoder that every prompt token does meet, the last KV source's compressor and index key
        (2.7 M in the release; left out of the quoted 7.89 B).
    """

    decode: int
    head: int
    prefill: int
    seam: int

    @property
    def decode_with_head(self) -> int:
        return self.decode + self.head


def parameter_count(spec: TensorSpec) -> int:
    """Values that `spec` holds: 0 for a scale, two a byte for packed FP4."""
    if spec.dtypes[0] == "F8_E8M0":
        return 0
    return spec.elements * (2 if spec.dtypes[0] == "I8" else 1)


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Parameters of each part the config has, in the order of `names.PARTS`."""
    counts = dict.fromkeys(PARTS, 0)
    for spec in expected_tensors(config).values():
        counts[spec.part] += parameter_count(spec)
    return {part: count for part, count in counts.items() if count}


def backbone_parameters(by_part: Mapping[str, int]) -> int:
    """Embedding, head, norms, mHC, attention, compressors, indexers, routers, routed and shared experts.

    Neither Engram (tables, projections, gate weights) nor the drafts nor vision: 551.6 B in the release.
    """
    outside = ("engram_tables", "engram", "vision", "draft", "draft_experts")
    return sum(count for part, count in by_part.items() if part not in outside)


def expert_parameters(config: ModelConfig) -> int:
    """Parameters of one routed expert: 3 x hidden x expert width = 35,389,440 in the release."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def active_parameters(config: ModelConfig) -> ActiveParameters:
    """Parameters used per token: 15.47 B in decode (16.13 B with the head) and 7.89 B in CED prefill in the release."""
    fixed = _fixed_by_layer(config)
    backbone = config.roles[: config.num_hidden_layers]
    chosen = min(config.num_experts_per_tok, config.n_routed_experts) * expert_parameters(config)
    by_layer = {role.layer_id: fixed[role.layer_id] + chosen for role in backbone}
    prefill = sum(by_layer[role.layer_id] for role in backbone if role.part is Part.ENCODER)
    decoder = [role for role in backbone if role.part is Part.DECODER]
    output_norm = config.hidden_size
    return ActiveParameters(
        decode=sum(by_layer.values()) + output_norm,
        head=config.vocab_size * config.hidden_size,
        prefill=prefill,
        seam=_source_projection(config, decoder[0]) if decoder else 0,
    )


def _fixed_by_layer(config: ModelConfig) -> dict[int, int]:
    """Per backbone layer id, the parameters every token meets: all but routed experts and Engram tables."""
    by_prefix: dict[str, int] = {}
    for name, spec in expected_tensors(config).items():
        if name.startswith("layers.") and spec.part not in ("experts", "engram_tables"):
            stem = name[: name.index(".", len("layers."))]
            by_prefix[stem] = by_prefix.get(stem, 0) + parameter_count(spec)
    return {layer_id: by_prefix[layer_prefix(config, layer_id)] for layer_id in range(config.num_hidden_layers)}


def _source_projection(config: ModelConfig, source: LayerRole) -> int:
    """What the last KV source does for every prompt token: compress it, and derive its index key."""
    projections = 1 if source.ratio == 1 else 2
    compressor = projections * config.head_dim * config.hidden_size + config.head_dim
    return compressor + config.index_head_dim * config.head_dim + config.index_head_dim
