"""`rorqual init`: a random checkpoint of any config, in the release's layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from rorqual.cli.inspect import read_config
from rorqual.cli.output import ProgressLine, bytes_text
from rorqual.errors import InputError


def command(
    source: Annotated[str, typer.Argument(metavar="CONFIG", help="A preset, a config.json, or a folder with one.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal bytes.")] = 0,
    layers: Annotated[
        str | None, typer.Option(metavar="N|IDS", help="Depth cut: the first N layers, or ids as in 0,1,2,20.")
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer, where the config has more.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="TECHNIQUE", help="Turn a technique off, as in drafts; repeatable.")
    ] = None,
    plain: Annotated[
        bool | None,
        typer.Option("--plain/--native", help="BF16 weights, or FP8 with FP4 experts; else as the config says."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json to copy; else one token a byte.")] = None,
    shard_bytes: Annotated[int | None, typer.Option(help="Begin a new file before this size.")] = None,
    allow_large: Annotated[
        bool, typer.Option("--allow-large", help="Write even what is refused unasked for its size.")
    ] = False,
) -> None:
    """Write a random checkpoint whose activations stay realistic."""
    config = read_config(source).without(*(without or ()))
    cut = None if layers is None else layer_ids(layers)
    weights: Literal["native", "plain"] | None = None if plain is None else "plain" if plain else "native"

    from rorqual.checkpoint.random import write_random

    with ProgressLine(f"writing {out}", bytes_text) as progress:
        written = write_random(
            config,
            out,
            seed,
            layers=cut,
            experts=experts,
            weights=weights,
            shard_bytes=shard_bytes,
            tokenizer=tokenizer,
            compressed_size=partial(distinct_keys, vocab_size=config.vocab_size),
            allow_large=allow_large,
            progress=progress,
        )
    print(f"{out}: {written.num_hidden_layers} layers, {bytes_text(progress.total)}, seed {seed}")


def layer_ids(text: str) -> int | list[int]:
    """`4` is a count, `0,1,20` (and `4,`) are ids. Raises InputError on anything else."""
    parts = text.removesuffix(",").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--layers is '{text}'; legal: a count as in 4, or layer ids as in 0,1,2,20")
    ids = [int(part) for part in parts]
    return ids if "," in text else ids[0]


def distinct_keys(tokenizer: Path, vocab_size: int) -> int:
    """The size of the compressed vocabulary that this tokenizer.json gives (SPEC 8); the Engram hash depends on it."""
    from rorqual.checkpoint.tokenizer import read_tokenizer
    from rorqual.model.ngram import compressed_token_map

    return int(compressed_token_map(read_tokenizer(tokenizer), vocab_size).max()) + 1
