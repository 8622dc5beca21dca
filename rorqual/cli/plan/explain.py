"""`rorqual plan explain`: what each technique saves and what it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.inspect import read_config
from rorqual.cli.plan.printing import emit
from rorqual.errors import InputError


def command(
    technique: Annotated[
        str | None, typer.Argument(metavar="[TECHNIQUE]", help="One technique in full; all of them without.")
    ] = None,
    model: Annotated[str, typer.Option(help="A preset, a config.json, or a checkpoint folder.")] = "v4.1-flash",
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg", help="Draw the waterfall into this file too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the tables as CSV.")] = False,
) -> None:
    """Say what each technique moves, what it saves in this config, and what it pays; and the waterfall of bytes."""
    from rorqual.planner import explain
    from rorqual.planner.explain import draw

    if technique is not None:
        if chart is not None:
            raise InputError("--chart draws the waterfall of the overview; leave the technique out")
        one = explain.find(technique)
        config = read_config(model)
        document = {"model": model, "technique": one.id, **one.document(config)}
        emit(explain.answers(one, config), as_json=as_json, as_csv=as_csv, document=document)
        return
    config = read_config(model)
    if chart is not None:
        draw.save(explain.waterfall(config), chart)
    waterfall, chain = explain.waterfall_table(config), explain.chain_table(config)
    emit(
        (explain.overview(config), waterfall, chain),
        as_json=as_json,
        as_csv=as_csv,
        document={
            "model": model,
            "techniques": {one.id: one.document(config) for one in explain.TECHNIQUES},
            "waterfall": waterfall.records(),
            "chain": chain.records(),
        },
    )
