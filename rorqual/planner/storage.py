"""How engines store a cache row, and what that makes of this config's bytes a token.

A storage is three row widths: main KV, index key, window. With E = sum of 1 / ratio over the KV sources (2.5 entries a
token in the release, head dim c = 512, rotary D = 64, index head dim i = 128):

    packed       (c/2 + c/16) + (i/2 + i/32)               = 288 + 68            x 2.5 =   890
    fp8-uniform  (c + c/32) + (68, or i + 4 i/128 = 132)   = 528 + 68 or 132     x 2.5 = 1,490 or 1,650
    v4-rows      (c - D) + 2 D + 8-aligned (c - D)/64      = 448 + 128 + 8 = 584
                 + (68 or 132)                                                   x 2.5 = 1,630 or 1,790
    bf16         2 c + 2 i                                 = 1,024 + 256         x 2.5 = 3,200
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from rorqual.errors import InputError
from rorqual.formats.spec import FORMATS
from rorqual.layout import KVLayout
from rorqual.planner.spelling import entries_per_token
from rorqual.planner.units import plain_number

STORAGES = ("packed", "fp8-uniform", "v4-rows", "bf16")
V4_SCALE_GROUP = 64  # channels under one scale byte of a V4 row
V4_SCALE_ALIGN = 8
FP8_INDEX_GROUP = 128  # channels of an index key under one fp32 scale
FP32_BYTES, BF16_BYTES = 4, 2

USERS: Mapping[str, str] = MappingProxyType(
    {
        "packed": "this project: the bytes that the report counts and the engine allocates",
        "fp8-uniform": "an engine with one FP8 dtype for every entry, windows included (`--kv-cache-dtype fp8` in vLLM "
        "and SGLang, as of 2026; its use for this model is not verified here)",
        "v4-rows": "the 584-byte rows that kernels for DeepSeek-V4 read: FP8 channels, bf16 rotary, 8 scale bytes "
        "(FlashMLA, and vLLM and SGLang on top of it, as of 2026; not verified here)",
        "bf16": "an engine that keeps the cache in the model's dtype (Hugging Face transformers by default, as of "
        "2026; its use for this model is not verified here)",
    }
)
"""Which public engines store so. Nothing here was measured on them: dated, and marked where it is hearsay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """Row widths of one storage, in bytes.

    storage: one of `STORAGES`. index_key: "as configured", "FP4", "FP8" or "BF16". arithmetic: how main + index came
    about.
    """

    storage: str
    index_key: str
    main: int
    index: int
    window: int
    arithmetic: str

    @property
    def entry(self) -> int:
        """Bytes of one compressed group."""
        return self.main + self.index


def row_formats(layout: KVLayout) -> tuple[RowFormat, ...]:
    """All storages of this config, `packed` first; those whose index key engines store in two ways come twice.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> [(rows.storage, str(bytes_per_token(layout, rows))) for rows in row_formats(layout)]
    [('packed', '890'), ('fp8-uniform', '1490'), ('fp8-uniform', '1650'), ('v4-rows', '1630'), ('v4-rows', '1790'), \
('bf16', '3200')]

    Unit: bytes a row. Source: the table at the top of this module.
    """
    config = layout.config
    c, rope, i = config.head_dim, config.qk_rope_head_dim, config.index_head_dim
    packed = RowFormat(
        storage="packed",
        index_key="as configured",
        main=layout.main_format.row_bytes(c),
        index=layout.index_format.row_bytes(i) if layout.sources else 0,
        window=layout.window_row_bytes,
        arithmetic=f"{config.cache.main} of {c}, {config.cache.index_key} of {i}",
    )
    fp8 = c + -(-c // FORMATS["e4m3_e8m0_32"].group)
    scales = -(-(c - rope) // V4_SCALE_GROUP)
    aligned = -(-scales // V4_SCALE_ALIGN) * V4_SCALE_ALIGN
    v4 = (c - rope) + BF16_BYTES * rope + aligned
    mixed = f"{c - rope} FP8 + {BF16_BYTES} x {rope} bf16 + {aligned} scale bytes"
    bf16 = RowFormat(
        storage="bf16",
        index_key="BF16",
        main=BF16_BYTES * c,
        index=BF16_BYTES * i,
        window=BF16_BYTES * c,
        arithmetic=f"2 x {c}, index key 2 x {i}",
    )
    uniform = _both("fp8-uniform", fp8, f"{c} FP8 + {fp8 - c} scale bytes", i)
    return (packed, *uniform, *_both("v4-rows", v4, mixed, i), bf16)


def _both(storage: str, main: int, arithmetic: str, index_head_dim: int) -> tuple[RowFormat, RowFormat]:
    """With an FP4 index key (E8M0 per 32) and with an FP8 one (fp32 scale per 128). Windows are stored as main KV."""
    fp4 = -(-index_head_dim // 2) + -(-index_head_dim // FORMATS["e2m1_e8m0_32"].group)
    fp8 = index_head_dim + FP32_BYTES * -(-index_head_dim // FP8_INDEX_GROUP)
    small, large = (
        RowFormat(
            storage=storage,
            index_key=name,
            main=main,
            index=index,
            window=main,
            arithmetic=f"{arithmetic}, index key {index}",
        )
        for name, index in (("FP4", fp4), ("FP8", fp8))
    )
    return small, large


def row_format(layout: KVLayout, storage: str) -> RowFormat:
    """The rows to plan with: of two, the larger, so that what fits so fits either way.

    >>> from rorqual.config import presets
    >>> row_format(KVLayout(presets.load("v4.1-flash")), "v4-rows").entry
    716

    Unit: bytes a row. Source: `row_formats`. Raises InputError naming the storages.
    """
    if storage not in STORAGES:
        raise InputError(f"--storage must be one of {', '.join(STORAGES)}; got {storage!r}")
    return max((rows for rows in row_formats(layout) if rows.storage == storage), key=lambda rows: rows.entry)


def bytes_per_token(layout: KVLayout, rows: RowFormat) -> Fraction:
    """Global bytes a token, exact. It is a property of the rows, whatever length is planned for.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> bytes_per_token(layout, row_format(layout, "bf16"))
    Fraction(3200, 1)

    Source: entries a token x bytes of an entry: 2.5 x 1,280.
    """
    return entries_per_token(layout) * rows.entry


def page_bytes(layout: KVLayout, rows: RowFormat) -> int:
    """Bytes of a page in these rows; for `packed` those that the engine allocates.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> page_bytes(layout, row_format(layout, "packed")), page_bytes(layout, row_format(layout, "bf16"))
    (113920, 409600)

    Source: page tokens / ratio entries of each source.
    """
    return sum(source.entries for source in layout.sources) * rows.entry


def slot_bytes(layout: KVLayout, rows: RowFormat) -> int:
    """Fixed bytes of a sequence in these rows, as allocated; tails and history are the same in all of them.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> slot_bytes(layout, row_format(layout, "packed")), slot_bytes(layout, row_format(layout, "bf16"))
    (3085504, 5914688)

    Source: `KVLayout.sequence_bytes_allocated`, its 40 x 133 + 3 x 128 window rows at the storage's width.
    """
    config = layout.config
    ring = config.num_hidden_layers * layout.ring_rows + layout.draft_layers * config.sliding_window
    return layout.sequence_bytes_allocated + ring * (rows.window - layout.window_row_bytes)


def slot_bytes_logical(layout: KVLayout, rows: RowFormat) -> int:
    """Fixed bytes of a sequence in these rows, as the mathematics needs them: no rows for a rollback.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> slot_bytes_logical(layout, row_format(layout, "packed"))
    2918424

    Source: `KVLayout.sequence_bytes_logical`: 2,703,360 + 202,752 + 12,288 + 24.
    """
    config = layout.config
    windows = (config.num_hidden_layers + layout.draft_layers) * config.sliding_window
    return layout.sequence_bytes_logical + windows * (rows.window - layout.window_row_bytes)


def global_bytes_logical(layout: KVLayout, rows: RowFormat, tokens: int) -> int:
    """Bytes of the complete groups of a sequence in these rows.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> global_bytes_logical(layout, row_format(layout, "packed"), 129)
    114276

    Source: (3 x 64 + 129) x 356.
    """
    return sum(tokens // source.ratio for source in layout.sources) * rows.entry


def range_text(layout: KVLayout, storage: str) -> str:
    """Bytes a token of a storage, both ways of storing the index key where there are two.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> [range_text(layout, storage) for storage in STORAGES]
    ['890', '1,490-1,650', '1,630-1,790', '3,200']

    Unit: bytes a token. Source: `row_formats`.
    """
    values = sorted({bytes_per_token(layout, rows) for rows in row_formats(layout) if rows.storage == storage})
    return "-".join(f"{plain_number(value):,}" for value in values)
