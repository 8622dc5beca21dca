"""One divergent tensor as the detectors see it, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rorqual.analysis.diff_order import Name, parse
from rorqual.analysis.diff_tolerance import Tolerance, rows_of

KINDS = {
    "tie": "a tie",
    "quantisation": "a quantisation step",
    "permutation": "a permutation",
    "scale": "a scale factor",
    "shift": "an off-by-one",
    "precision": "precision only",
    "shape": "a shape mismatch",
    "error": "an error",
}
"""What a divergence can look like, and how it is said."""

SCREEN_ROWS = 64
"""Rows that a guess is tried on before it is tried on all of them."""

Look = Callable[[str], tuple[Tensor | None, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """kind: a key of `KINDS`. what: the specific form, a few words. detail: a clause with the evidence."""

    kind: str
    what: str
    detail: str

    def text(self) -> str:
        return f"{KINDS[self.kind]}: {self.what}; {self.detail}" if self.what else f"{KINDS[self.kind]}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A divergent tensor: float64 or int64 [rows, ...] of one shape, and where it is out of tolerance.

    look: another tensor's (ours, theirs) by name, None where a dump has none.
    """

    name: str
    ours: Tensor
    theirs: Tensor
    wrong: Tensor
    tolerance: Tolerance
    look: Look

    @property
    def parsed(self) -> Name:
        return parse(self.name)

    @property
    def rows(self) -> Tensor:
        """Numbers of the rows with an element out of tolerance, ascending."""
        return rows_of(self.wrong).any(1).nonzero().flatten()

    def equal(self, ours: Tensor, theirs: Tensor) -> bool:
        """Whether every element agrees within tolerance. Most guesses are wrong, and the first rows say so."""
        few = slice(SCREEN_ROWS)
        if len(ours) > SCREEN_ROWS and bool(self.tolerance.wrong(self.name, ours[few], theirs[few]).any()):
            return False
        return not bool(self.tolerance.wrong(self.name, ours, theirs).any())
