"""Smaller models from larger ones, as changes of fields: a depth cut (field case 39), and whole techniques turned off.

A cut keeps some backbone layers and renumbers every id list. A kept layer keeps its mode, its sources and its use of
the candidate pool, so the layers it reads from must be kept too; otherwise it would quietly read another layer's cache.
What may change: the decoder still begins at the last KV source that is left, and Engram hashes differently, because the
hash multipliers are drawn from the layer id (`default_rng(10007 * layer_id)`). Trained tables therefore do not survive
a renumbering; and since primes are dealt out in order of the Engram layers, the k tables left have the sizes of the
first k, whichever layers they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rorqual.config.checks import refuse
from rorqual.errors import ConfigError

if TYPE_CHECKING:
    from rorqual.config.model import ModelConfig

TECHNIQUES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "compression": {
            "kv_source_layer_ids": (),
            "index_source_layer_ids": (),
            "candidate_source_layer_id": -1,
        },
        "candidates": {"candidate_source_layer_id": -1},
        "mhc": {"hc_mult": 1},
        "routed_experts": {"n_routed_experts": 0, "dspark_n_routed_experts": 0},
        "shared_expert": {"n_shared_experts": 0},
        "swiglu_clamp": {"swiglu_limit": 0.0},
        "yarn": {"rope_scaling": None},
        "engram": {"engram_layer_ids": (), "engram_num_embeddings": ()},
        "drafts": {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": ()},
        "vision": {"vision": None},
    }
)
"""Technique -> the values that turn it off. "compression" and "drafts" also change `compress_ratios`."""


def switched_off(config: ModelConfig, techniques: Sequence[str]) -> dict[str, Any]:
    """Field changes that turn the named techniques off together."""
    changes: dict[str, Any] = {}
    for name in techniques:
        if name not in TECHNIQUES:
            raise refuse("technique", "one of " + ", ".join(TECHNIQUES), name)
        changes |= TECHNIQUES[name]
    backbone, drafts = _split_ratios(config)
    if "compression" in techniques:
        backbone = (0,) * len(backbone)
    if "drafts" in techniques:
        drafts = ()
    return changes | {"compress_ratios": backbone + drafts}


def cut(config: ModelConfig, layer_ids: Sequence[int]) -> dict[str, Any]:
    """Field changes that leave only `layer_ids` of the backbone. Drafts stay."""
    kept = _checked(config, layer_ids)
    new_id = {old: new for new, old in enumerate(kept)}
    for layer_id in kept:
        _require_sources(config, layer_id, new_id)
    backbone, drafts = _split_ratios(config)
    engram = _renumbered(config.engram_layer_ids, new_id)
    return {
        "num_hidden_layers": len(kept),
        "compress_ratios": tuple(backbone[layer_id] for layer_id in kept) + drafts,
        "kv_source_layer_ids": _renumbered(config.kv_source_layer_ids, new_id),
        "index_source_layer_ids": _renumbered(config.index_source_layer_ids, new_id),
        "candidate_source_layer_id": new_id.get(config.candidate_source_layer_id, -1),
        "engram_layer_ids": engram,
        "engram_num_embeddings": config.engram_num_embeddings[: len(engram)],
        "dspark_target_layer_ids": _targets(config, new_id),
    }


def _checked(config: ModelConfig, layer_ids: Sequence[int]) -> tuple[int, ...]:
    kept = tuple(layer_ids)
    legal = f"one or more ascending layers in 0..{config.num_hidden_layers - 1}"
    if not kept or any(type(i) is not int or not 0 <= i < config.num_hidden_layers for i in kept):
        raise refuse("layer_ids", legal, list(kept))
    if any(later <= earlier for earlier, later in pairwise(kept)):
        raise refuse("layer_ids", legal, list(kept))
    return kept


def _require_sources(config: ModelConfig, layer_id: int, new_id: Mapping[int, int]) -> None:
    role = config.roles[layer_id]
    needs = {"kv_source_layer_ids": role.kv_source, "index_source_layer_ids": role.index_source}
    if role.uses_candidates:
        needs["candidate_source_layer_id"] = config.candidate_source_layer_id
    for name, source in needs.items():
        if source is not None and source not in new_id:
            raise ConfigError(f"{name}: layer {layer_id} reads layer {source}, which the cut leaves out; keep both")


def _targets(config: ModelConfig, new_id: Mapping[int, int]) -> tuple[int, ...]:
    """The draft's target layers, mapped; if any was cut, as many of the last layers, where the release has them."""
    targets = config.dspark_target_layer_ids
    if all(target in new_id for target in targets):
        return _renumbered(targets, new_id)
    if not config.num_nextn_predict_layers:
        return ()
    if len(targets) > len(new_id):
        legal = f"{len(targets)} layers, which a cut to {len(new_id)} does not leave; turn the drafts off first"
        raise refuse("dspark_target_layer_ids", legal, list(targets))
    return tuple(range(len(new_id) - len(targets), len(new_id)))


def _renumbered(layer_ids: tuple[int, ...], new_id: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(new_id[layer_id] for layer_id in layer_ids if layer_id in new_id)


def _split_ratios(config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return config.compress_ratios[: config.num_hidden_layers], config.compress_ratios[config.num_hidden_layers :]
