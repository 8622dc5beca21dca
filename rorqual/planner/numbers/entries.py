"""Bytes of an entry and of a token, and what they save against earlier models."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rorqual.layout import KVLayout
from rorqual.planner.families.formulas import v1_token_bytes, v3_token_bytes, v4_flash_token_bytes, v32_token_bytes
from rorqual.planner.figure import Figure
from rorqual.planner.numbers.exact import exact
from rorqual.planner.spelling import entries_per_token, per_token, row_formula, total
from rorqual.planner.units import fixed_text, number_text

PER_SOURCE = "sum over kv_source_layer_ids of 1 / compress_ratios[id]"
WITH_WINDOWS = 2
"""V4 stored its windows too, about as many bytes again as its global KV (V4.1 report): twice the saving on disk."""


def figures(layout: KVLayout) -> Iterator[Figure]:
    """From `main_entry_bytes` to `v1_saving`. Bytes; from the config, SPEC 2 and 11, and the models' own reports.

    >>> from rorqual.config import presets
    >>> shown = {figure.id: figure.shown for figure in figures(KVLayout(presets.load("v4.1-flash")))}
    >>> shown["global_token_bytes"], shown["v4_flash_token_bytes"], shown["v4_saving"]
    ('890', '3,514.25', '3.95')
    """
    if layout.sources:
        yield from _entries(layout)
        yield from _token(layout)
    yield from _since_v4(layout)
    yield from _since_v3(layout)
    yield from _since_v1(layout)


def _entries(layout: KVLayout) -> Iterator[Figure]:
    config, main, index = layout.config, layout.main_format, layout.index_format
    widths = {"head_dim": config.head_dim, "index_head_dim": config.index_head_dim}
    for id, fmt, (name, width) in zip(("main", "index"), (main, index), widths.items(), strict=True):
        yield Figure(
            id=f"{id}_entry_bytes",
            value=fmt.row_bytes(width),
            shown=f"{fmt.row_bytes(width):,}",
            unit="B/entry",
            formula=row_formula(fmt, name),
            expression=row_formula(fmt, width),
            provenance="derived",
            note=f"Stored as {fmt.name}.",
        )
    entry = layout.sources[0].entry_bytes
    if any(source.ratio == 2 for source in layout.sources):
        spelled = f"{main.row_bytes(config.head_dim):,} + {index.row_bytes(config.index_head_dim):,}"
        yield Figure(
            id="increment_ratio2",
            value=exact(Fraction(entry, 2)),
            shown=number_text(Fraction(entry, 2)),
            unit="B/token",
            formula="(main_entry_bytes + index_entry_bytes) / 2",
            expression=f"({spelled}) / 2",
            provenance="derived",
            note="Each KV source of ratio 2; one of ratio 1 adds a whole entry.",
        )


def _token(layout: KVLayout) -> Iterator[Figure]:
    config, entries = layout.config, entries_per_token(layout)
    main = layout.main_format.row_bytes(config.head_dim)
    index = layout.index_format.row_bytes(config.index_head_dim)
    by_source = " + ".join(number_text(source.bytes_per_token) for source in layout.sources)
    yield Figure(
        id="equivalent_entries",
        value=exact(entries),
        shown=number_text(entries),
        unit="entries/token",
        formula=PER_SOURCE,
        expression=per_token(source.ratio for source in layout.sources),
        provenance="derived",
    )
    yield _per_token(layout, "main_token_bytes", "main_entry_bytes", (main,))
    yield _per_token(layout, "index_token_bytes", "index_entry_bytes", (index,))
    kinds = f"{number_text(entries * main)} of main KV + {number_text(entries * index)} of index keys"
    note = f"{kinds}; by source {by_source}."
    yield _per_token(layout, "global_token_bytes", "(main_entry_bytes + index_entry_bytes)", (main, index), note)


def _per_token(layout: KVLayout, id: str, names: str, rows: tuple[int, ...], note: str = "") -> Figure:
    value = entries_per_token(layout) * sum(rows)
    factor = f"({total(rows)})" if len(rows) > 1 else total(rows)
    return Figure(
        id=id,
        value=exact(value),
        shown=number_text(value),
        unit="B/token",
        formula=f"({PER_SOURCE}) x {names}",
        expression=f"({per_token(source.ratio for source in layout.sources)}) x {factor}",
        provenance="derived",
        note=note,
    )


def _since_v4(layout: KVLayout) -> Iterator[Figure]:
    before = v4_flash_token_bytes()
    yield Figure(
        id="v4_flash_token_bytes",
        value=before,
        shown=number_text(before),
        unit="B/token",
        formula="21 CSA layers x (row + index key) / 4 + 20 HCA layers x row / 128",
        expression="21 x (584 + 68) / 4 + 20 x 584 / 128",
        provenance="derived",
        note="163 a CSA layer, 4.5625 an HCA layer. V4-Flash, not this config.",
    )
    if not layout.sources:
        return
    yield _saving("v4_saving", before, layout, "v4_flash_token_bytes / global_token_bytes", 2)
    value = WITH_WINDOWS * before / layout.bytes_per_token
    yield Figure(
        id="persistent_saving",
        value=exact(value),
        shown=fixed_text(value, 1),
        unit="1",
        formula="2 x v4_flash_token_bytes / global_token_bytes",
        expression=f"{WITH_WINDOWS} x {number_text(before)} / {number_text(layout.bytes_per_token)}",
        provenance="report",
        note="Of what is persisted: windows were about half of what V4 stored, by the report, and are none of it here.",
    )


def _since_v3(layout: KVLayout) -> Iterator[Figure]:
    for id, element, spelled in (("v3_token_bytes", 1, ""), ("v3_token_bytes_bf16", 2, " x 2")):
        yield Figure(
            id=id,
            value=v3_token_bytes(element),
            shown=f"{v3_token_bytes(element):,}",
            unit="B/token",
            formula=f"61 layers x (latent + rotary key){spelled}",
            expression=f"61 x (512 + 64){spelled}",
            provenance="derived",
            note=f"DeepSeek-V3, {'FP8, scales left out' if element == 1 else 'bf16'}; not this config.",
        )
    if layout.sources:
        yield _saving("v3_saving", v3_token_bytes(1), layout, "v3_token_bytes / global_token_bytes", 1)
    yield Figure(
        id="v32_token_bytes",
        value=v32_token_bytes(),
        shown=f"{v32_token_bytes():,}",
        unit="B/token",
        formula="61 layers x (row + index key)",
        expression="61 x (656 + 132)",
        provenance="derived",
        note="DeepSeek-V3.2: 656 = 512 FP8 + 4 fp32 scales + 64 bf16, 132 = 128 FP8 + an fp32 scale. Not this config.",
    )


def _since_v1(layout: KVLayout) -> Iterator[Figure]:
    yield Figure(
        id="v1_token_bytes",
        value=v1_token_bytes(),
        shown=f"{v1_token_bytes():,}",
        unit="B/token",
        formula="95 layers x 2 x 8 KV heads x 128 x 2",
        expression="95 x 2 x 8 x 128 x 2",
        provenance="derived",
        note="DeepSeek LLM 67B, grouped-query attention in bf16; not this config.",
    )
    if layout.sources:
        yield _saving("v1_saving", v1_token_bytes(), layout, "v1_token_bytes / global_token_bytes", 1)


def _saving(id: str, before: int | Fraction, layout: KVLayout, formula: str, digits: int) -> Figure:
    value = before / layout.bytes_per_token
    return Figure(
        id=id,
        value=exact(value),
        shown=fixed_text(value, digits),
        unit="1",
        formula=formula,
        expression=f"{number_text(before)} / {number_text(layout.bytes_per_token)}",
        provenance="derived",
    )
