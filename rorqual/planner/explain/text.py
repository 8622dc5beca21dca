"""Exact numbers as text: what formulas become when the numbers are put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction

from rorqual.config import LayerRole, ModelConfig
from rorqual.planner.figure import Figure
from rorqual.planner.units import decimal_bytes, flops_text

REFERENCE_PROMPT = 32_768
"""Tokens of the prompt that prefill work is shown for, as the report does."""


def exact(value: int | Fraction) -> str:
    """A number without loss: thousands grouped, a decimal where it ends, else a fraction in parentheses.

    In the number's own unit; source: the caller.

    >>> exact(5_242_880), exact(Fraction(5, 2)), exact(Fraction(8404, 11529))
    ('5,242,880', '2.5', '(8,404 / 11,529)')
    """
    fraction = Fraction(value)
    if fraction.denominator == 1:
        return f"{fraction.numerator:,}"
    rest = fraction.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1 or fraction.denominator > 10**6:
        return f"({fraction.numerator:,} / {fraction.denominator:,})"
    return f"{Decimal(fraction.numerator) / Decimal(fraction.denominator):,f}"


def equals(value: int | Fraction) -> str:
    """What an expression comes to: exactly, or rounded to two decimals and marked so.

    In the number's own unit; source: the caller.

    >>> equals(Fraction(5, 2)), equals(Fraction(2_703_360, 890))
    ('= 2.5', '≈ 3,037.48')
    """
    text = exact(value)
    return f"≈ {float(value):,.2f}" if text.startswith("(") else f"= {text}"


def short(value: int | Fraction, unit: str) -> str:
    """As printed: bytes from a million on in decimal units, FLOP in M, G, T, P, the rest in full or to four digits.

    In the number's own unit; source: the caller.

    >>> short(5_201_920, "B a token"), short(33_822_867_456, "FLOP a token"), short(Fraction(1, 3), "1")
    ('5.2 MB', '33.82 G', '0.3333')
    """
    fraction = Fraction(value)
    if unit.startswith("B ") and abs(fraction) >= 10**6:
        return decimal_bytes(value)
    if unit.startswith("FLOP ") and abs(fraction) >= 10**6:
        return flops_text(value)
    text = exact(value)
    return text if fraction.denominator == 1 or len(text) <= 6 else f"{float(value):.4g}"


def saving(
    name: str, value: int | Fraction, unit: str, *, formula: str, expression: str, against: str, note: str = ""
) -> Figure:
    """A figure of what is saved; `against` says what it is compared with, and opens the figure's note.

    Unit and source: the caller's.

    >>> saving("x", 736, "B an entry", formula="2 c - b", expression="2 x 512 - 288", against="bf16").note
    'Against bf16.'
    """
    return Figure(
        id=name,
        value=value,
        shown=short(value, unit),
        unit=unit,
        formula=formula,
        expression=expression,
        provenance="derived",
        note=f"Against {against}.{f' {note}' if note else ''}",
    )


def summed(terms: Iterable[str]) -> str:
    """Terms joined by a plus sign, 0 for none. In the terms' own unit; source: the caller.

    >>> summed(["15 x 356/2", "19 x 356/1"]), summed([])
    ('15 x 356/2 + 19 x 356/1', '0')
    """
    return " + ".join(terms) or "0"


def by_ratio(roles: Iterable[LayerRole]) -> tuple[tuple[int, int], ...]:
    """(layers, ratio) of these roles, the coarsest first. Unit: layers. Source: the config.

    >>> from rorqual.config import presets
    >>> by_ratio(presets.load("v4.1-flash").kv_sources)
    ((3, 2), (1, 1))
    """
    counts = Counter(role.ratio for role in roles)
    return tuple((counts[ratio], ratio) for ratio in sorted(counts, reverse=True))


def times(count: int, term: str) -> str:
    """A count of a term, left out where it is 1. In the text's own unit; source: the caller.

    >>> times(4, "min(512, 256)"), times(1, "(9 // 2)")
    ('4 x min(512, 256)', '(9 // 2)')
    """
    return term if count == 1 else f"{count} x {term}"


def groups_text(tokens: int, ratio: int) -> str:
    """Complete groups of `tokens` tokens as a term. Unit: groups. Source: SPEC 5, when a group is visible.

    >>> groups_text(1_048_576, 2), groups_text(1_048_576, 1)
    ('(1,048,576 // 2)', '1,048,576')
    """
    return f"{tokens:,}" if ratio == 1 else f"({tokens:,} // {ratio})"


def reference_prompt(config: ModelConfig) -> int:
    """Tokens of the prompt that prefill work is shown for: 32,768, or all that the model takes.

    Unit: tokens. Source: the report's prompt of 32,768 tokens, and the config.

    >>> from rorqual.config import presets
    >>> reference_prompt(presets.load("v4.1-flash")), reference_prompt(presets.load("demo"))
    (32768, 4096)
    """
    return min(REFERENCE_PROMPT, config.max_position_embeddings)
