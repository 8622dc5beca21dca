"""Formulas as text, in one small grammar: + - x / ^ ( ) ceil() and numbers with commas. Tests evaluate what is spelled.

The same function spells a formula in the config's names and with its numbers put in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rorqual.formats.spec import NumberFormat
from rorqual.layout import KVLayout
from rorqual.planner.units import number_text


def row_formula(fmt: NumberFormat, width: int | str) -> str:
    """Bytes of a packed row of `width` elements, codes and scales apart. Source: `NumberFormat.row_bytes`.

    >>> from rorqual.formats.spec import FORMATS
    >>> row_formula(FORMATS["e2m1_e4m3_16"], "head_dim"), row_formula(FORMATS["e4m3_e8m0_32"], 512)
    ('head_dim / 2 + head_dim / 16', '512 + 512 / 32')
    """
    name = width if isinstance(width, str) else f"{width:,}"
    codes = f"{name} / {8 // fmt.bits}" if fmt.bits < 8 else name if fmt.bits == 8 else f"{name} x {fmt.bits // 8}"
    return f"{codes} + {name} / {fmt.group}" if fmt.scale is not None else codes


def runs(values: Iterable[int]) -> str:
    """A sum with equal terms gathered, in order of first appearance; 0 without terms. In the values' own unit.

    Source: the caller's values.

    >>> runs([524_288, 524_288, 524_288, 1_048_576, 16_384, 16_384]), runs([])
    ('3 x 524,288 + 1,048,576 + 2 x 16,384', '0')
    """
    counts: dict[int, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return " + ".join(f"{count} x {value:,}" if count > 1 else f"{value:,}" for value, count in counts.items()) or "0"


def per_token(ratios: Iterable[int], entry: str | int = "") -> str:
    """Entries that layers of these ratios add for each token, times `entry` bytes if given. Source: SPEC 1.

    >>> per_token([2, 2, 2, 1]), per_token([2, 2, 2, 1], 356)
    ('3 / 2 + 1 / 1', '3 x 356 / 2 + 1 x 356 / 1')
    """
    counts: dict[int, int] = {}
    for ratio in ratios:
        counts[ratio] = counts.get(ratio, 0) + 1
    factor = f" x {entry:,}" if isinstance(entry, int) else f" x {entry}" if entry else ""
    return " + ".join(f"{count}{factor} / {ratio}" for ratio, count in counts.items()) or "0"


def total(terms: Sequence[int | Fraction]) -> str:
    """A sum of exact numbers; 0 without terms. In the terms' own unit. Source: the caller's terms.

    >>> total([720, 170]), total([Fraction(7, 4)])
    ('720 + 170', '1.75')
    """
    return " + ".join(number_text(term) for term in terms) or "0"


def entries_per_token(layout: KVLayout) -> Fraction:
    """Entries of global KV that a token adds, all sources together: the sum of 1 / ratio. Source: SPEC 1.

    >>> from rorqual.config import presets
    >>> entries_per_token(KVLayout(presets.load("v4.1-flash")))
    Fraction(5, 2)
    """
    return sum((Fraction(1, source.ratio) for source in layout.sources), Fraction(0))
