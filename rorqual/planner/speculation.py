"""What a verification emits, if each draft is accepted with one probability, independently."""

from __future__ import annotations

from fractions import Fraction

ACCEPTANCE = Fraction(4, 5)
"""The report's example of each draft's chance, given that those before it were accepted: round, not measured."""


def tokens_per_step(acceptance: Fraction, drafts: int) -> Fraction:
    """Tokens that one verification emits, the bonus token included: (1 - a^(g + 1)) / (1 - a). Source: SPEC 9.

    Leviathan et al., arXiv 2211.17192, under independent acceptance.

    >>> float(tokens_per_step(Fraction(4, 5), 5)), tokens_per_step(Fraction(1), 5)
    (3.68928, Fraction(6, 1))
    """
    return sum((acceptance**accepted for accepted in range(drafts + 1)), Fraction(0))
