"""`rorqual verify CASE`: a golden folder against our own trace; exit 1 when anything disagrees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.output import print_table

if TYPE_CHECKING:
    from rorqual.analysis.verify import Report

COLUMNS = ("tensor group", "tensors", "worst error", "unit", "near-ties", "result")


def command(
    case: Annotated[list[Path], typer.Argument(help="Golden folders.")],
    kernels: Annotated[str, typer.Option(help="fast or plain.")] = "fast",
) -> None:
    """Compare every stored tensor of a golden folder with our own, and print the worst error per tensor group."""
    from rorqual.analysis.verify import verify

    passed = failed = 0
    for folder in case:
        report = verify(folder, kernels=kernels)
        show(report)
        passed, failed = passed + report.passed, failed + report.failed
    print(f"{passed} passed, {failed} failed")
    if failed:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """The table of one case, failing tensors and resolved rounding ties by name below it."""
    rows = []
    for group, outcomes in report.groups().items():
        worst, ties = outcomes[0], sum(o.near_ties for o in outcomes)
        failed = sum(not o.ok for o in outcomes)
        result = f"{failed} FAILED" if failed else "ok"
        rows.append((group, len(outcomes), f"{worst.error:.2e}", worst.unit, ties, result))
    print_table(COLUMNS, rows, title=report.case)
    for outcome in report.outcomes:
        if not outcome.ok:
            print(f"FAILED {outcome.name}: {outcome.error:.3g} {outcome.unit} {outcome.note}".rstrip())
    for tie in report.ties:
        print(f"rounding tie resolved as the case did: {tie.name}[{tie.position}, {tie.channel}] = {tie.value!r}")
