"""`rorqual plan glossary`: the terms, and where each comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.cli.plan.options import AsCsv, AsJson
from rorqual.cli.plan.printing import emit
from rorqual.errors import InputError


def command(
    term: Annotated[str | None, typer.Argument(metavar="[TERM]", help="One term in full; all of them without.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/glossary.md.")] = False,
) -> None:
    """Say what the terms of the architecture and of this project mean, and what they descend from."""
    from rorqual.planner import glossary

    if as_markdown:
        if term is not None or as_json or as_csv:
            raise InputError("--markdown prints the whole page; leave out the term, --json and --csv")
        print(glossary.markdown(), end="")
        return
    entries = glossary.ENTRIES if term is None else (glossary.find(term),)
    table = glossary.glossary() if term is None else glossary.details(entries[0])
    document = {entry.term: entry.document() for entry in entries}
    emit((table,), as_json=as_json, as_csv=as_csv, document=document)
