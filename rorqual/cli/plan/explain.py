"""`rorqual plan explain`: what each technique saves and what it pays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.inspect import read_config
from rorqual.cli.plan.options import MODEL, AsCsv, AsJson, ModelOption
from rorqual.cli.plan.printing import check_output, emit
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.config import ModelConfig
    from rorqual.planner.explain import Technique


def command(
    technique: Annotated[
        str | None, typer.Argument(metavar="[TECHNIQUE]", help="One technique in full; all of them without.")
    ] = None,
    model: ModelOption = MODEL,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg", help="Draw the waterfall into this file too.")
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Say what each technique moves, what it saves in this config, and what it pays; and the waterfall of bytes."""
    from rorqual.planner import explain
    from rorqual.planner.explain import draw

    check_output(as_json, as_csv)
    if technique is not None:
        if chart is not None:
            raise InputError("--chart draws the waterfall of the overview; leave the technique out")
        one = find_technique(technique)
        config = read_config(model)
        document = {"model": model, "technique": one.id, **one.document(config)} if as_json else None
        emit(explain.answers(one, config), as_json=as_json, as_csv=as_csv, document=document)
        return
    config = read_config(model)
    if chart is not None:
        draw.save(explain.waterfall(config), chart)
    tables = (explain.overview(config), explain.waterfall_table(config), explain.chain_table(config))
    # All savings of all techniques take a while to count: the overview asks for the first of each only.
    document = overview_document(model, config) if as_json else None
    emit(tables, as_json=as_json, as_csv=as_csv, document=document)


def overview_document(model: str, config: ModelConfig) -> dict[str, object]:
    """What `--json` prints of everything: the three answers of each technique, the waterfall, the chain."""
    from rorqual.planner import explain

    return {
        "model": model,
        "techniques": {one.id: one.document(config) for one in explain.TECHNIQUES},
        "waterfall": explain.waterfall_table(config).records(),
        "chain": explain.chain_table(config).records(),
    }


def find_technique(name: str) -> Technique:
    """The technique of this name. Raises InputError naming them all; for a model's name, the option it belongs to."""
    from rorqual.config import presets
    from rorqual.planner import explain

    try:
        return explain.find(name)
    except InputError as error:
        if name and (name in presets.NAMES or Path(name).exists()):
            raise InputError(f"'{name}' is a model, not a technique; give it as --model {name}") from None
        raise error
