"""`rorqual generate`: continue a prompt, streaming the text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.output import Facts, print_facts
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.engine.generate import Generation
    from rorqual.model.transformer import Transformer


def command(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder, as `rorqual init` makes one.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    prefill: Annotated[str, typer.Option(help="ced (decoder on the last window) or full.")] = "ced",
    chunk: Annotated[int, typer.Option(help="Prompt tokens a prefill step.")] = 512,
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    kernels: Annotated[str, typer.Option(help="auto, fast or plain.")] = "auto",
    image: Annotated[list[Path] | None, typer.Option(help="Image file before the text; may be repeated.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print rates and bytes at the end.")] = False,
) -> None:
    """Continue a prompt, streaming the text to standard output."""
    from rorqual.engine.generate import generate
    from rorqual.engine.sampler import SamplingParams
    from rorqual.model.load import load

    if model is None:
        raise InputError("model: none given; make one with `rorqual init tiny DIR`, then pass --model DIR")
    if prompt == "-":
        prompt = sys.stdin.read()
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if chunk < 1:
        raise InputError(f"chunk: {chunk} is not legal; legal: at least 1")
    loaded = load(model, numerics=numerics, kernels=kernels)
    result = generate(
        loaded, prompt, max_tokens=max_tokens, sampling=sampling, prefill=prefill, chunk=chunk, images=image or ()
    )
    for delta in result:
        print(delta, end="", flush=True)
    print()
    if stats:
        print_facts("generation", describe(loaded, result))


def describe(model: Transformer, result: Generation) -> Facts:
    """The table of `--stats`: rates of this run, bytes of the tensors it allocated, layer-tokens of its prefill."""
    stats = result.stats
    share = stats.layer_tokens / stats.layer_tokens_full
    return {
        "prompt_tokens": stats.prompt_tokens,
        "prompt_tokens_a_second": stats.prefill_rate,
        "new_tokens": stats.new_tokens,
        "new_tokens_a_second": stats.decode_rate,
        "finish_reason": stats.finish_reason,
        "global_bytes_a_token": stats.bytes_per_token,
        "window_bytes_a_sequence": stats.window_bytes,
        "layer-tokens_of_the_prefill": stats.layer_tokens,
        "layer-tokens_of_full_prefill": stats.layer_tokens_full,
        "share_of_full": share,
        "kernels": model.backend.ops().name,
    }
