"""Bytes a token that an engine's figures may imply: the storages, and known mistakes with what they overlook."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.layout import KVLayout, mha_bytes
from rorqual.planner.storage import RowFormat, bytes_per_token, row_formats
from rorqual.planner.wrong_answers import wrong_table


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFigure:
    """A bytes-a-token figure and how it comes about. wrong: it describes no storage of this architecture."""

    name: str
    bytes_per_token: Fraction
    meaning: str
    wrong: bool


def known_figures(layout: KVLayout) -> tuple[KnownFigure, ...]:
    """The storages of this config, then the known mistakes (field case 4), evaluated for it.

    >>> from rorqual.config import presets
    >>> figures = known_figures(KVLayout(presets.load("v4.1-flash")))
    >>> [int(figure.bytes_per_token) for figure in figures if figure.wrong]
    [10324, 81920, 20480, 800, 5242880]
    >>> [figure.name for figure in figures][:3]
    ['packed', 'fp8-uniform, FP4 index key', 'fp8-uniform, FP8 index key']

    Unit: bytes a token. Source: `storage.row_formats`, `wrong_answers.wrong_table`, `layout.mha_bytes`.
    """
    right = [
        KnownFigure(
            name=_name(rows), bytes_per_token=bytes_per_token(layout, rows), meaning=rows.arithmetic, wrong=False
        )
        for rows in row_formats(layout)
    ]
    wrong = [_wrong(str(name), row_value, str(formula)) for row_value, name, formula, _ in wrong_table(layout).rows]
    config = layout.config
    heads = mha_bytes(config.num_hidden_layers, config.num_attention_heads, config.head_dim)
    formula = f"2 x {config.num_hidden_layers} x {config.num_attention_heads} x {config.head_dim} x 2"
    return (*right, *wrong, _wrong("a bf16 key and value of every head in every layer", heads, formula))


def spread_fixed(layout: KVLayout, max_length: int) -> KnownFigure:
    """The mistake of dividing a sequence's bytes by the longest length planned for (field case 1).

    >>> from rorqual.config import presets
    >>> float(spread_fixed(KVLayout(presets.load("v4.1-flash")), 4096).bytes_per_token)
    1643.296875

    Unit: bytes a token. Source: 890 + 3,085,504 / 4,096.
    """
    fixed = layout.sequence_bytes_allocated
    value = layout.bytes_per_token + Fraction(fixed, max_length)
    return _wrong("fixed bytes spread over the length planned for", value, f"{fixed:,} B / {max_length:,} tokens more")


def _wrong(name: str, value: object, meaning: str) -> KnownFigure:
    assert isinstance(value, int | float | Fraction), value
    return KnownFigure(name=name, bytes_per_token=Fraction(value), meaning=meaning, wrong=True)


def _name(rows: RowFormat) -> str:
    both = rows.storage in ("fp8-uniform", "v4-rows")
    return f"{rows.storage}, {rows.index_key} index key" if both else rows.storage
