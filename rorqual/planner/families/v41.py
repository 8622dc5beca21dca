"""V4.1 as one of the families: its bytes are `rorqual.layout`'s, here only sorted into groups that cache alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rorqual.config import CacheFormats, ModelConfig
from rorqual.layout import KVLayout
from rorqual.planner.families.family import BF16, Family, Group, Storage

MODEL_TYPES = ("deepseek_v41",)
NATIVE = "packed"


def read(source: str | os.PathLike[str] | Mapping[str, Any], name: str) -> Family:
    """The cache of a V4.1 config, parsed or by path; bytes by `rorqual.layout.KVLayout`. Source: `of_config`.

    >>> from rorqual.config import presets
    >>> read(presets.load("v4.1-flash").to_hf_dict(), "copy").token_bytes()
    Fraction(890, 1)

    Raises:
        ConfigError: as `ModelConfig.from_json`.
    """
    return of_config(ModelConfig.from_json(source), name)


def of_config(config: ModelConfig, name: str) -> Family:
    """The cache of a V4.1 config, in bytes. Source: `rorqual.layout`, SPEC 11.

    >>> from rorqual.config import presets
    >>> family = of_config(presets.load("v4.1-flash"), "v4.1-flash")
    >>> int(family.token_bytes()), family.fixed_bytes(), int(family.token_bytes("bf16"))
    (890, 2703360, 3200)
    """
    formats = config.cache
    wide = config.replace(cache=CacheFormats(main=BF16, index_key=BF16, window=BF16))
    stored = f"{formats.main} main KV, {formats.index_key} index keys, {formats.window} windows"
    native = Storage(name=NATIVE, groups=_groups(config), source=f"the config's cache formats: {stored}")
    bf16 = Storage(name=BF16, groups=_groups(wide), source="the same elements, two bytes each")
    return Family(
        name=name,
        model_type=MODEL_TYPES[0],
        attention="CSA2",
        max_tokens=config.max_position_embeddings,
        storages=(bf16,) if formats == wide.cache else (native, bf16),
    )


def _groups(config: ModelConfig) -> tuple[Group, ...]:
    """KV sources by their ratio, in layer order; then the windows of all layers."""
    layout = KVLayout(config)
    ratios = [source.ratio for source in layout.sources]
    groups = []
    for ratio in dict.fromkeys(ratios):
        main = layout.main_format.row_bytes(config.head_dim)
        index = layout.index_format.row_bytes(config.index_head_dim)
        groups.append(
            Group(
                name=f"KV sources of ratio {ratio}",
                layers=ratios.count(ratio),
                entry_bytes=main + index,
                entry=f"{main} main KV + {index} index key",
                entry_tokens=ratio,
            )
        )
    window = Group(
        name="window",
        layers=config.num_hidden_layers,
        entry_bytes=layout.window_row_bytes,
        entry=str(layout.window_row_bytes),
        window=config.sliding_window,
    )
    return (*groups, window)
