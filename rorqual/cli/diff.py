"""`rorqual diff`: where two dumps part, in words."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rorqual.analysis.diff_case import Cause
    from rorqual.analysis.diff_report import Divergence, Report

SHOWN_NAMES = 6
COLUMNS = ("group", "tensors", "divergent", "worst", "unit", "first tensor", "row", "relation")


def command(
    ours: Annotated[str, typer.Argument(metavar="OURS", help=".safetensors, .npz or a golden folder.")],
    theirs: Annotated[str, typer.Argument(metavar="THEIRS", help="The same of the implementation under test.")],
    rename: Annotated[
        str | None, typer.Option(metavar="FILE", help="TOML or JSON: their name, a glob or re:REGEX, to ours.")
    ] = None,
    numerics: Annotated[str, typer.Option(help="Tolerance: fp32, native or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Align two dumps by name, name the first tensor and row where they part, and say what it looks like.

    Exit code 0 when they are equal within tolerance, 1 when not.
    """
    from rorqual.analysis.diff import diff
    from rorqual.analysis.diff_dumps import Renames, open_dump, read_renames

    renames = read_renames(rename) if rename is not None else Renames()
    report = diff(open_dump(ours), open_dump(theirs), renames=renames, numerics=numerics)
    if as_json:
        print_json(document(report))
    else:
        show(report)
    if not report.equal:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """The report for people."""
    print(f"{report.common} tensors in common, {report.agreeing} agree ({report.numerics} tolerance)")
    for title, names in (
        ("only in ours", report.only_ours),
        ("only in theirs", report.only_theirs),
        ("rename rules that matched nothing", report.unused_renames),
        ("equal, but of another shape", report.reshaped),
    ):
        if names:
            print(f"{title}: {listed(names)}")
    if report.first is None or report.cause is None:
        print("equal within tolerance")
        return
    print(f"\nfirst divergence: {place(report.first)}")
    print(f"  looks like {report.cause.text()}")
    if report.other is not None and report.other_cause is not None:
        print(f"\nnot caused by it, in an earlier row: {place(report.other)}")
        print(f"  looks like {report.other_cause.text()}")
    print()
    print_table(
        COLUMNS,
        [(g.name, g.tensors, g.divergent, g.error, g.unit, g.first, g.row, g.relation) for g in report.groups],
    )


def place(d: Divergence) -> str:
    """A divergence: where it begins, both values, and how far it goes."""
    shape = f"{d.name} {list(d.shape)}"
    if d.index is None or d.ours is None or d.theirs is None:
        return shape
    where = f"row {d.row}" + (f", element {list(d.index)}" if len(d.index) > 1 else "")
    return (
        f"{shape}, {where}: ours {number(d.ours)}, theirs {number(d.theirs)}\n"
        f"  {d.rows} of {d.of_rows} rows and {d.elements} of {d.of_elements} elements diverge"
    )


def number(value: float) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def document(report: Report) -> dict[str, object]:
    """The report for programs; infinities and NaN, which JSON lacks, are strings."""
    return {
        "equal": report.equal,
        "numerics": report.numerics,
        "common": report.common,
        "agreeing": report.agreeing,
        "only_ours": list(report.only_ours),
        "only_theirs": list(report.only_theirs),
        "unused_renames": list(report.unused_renames),
        "reshaped": list(report.reshaped),
        "first": _divergence(report.first, report.cause),
        "other": _divergence(report.other, report.other_cause),
        "groups": [
            {
                "group": g.name,
                "tensors": g.tensors,
                "divergent": g.divergent,
                "worst": _plain(g.error),
                "unit": g.unit,
                "first": g.first,
                "row": g.row,
                "relation": g.relation,
            }
            for g in report.groups
        ],
    }


def _divergence(d: Divergence | None, cause: Cause | None) -> dict[str, object] | None:
    if d is None or cause is None:
        return None
    return {
        "name": d.name,
        "shape": list(d.shape),
        "row": d.row,
        "index": None if d.index is None else list(d.index),
        "ours": _plain(d.ours),
        "theirs": _plain(d.theirs),
        "rows": d.rows,
        "of_rows": d.of_rows,
        "elements": d.elements,
        "of_elements": d.of_elements,
        "worst": _plain(d.error),
        "unit": d.unit,
        "cause": {"kind": cause.kind, "what": cause.what, "detail": cause.detail},
    }


def _plain(value: float | None) -> float | str | None:
    return value if value is None or isinstance(value, int) or isfinite(value) else str(value)
