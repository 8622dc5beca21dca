"""Which number format each cache is stored in, by name.

The names are those of `rorqual.formats.spec.FORMATS`, which lives on the same rank: `rorqual.layout` resolves them, and
a test keeps the two lists equal. The two FP4 formats differ in scale type and group, and never share a name (SPEC 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from rorqual.config.checks import choice

FORMAT_GROUPS: Mapping[str, int] = MappingProxyType(
    {
        "e2m1_e4m3_16": 16,
        "e2m1_e8m0_32": 32,
        "e4m3_e8m0_32": 32,
        "e2m1_unscaled": 2,
        "bf16": 1,
        "fp32": 1,
    }
)
"""Format name -> what a row's width must be a multiple of: its scale group, or 2 where two codes share a byte."""

LEGAL_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "main": tuple(FORMAT_GROUPS),
        "index_key": tuple(FORMAT_GROUPS),
        # Windows are never persisted or shared, so FP4 saves nothing that lasts there; only wider choices are offered.
        "window": ("e4m3_e8m0_32", "bf16", "fp32"),
    }
)
"""Cache -> the formats it may take. Unscaled FP4 clips at 6: for ablations only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormats:
    """Formats of the global main KV, the index keys (and index queries), and the window KV. Defaults: the release's."""

    main: str = "e2m1_e4m3_16"
    index_key: str = "e2m1_e8m0_32"
    window: str = "e4m3_e8m0_32"

    def __post_init__(self) -> None:
        for field in fields(self):
            choice(LEGAL_FORMATS[field.name])(f"cache_formats.{field.name}", getattr(self, field.name))
