"""A planner's table as an HTML table: captioned, its header cells scoped, scrolling in a box of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rorqual.planner.report.markup import Markup, lines, prose, tag
from rorqual.planner.table import Cell, Table

Fold = Literal["long", "open", "closed"]

LONG_ROWS = 12
"""A table with more rows can be folded away."""


def sheet(table: Table, id: str, *, fold: Fold = "long") -> Markup:
    """A table under the id `id`, its note below it. fold: a "long" table is folded away; an "open" one can be, if long;
    a "closed" one is, however short.

    >>> table = Table(name="t", title="a token", columns=("part", "bytes [B]"), rows=(("keys", 1360),), note="In `x`.")
    >>> print(sheet(table, "t"))
    <div class="sheet" id="t"><div class="scroll" role="region" aria-labelledby="t-caption" tabindex="0"><table>\
<caption id="t-caption">A token</caption>
    <thead><tr><th scope="col">part</th><th scope="col" class="n">bytes [B]</th></tr></thead>
    <tbody>
    <tr><th scope="row">keys</th><td class="n">1,360</td></tr>
    </tbody></table></div>
    <p class="note">In <code>x</code>.</p></div>

    Units are in the columns' names; source: the table.
    """
    caption, heading = f"{id}-caption", _sentence(table.title)
    numeric = [all(_is_number(row[column]) for row in table.rows) for column in range(len(table.columns))]
    columns = zip(table.columns, numeric, strict=True)
    head = tag("tr", *(tag("th", name, scope="col", class_=_side(number)) for name, number in columns))
    grid = tag(
        "table",
        tag("caption", heading, id=caption),
        "\n",
        tag("thead", head),
        "\n",
        tag("tbody", "\n", lines(_row(row, numeric) for row in table.rows), "\n"),
    )
    box = tag("div", grid, class_="scroll", role="region", aria_labelledby=caption, tabindex=0)
    if len(table.rows) > LONG_ROWS or fold == "closed":
        box = tag("details", tag("summary", f"{heading} ({len(table.rows)} rows)"), "\n", box, open=fold == "open")
    notes = [tag("p", prose(note), class_="note") for note in table.note.splitlines() if note]
    return tag("div", lines([box, *notes]), class_="sheet", id=id)


def cell(value: Cell) -> str:
    """A value as it stands in a cell: whole numbers in full, others to four digits with the exact one in the markup.

    >>> cell(5_242_880), cell(None), cell(True), cell("a")
    ('5,242,880', '-', 'yes', 'a')
    >>> cell(1 / 3)
    '<data value="0.3333333333333333">0.3333</data>'

    In the unit of the column; source: the caller.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return tag("data", f"{value:.4g}" if abs(value) < 1000 else f"{value:,.2f}", value=repr(value))
    return value


def _row(row: Sequence[Cell], numeric: Sequence[bool]) -> Markup:
    first, *rest = (
        tag("td" if column else "th", cell(value), scope=None if column else "row", class_=_side(numeric[column]))
        for column, value in enumerate(row)
    )
    return tag("tr", first, *rest)


def _is_number(value: Cell) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _side(numeric: bool) -> str | None:
    return "n" if numeric else None


def _sentence(title: str) -> str:
    return title[:1].upper() + title[1:]
