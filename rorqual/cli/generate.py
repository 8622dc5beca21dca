"""`rorqual generate`: continue a prompt, or answer it, streaming the text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.model.transformer import Transformer


def command(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads standard input; else a passage.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; else the shipped model.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask instead: the prompt is a user's turn.")] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    prefill: Annotated[str, typer.Option(help="ced (decoder on the last window) or full.")] = "ced",
    chunk: Annotated[int, typer.Option(help="Prompt tokens a prefill step.")] = 512,
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    kernels: Annotated[str, typer.Option(help="auto, fast or plain.")] = "auto",
    store: Annotated[Path | None, typer.Option(help="Folder that keeps pages of the cache for later runs.")] = None,
    store_memory: Annotated[str | None, typer.Option(help="Bytes of them in memory (2GiB).")] = None,
    store_disk: Annotated[str | None, typer.Option(help="Bytes of them on disk at most.")] = None,
    store_ttl: Annotated[float | None, typer.Option(help="Seconds unused after which a page goes.")] = None,
    fsync: Annotated[bool, typer.Option("--fsync", help="Stored pages outlast a power failure too.")] = False,
    image: Annotated[list[Path] | None, typer.Option(help="Image file before the text; may be repeated.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print rates and bytes at the end.")] = False,
) -> None:
    """Continue a prompt, streaming the text to standard output."""
    from rorqual.checkpoint.shipped import passage
    from rorqual.cli.generation import print_stats
    from rorqual.engine.generate import generate
    from rorqual.engine.params import SamplingParams
    from rorqual.engine.storing import StoreOptions
    from rorqual.model.load import load

    shown = ""
    if chat and (prompt is None or image):
        what, legal = ("prompt", "what the user says") if prompt is None else ("image", "text alone")
        raise InputError(f"{what}: not legal with --chat; legal: {legal}")
    if prompt is None:
        prompt = passage()
        shown = introduced(prompt)
    elif prompt == "-":
        prompt = sys.stdin.read()
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if chunk < 1:
        raise InputError(f"chunk: {chunk} is not legal; legal: at least 1")
    loaded = load(model, numerics=numerics, kernels=kernels)
    given = asked(loaded, prompt) if chat else prompt
    kept = StoreOptions(folder=store, memory=store_memory, disk=store_disk, ttl=store_ttl, fsync=fsync)
    with kept.opened(loaded) as pages:
        result = generate(
            loaded,
            given,
            max_tokens=max_tokens,
            sampling=sampling,
            prefill=prefill,
            chunk=chunk,
            images=image or (),
            store=pages,
        )
        print(shown, end="", flush=True)
        for delta in result:
            print(delta, end="", flush=True)
        print()
    if stats:
        print()
        print_stats(result.stats, loaded.layout, prefill, loaded.backend.ops().name)


def introduced(text: str) -> str:
    """What the continuation follows: the end of a long prompt that the user has not seen."""
    end = text[text.rfind(" ", 0, len(text) - 160) + 1 :]
    return f"(after a passage of {len(text):,} characters: ... {end})\n\n"


def asked(model: Transformer, text: str) -> list[int]:
    """Ids of a conversation whose only turn is the user's, the reply opened: the chat encoding, thinking off."""
    from rorqual.engine.prompts import checked_tokenizer
    from rorqual.training.data.chat import chat_ids
    from rorqual.training.data.documents import Turn

    tokenizer = checked_tokenizer(model, text)
    if not text.strip():
        raise InputError("prompt: empty; give at least one character")
    return chat_ids(tokenizer, [Turn("user", text)], reply=True)
