"""`rorqual plan compare`: other models' caches beside this one's, from their own configs. No torch in here."""

from __future__ import annotations

from typing import Annotated

import typer

from rorqual.cli.plan.options import AsCsv, AsJson, Contexts

MODELS = ("v4.1-flash", "deepseek-v4-flash", "deepseek-v3.2", "deepseek-v3", "deepseek-llm-67b")


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="A carried model, a config.json or a folder; ratios are to the first."
        ),
    ] = None,
    context: Contexts = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Compare the KV caches of models: bytes a token, fixed bytes, totals, ratios, and the formula of each."""
    from rorqual.cli.plan.printing import emit
    from rorqual.planner.compare import compare
    from rorqual.planner.families import read_family
    from rorqual.planner.units import parse_token_list

    contexts = parse_token_list(context, "--context") if context else None
    families = [read_family(model) for model in models or MODELS]
    emit(compare(families, contexts), as_json=as_json, as_csv=as_csv)
