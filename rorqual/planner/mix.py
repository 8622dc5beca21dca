"""A mix of contexts: how long sessions are, and how often."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.units import parse_tokens

SHARE_TEXT = re.compile(r"[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Contexts in tokens with their shares, which are above 0 and sum to 1. One context is a mix of one."""

    parts: tuple[tuple[int, Fraction], ...]

    def __post_init__(self) -> None:
        assert self.parts and sum(share for _, share in self.parts) == 1, self.parts

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(tokens for tokens, _ in self.parts)

    @property
    def mean_tokens(self) -> Fraction:
        """Tokens of a session, on average."""
        return sum((tokens * share for tokens, share in self.parts), Fraction(0))

    @property
    def cell(self) -> int | str:
        """In a table: one context as a number, several as their label."""
        return self.label if len(self.parts) > 1 else self.parts[0][0]

    @property
    def label(self) -> str:
        """As it is printed: one context as its tokens, several with their shares in percent."""
        if len(self.parts) == 1:
            return f"{self.parts[0][0]:,}"
        return ", ".join(f"{tokens:,} ({float(100 * share):.4g} %)" for tokens, share in self.parts)


def one_context(tokens: int) -> Mix:
    """The mix of one context.

    >>> one_context(4096).mean_tokens
    Fraction(4096, 1)

    Unit: tokens. Source: the caller. Raises InputError below 1.
    """
    if tokens < 1:
        raise InputError(f"--context must be 1 token or more; got {tokens}")
    return Mix(parts=((tokens, Fraction(1)),))


def parse_mix(text: str) -> Mix:
    """Contexts with weights, which need not sum to 1 or 100: each is a share of their sum.

    >>> mix = parse_mix("4Ki:70,128Ki:25,1Mi:5")
    >>> mix.mean_tokens, mix.longest
    (Fraction(88064, 1), 1048576)
    >>> mix.label
    '4,096 (70 %), 131,072 (25 %), 1,048,576 (5 %)'

    Unit: tokens. Source: 0.7 x 4,096 + 0.25 x 131,072 + 0.05 x 1,048,576 = 88,064.
    Raises InputError for anything that is not `context:share[,context:share...]` with shares above 0.
    """
    weights: list[tuple[int, Fraction]] = []
    for item in text.split(","):
        context, colon, share = item.partition(":")
        weight = _weight(share)
        if not colon or weight <= 0:
            raise InputError(f"--mix must be context:share pairs such as 4Ki:70,128Ki:25,1Mi:5; got {item.strip()!r}")
        tokens = parse_tokens(context, "--mix")
        if not tokens:
            raise InputError(f"--mix must have contexts of 1 token or more; got {item.strip()!r}")
        weights.append((tokens, weight))
    total = sum(weight for _, weight in weights)
    return Mix(parts=tuple((tokens, weight / total) for tokens, weight in weights))


def mean_pages(layout: KVLayout, mix: Mix) -> Fraction:
    """Pages of a session, on average: every context rounded up to whole pages, then weighed. Unit: pages.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> mean_pages(layout, one_context(129)), mean_pages(layout, parse_mix("4Ki:70,128Ki:25,1Mi:5"))
    (Fraction(2, 1), Fraction(688, 1))

    Source: `KVLayout.pages`: 0.7 x 32 + 0.25 x 1,024 + 0.05 x 8,192.
    """
    return sum((share * layout.pages(tokens) for tokens, share in mix.parts), Fraction(0))


def _weight(text: str) -> Fraction:
    """A share, 0 for what is none. Its digits are bounded: an exponent of millions is a number too."""
    return Fraction(text) if SHARE_TEXT.fullmatch(text := text.strip()) else Fraction(0)
