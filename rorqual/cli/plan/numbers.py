"""`rorqual plan numbers`: every figure of a config with its formula and source. No torch in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.plan.options import MODEL, AsCsv, AsJson
from rorqual.cli.plan.printing import emit
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.planner.figure import Figure
    from rorqual.planner.table import Cell, Table


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [ID]...", help="A preset, a config.json or a folder; then figures, or all."),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Show each figure's value, formula, evaluated expression and source; those named, or all."""
    from rorqual.cli.inspect import read_config
    from rorqual.planner.numbers import numbers

    model, ids = split(names or [])
    figures = chosen(model, numbers(read_config(model)), ids)
    document = {id: figure.document() for id, figure in figures.items()}
    made = table(model, figures, full=as_csv, notes=bool(ids))
    emit([made], as_json=as_json, as_csv=as_csv, document=document)


def split(names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The model and the ids. A first name that is neither model nor file but an id, or nearly, leaves the model out."""
    from rorqual.config.presets import NAMES

    first = names[0] if names else ""
    if first and (first in NAMES or Path(first).exists() or not near(first, 0.7)):
        return first, names[1:]
    return MODEL, names


def near(name: str, cutoff: float) -> list[str]:
    """Ids that resemble a name, the nearest first."""
    from difflib import get_close_matches

    from rorqual.planner.numbers import IDS

    return get_close_matches(name, IDS, n=4, cutoff=cutoff)


def chosen(model: str, figures: Mapping[str, Figure], ids: Sequence[str]) -> Mapping[str, Figure]:
    """The figures of these ids, all without any. Raises InputError for an id unknown, or not of this model."""
    from rorqual.planner.numbers import IDS

    for id in ids:
        if id in figures:
            continue
        if id in IDS:
            raise InputError(f"'{id}' is not a figure of {model}: its config lacks what it counts")
        resembling = near(id, 0.4) or [name for name in IDS if id in name][:4] or near(id, 0.0)
        everything = f"`rorqual plan numbers` shows all {len(IDS)}"
        raise InputError(f"no figure '{id}'; near it are {', '.join(resembling)}; {everything}")
    return {id: figures[id] for id in ids} or figures


def table(model: str, figures: Mapping[str, Figure], *, full: bool, notes: bool) -> Table:
    """One row a figure. full: with the unrounded value beside what is shown. notes: below the rows."""
    from rorqual.planner.table import Table

    columns = ("id", "shown", *(["value"] if full else []), "unit", "expression", "formula", "provenance")
    remarks = "\n".join(f"{figure.id}: {figure.note}" for figure in figures.values() if figure.note)
    return Table(
        name="numbers",
        title=model,
        columns=columns,
        rows=tuple(_row(figure, full) for figure in figures.values()),
        note=remarks if notes else "Name a figure to read its note: rorqual plan numbers spec_accepted",
    )


def _row(figure: Figure, full: bool) -> tuple[Cell, ...]:
    from rorqual.planner.numbers.exact import Proportion
    from rorqual.planner.units import plain_number

    value = figure.shown if isinstance(figure, Proportion) else plain_number(figure.value)
    unrounded = [value] if full else []
    return (figure.id, figure.shown, *unrounded, figure.unit, figure.expression, figure.formula, figure.provenance)
