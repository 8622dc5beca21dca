"""`rorqual golden CONFIG OUT`: write a golden folder for any config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.output import print_facts


def command(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="config.json, folder, or preset.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    seed: Annotated[int, typer.Option(help="Of the weights and the prompt.")] = 0,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the random prompt.")] = 97,
    decode_steps: Annotated[int, typer.Option(help="Forced tokens after it.")] = 25,
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    page_tokens: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
) -> None:
    """Write a random checkpoint of a config with every tensor of a prompt and a decode: an oracle for a port."""
    from rorqual.analysis.golden import write_golden
    from rorqual.cli.inspect import read_config

    facts = write_golden(
        read_config(config),
        out,
        seed=seed,
        prompt_tokens=prompt_tokens,
        decode_steps=decode_steps,
        numerics=numerics,
        page_tokens=page_tokens,
    )
    print_facts(str(out), dict(facts))
