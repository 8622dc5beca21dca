"""`rorqual plan compare`: other models' caches beside this one's, from their own configs. No torch in here."""

from __future__ import annotations

from typing import Annotated

import typer

MODELS = ("v4.1-flash", "deepseek-v4-flash", "deepseek-v3.2", "deepseek-v3", "deepseek-llm-67b")


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="A carried model, a config.json or a folder; ratios are to the first."
        ),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Tokens of a sequence, as 4096, 128Ki or 1M; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, a table after another.")] = False,
) -> None:
    """Compare the KV caches of models: bytes a token, fixed bytes, totals, ratios, and the formula of each."""
    from rorqual.cli.plan.printing import emit
    from rorqual.planner.compare import compare
    from rorqual.planner.families import read_family
    from rorqual.planner.units import parse_tokens

    contexts = [parse_tokens(text, "--context") for text in context] if context else None
    families = [read_family(model) for model in models or MODELS]
    emit(compare(families, contexts), as_json=as_json, as_csv=as_csv)
