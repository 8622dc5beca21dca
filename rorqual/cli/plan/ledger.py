"""`rorqual plan ledger`: layers, entries and bytes of a config's cache. No torch in here."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.cli.plan.options import MODEL, AsCsv, AsJson, Contexts, Model, PageTokens
from rorqual.cli.plan.printing import emit


def command(
    model: Model = MODEL,
    context: Contexts = None,
    page_tokens: PageTokens = None,
    draft_rows: Annotated[
        int | None, typer.Option(help="Rows that one verification may write ahead; 0 for no drafting.")
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Show every byte of the cache with its formula: layers, entries, a token, a sequence, contexts."""
    from rorqual.cli.inspect import read_config
    from rorqual.layout import KVLayout
    from rorqual.planner.ledger import ledger
    from rorqual.planner.units import parse_token_list

    contexts = parse_token_list(context or (), "--context")
    given = {"page_tokens": page_tokens, "draft_rows": draft_rows}
    layout = KVLayout(read_config(model), **{name: value for name, value in given.items() if value is not None})
    emit(ledger(layout, contexts), as_json=as_json, as_csv=as_csv)
