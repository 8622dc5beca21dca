"""Arguments and options that several verbs share, each spelled and described once."""

from __future__ import annotations

from fractions import Fraction
from math import isfinite
from typing import Annotated

import typer

from rorqual.errors import InputError

MODEL = "v4.1-flash"
LARGEST = 10**30
"""Of a number that is typed, and its inverse of the smallest: beyond, products no longer fit a float."""

Model = Annotated[str, typer.Argument(metavar="[MODEL]", help="A preset, a config.json or a folder.")]
ModelOption = Annotated[str, typer.Option("--model", help="A preset, a config.json or a folder.")]
Contexts = Annotated[
    list[str] | None, typer.Option("--context", help="Tokens of a sequence, or several: 4Ki,128Ki,1M; may be repeated.")
]
PageTokens = Annotated[
    int | None,
    typer.Option("--page-tokens", "--page", help="Tokens a page; a multiple of every ratio and of the candidate span."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print the tables as CSV.")]


def read_number(name: str, value: float) -> Fraction:
    """A number as it was typed: 0.9 is nine tenths.

    Raises:
        InputError: no finite number, or one so large or so small that no figure made of it could be printed.
    """
    if not isfinite(value):
        raise InputError(f"{name} must be a finite number; got {value}")
    number = Fraction(str(value))
    if number and not Fraction(1, LARGEST) <= abs(number) <= LARGEST:
        raise InputError(f"{name} must be 0 or between 1e-30 and 1e30; got {value:g}")
    return number
