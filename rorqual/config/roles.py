"""Who computes and who shares, one record per layer (SPEC 1). Derived once, by `ModelConfig`; read everywhere.

mode     condition                        computes                                   reads
SWA      ratio 0                          own Q, own window KV                       -
FULL     ratio > 0, a KV source           + main KV, index key, index query, Top-K   its own
REINDEX  ratio > 0, an index source only  + index query, Top-K                       KV and keys of its KV source
REUSE    ratio > 0, neither               own Q, own window KV                       KV of one, Top-K of another
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rorqual.config.model import ModelConfig


class Mode(StrEnum):
    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


class Part(StrEnum):
    ENCODER = "encoder"
    DECODER = "decoder"
    DRAFT = "draft"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRole:
    """What one layer does. `layer_id` counts the backbone and then the drafts: mtp.0 of 40 layers is 40.

    `kv_source` and `index_source` are layer ids: itself where the layer is the source, None for SWA.
    `uses_candidates`: this layer's indexer scores only the candidate pool. The candidate source's own does not.
    `engram_index`: position in `engram_layer_ids`, None for a layer without Engram. `draft_index`: K of mtp.K.
    """

    layer_id: int
    mode: Mode
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_candidate_source: bool
    uses_candidates: bool
    engram_index: int | None
    part: Part
    draft_index: int | None

    @property
    def is_kv_source(self) -> bool:
        """Computes and stores main KV and index keys."""
        return self.mode is Mode.FULL

    @property
    def is_index_source(self) -> bool:
        """Computes index queries and a Top-K."""
        return self.mode in (Mode.FULL, Mode.REINDEX)


def nearest_at_or_before(layer_id: int, sources: tuple[int, ...]) -> int | None:
    """The last of the ascending `sources` that is not after `layer_id`.

    >>> nearest_at_or_before(24, (2, 8, 14, 20)), nearest_at_or_before(8, (2, 8)), nearest_at_or_before(1, (2, 8))
    (20, 8, None)
    """
    return max((source for source in sources if source <= layer_id), default=None)


def derive_roles(config: ModelConfig) -> tuple[LayerRole, ...]:
    """Roles of the backbone layers, then of the drafts. The config has been validated."""
    backbone = tuple(_backbone_role(config, layer_id) for layer_id in range(config.num_hidden_layers))
    drafts = tuple(_draft_role(config, index) for index in range(config.num_nextn_predict_layers))
    return backbone + drafts


def _backbone_role(config: ModelConfig, layer_id: int) -> LayerRole:
    ratio = config.compress_ratios[layer_id]
    engram = config.engram_layer_ids
    candidate = config.candidate_source_layer_id
    mode = _mode(config, layer_id, ratio)
    return LayerRole(
        layer_id=layer_id,
        mode=mode,
        ratio=ratio,
        kv_source=nearest_at_or_before(layer_id, config.kv_source_layer_ids) if ratio else None,
        index_source=nearest_at_or_before(layer_id, config.index_source_layer_ids) if ratio else None,
        is_candidate_source=layer_id == candidate,
        uses_candidates=mode in (Mode.FULL, Mode.REINDEX) and 0 <= candidate < layer_id,
        engram_index=engram.index(layer_id) if layer_id in engram else None,
        part=Part.ENCODER if layer_id < config.decoder_start else Part.DECODER,
        draft_index=None,
    )


def _mode(config: ModelConfig, layer_id: int, ratio: int) -> Mode:
    if not ratio:
        return Mode.SWA
    if layer_id in config.kv_source_layer_ids:
        return Mode.FULL
    return Mode.REINDEX if layer_id in config.index_source_layer_ids else Mode.REUSE


def _draft_role(config: ModelConfig, index: int) -> LayerRole:
    return LayerRole(
        layer_id=config.num_hidden_layers + index,
        mode=Mode.SWA,
        ratio=0,
        kv_source=None,
        index_source=None,
        is_candidate_source=False,
        uses_candidates=False,
        engram_index=None,
        part=Part.DRAFT,
        draft_index=index,
    )
