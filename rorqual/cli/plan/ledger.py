"""`rorqual plan ledger`: layers, entries and bytes of a config's cache. No torch in here."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.cli.plan.printing import emit


def command(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="A preset, a config.json, a folder.")] = "v4.1-flash",
    context: Annotated[list[str] | None, typer.Option(help="Tokens of one sequence, such as 4096, 128Ki, 1M.")] = None,
    page_tokens: Annotated[
        int | None, typer.Option(help="Tokens a page; a multiple of every ratio and of the candidate span.")
    ] = None,
    draft_rows: Annotated[
        int | None, typer.Option(help="Rows that one verification may write ahead; 0 for no drafting.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Show every byte of the cache with its formula: layers, entries, a token, a sequence, contexts."""
    from rorqual.cli.inspect import read_config
    from rorqual.layout import KVLayout
    from rorqual.planner.ledger import ledger
    from rorqual.planner.units import parse_tokens

    contexts = [parse_tokens(text, "--context") for text in context or ()]
    given = {"page_tokens": page_tokens, "draft_rows": draft_rows}
    layout = KVLayout(read_config(model), **{name: value for name, value in given.items() if value is not None})
    emit(ledger(layout, contexts), as_json=as_json, as_csv=as_csv)
