"""`rorqual lab own-text`: texts that a model's drafts are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.lab import RECIPE
from rorqual.cli.output import ProgressLine
from rorqual.errors import InputError


def own_text(
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; default the shipped model.")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Texts to begin from: file, folder, JSONL; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="JSONL to write.")] = Path("own.jsonl"),
    texts: Annotated[int, typer.Option(help="Texts to write, at most.")] = 2000,
    prompt: Annotated[int, typer.Option(help="Tokens of a beginning, begin token included.")] = 192,
    new: Annotated[int, typer.Option(help="Tokens that the model goes on for, fewer where it ends.")] = 192,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    kernels: Annotated[str, typer.Option(help="auto, fast or plain.")] = "auto",
    seed: Annotated[int, typer.Option(help="Draws the beginnings, and the tokens at a temperature.")] = 0,
) -> None:
    """Write how a model goes on from beginnings of texts, for `rorqual train drafts --init MODEL --data OUT`.

    Without --data it begins from what the demo's recipe trains on, never from what that holds out.
    """
    from rorqual.analysis.own_text import write_own_texts
    from rorqual.analysis.quality_texts import text_documents, trained_documents
    from rorqual.analysis.quality_windows import cut_windows
    from rorqual.checkpoint.shipped import shipped_model
    from rorqual.model.load import load
    from rorqual.training.recipe import Recipe

    for name, value, least in (("texts", texts, 1), ("prompt", prompt, 2), ("new", new, 1)):
        if value < least:
            raise InputError(f"{name}: {value} is not legal; legal: at least {least}")
    weights = load(shipped_model() if model is None else model, kernels=kernels)
    weights.backend.warm()  # `auto` would begin with the twins, which round otherwise
    if weights.tokenizer is None:
        raise InputError(f"model: {model} has no tokenizer.json; texts cannot be read for it")
    documents = (
        text_documents(data, weights.tokenizer, weights.config)
        if data
        else trained_documents(Recipe.load(RECIPE).data, weights.tokenizer, weights.config)
    )
    windows = cut_windows(documents, prompt, texts, scored=1, bos=weights.config.bos_token_id, seed=seed)
    with ProgressLine("texts") as line:
        said = write_own_texts(weights, windows, new, out, temperature=temperature, seed=seed, progress=line)
    print(f"{out} is written: {len(windows):,} texts, {said:,} tokens of the model's own")
