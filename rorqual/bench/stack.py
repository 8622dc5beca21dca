"""The release's forty layers over the weights of two: a decode step of real cost in a tenth of the memory.

Layer i has the release's role of layer i and the weights of layer i mod 2 of a checkpoint of two layers, a ratio-1
source and a reader of it (preset `real-pair`). A step then reads the pair's weights twenty times, each after all of the
others, and its index scans, selections and attention are those of the release's roles on the release's cache. Every
index source of the release has an even id, so the pair's source has what they need; the gate of a ratio-2 compressor,
which the pair lacks, is its projection, a matrix of the same shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from rorqual.bench.checkpoints import active_bytes
from rorqual.bench.roofline import Work
from rorqual.checkpoint.load import Checkpoint
from rorqual.checkpoint.table import EngramTable
from rorqual.config import LayerRole, Mode, ModelConfig, presets
from rorqual.formats.weights import Weight
from rorqual.inventory.parameters import active_parameters
from rorqual.layout import PAGE_TOKENS, KVLayout
from rorqual.model.numerics import Numerics
from rorqual.model.transformer import Transformer
from rorqual.model.weights import Scope
from rorqual.ops.dispatch import Backend

PAIR = 2
RELEASE = "v4.1-flash"

T = TypeVar("T")


def stacked(pair: ModelConfig) -> ModelConfig:
    """`pair` with the release's layer plan: forty layers, their ratios, sources and candidate pool."""
    release = presets.load(RELEASE)
    return pair.replace(
        num_hidden_layers=release.num_hidden_layers,
        compress_ratios=release.compress_ratios[: release.num_hidden_layers],
        kv_source_layer_ids=release.kv_source_layer_ids,
        index_source_layer_ids=release.index_source_layer_ids,
        candidate_source_layer_id=release.candidate_source_layer_id,
    )


def composition(config: ModelConfig) -> str:
    """Layers by what they do, as a sum: `2 SWA + 3 Full (ratio 2) + ...`, and whose weights they have."""
    counts = Counter(_kind(role) for role in config.roles)
    layers = sum(counts.values())
    return (
        " + ".join(f"{count} {kind}" for kind, count in counts.items())
        + f" = {layers} layers; layer i has the weights of layer i mod {PAIR} of the pair, each read {layers // PAIR} x"
    )


def _kind(role: LayerRole) -> str:
    if role.mode is Mode.SWA:
        return "SWA"
    facts = [f"ratio {role.ratio}"]
    facts += ["candidate source"] if role.is_candidate_source else []
    facts += ["from the pool"] if role.uses_candidates else []
    return f"{role.mode.capitalize()} ({', '.join(facts)})"


def stacked_model(folder: Path, backend: Backend) -> Transformer:
    """The forty-layer model over the two-layer checkpoint in `folder`; fp32 numerics."""
    pair = ModelConfig.from_json(folder)
    assert pair.num_hidden_layers == PAIR and not pair.engram_layer_ids and not pair.num_nextn_predict_layers
    scope = RepeatedScope(Checkpoint.open(folder, pair).scope(), {})
    config, identity = stacked(pair), torch.arange(pair.vocab_size)
    model = Transformer(config, scope, Numerics(name="fp32"), backend, identity, PAGE_TOKENS)
    return model.eval().requires_grad_(False)


class RepeatedScope:
    """A scope of two layers that serves any number of them: each tensor is taken once and shared by its layers."""

    def __init__(self, source: Scope, made: dict[str, object], prefix: str = "") -> None:
        self._source, self._made, self._prefix = source, made, prefix

    def scope(self, prefix: str) -> RepeatedScope:
        return RepeatedScope(self._source, self._made, f"{self._prefix}{prefix}.")

    def has(self, name: str) -> bool:
        return self._source.has(self._stored(name))

    def param(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._once(name, lambda stored: self._source.param(stored, dtype))

    def tensor(self, name: str) -> Tensor:
        return self._once(name, self._source.tensor)

    def weight(self, name: str) -> Weight:
        return self._once(name, self._source.weight)

    def table(self, name: str) -> EngramTable:
        return self._once(name, self._source.table)

    def _once(self, name: str, take: Callable[[str], T]) -> T:
        stored = self._stored(name)
        if stored not in self._made:
            self._made[stored] = take(stored)
        return cast(T, self._made[stored])

    def _stored(self, name: str) -> str:
        """The name in the checkpoint of two layers."""
        parts = f"{self._prefix}{name}".split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % PAIR)
        return ".".join(parts).replace("compressor.wgate", "compressor.wkv")


def decode_work(config: ModelConfig, tokens: int) -> Work:
    """What a decoded token at `tokens` tokens needs: packed weights, index keys, selected groups, windows."""
    layout = KVLayout(config)
    backbone = config.roles[: config.num_hidden_layers]
    keys = groups = 0
    for role in backbone:
        visible = tokens // role.ratio if role.ratio else 0
        pool = config.candidate_topk_blocks * config.candidate_block_size
        if role.is_index_source:
            keys += min(visible, pool) if role.uses_candidates else visible
        groups += min(visible, config.index_topk)
    key_bytes = layout.index_format.row_bytes(config.index_head_dim)
    group_bytes = layout.main_format.row_bytes(config.head_dim)
    windows = len(backbone) * min(tokens, config.sliding_window) * layout.window_row_bytes
    weights, active = active_bytes(config), active_parameters(config).decode_with_head
    return Work(
        bytes=weights + keys * key_bytes + groups * group_bytes + windows,
        flops=2 * active + 2 * keys * config.index_n_heads * config.index_head_dim,
        formula=f"bytes = {weights} of packed weights + {keys} index keys x {key_bytes} + {groups} groups x "
        f"{group_bytes} + {windows} of windows, flops = 2 x {active} + 2 x {keys} x {config.index_n_heads} heads x "
        f"{config.index_head_dim}",
    )
