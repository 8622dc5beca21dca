"""A number that explains itself: its value, how it is printed, its unit, its formula, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rorqual.planner.units import plain_number

Provenance = Literal["report", "config", "derived"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure.

    id: its name, the key of `--json`.
    value: unrounded, in `unit`.
    shown: as it is printed, the value rounded to the digits it shows.
    unit: "B", "tokens", "FLOP", "1" for a ratio, ...
    formula: in the config's names.
    expression: the formula with numbers put in; what it evaluates to is `value`.
    provenance: "report" stated there, "config" read off, "derived" computed here from the two.
    note: what a reader might get wrong.
    """

    id: str
    value: int | float | Fraction
    shown: str
    unit: str
    formula: str
    expression: str
    provenance: Provenance
    note: str = ""

    def document(self) -> dict[str, object]:
        """For JSON: without the id, which is the key. The value is a number; of a proportion a list of its terms."""
        return {
            "value": plain_number(self.value),
            "shown": self.shown,
            "unit": self.unit,
            "formula": self.formula,
            "expression": self.expression,
            "provenance": self.provenance,
            **({"note": self.note} if self.note else {}),
        }
