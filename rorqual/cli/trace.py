"""`rorqual trace`: dump every tensor of a forward pass, by the goldens' names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rorqual.cli.output import print_facts
from rorqual.errors import InputError


def command(
    ids: Annotated[Path, typer.Option(help="Prompt ids: JSON list, .npy or .safetensors.")],
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; else the shipped model.")] = None,
    forced: Annotated[Path | None, typer.Option(help="Ids to feed after the prompt, one a step.")] = None,
    prefill: Annotated[str, typer.Option(help="full or ced.")] = "full",
    chunk: Annotated[int | None, typer.Option(help="Prompt tokens a prefill step.")] = None,
    hit: Annotated[int | None, typer.Option(help="Prefix hit of this many tokens, resumed by replay.")] = None,
    spec: Annotated[bool, typer.Option("--spec", help="Draft after every forced token.")] = False,
    image: Annotated[list[Path] | None, typer.Option(help="Image of the prompt's next span; may be repeated.")] = None,
    inject: Annotated[Path | None, typer.Option(help="Tensors used in place of ours, .safetensors.")] = None,
    select: Annotated[str, typer.Option(help="Names to keep: globs separated by commas.")] = "*",
    stale_decode: Annotated[bool, typer.Option("--stale-decode", help="The released code's decode defect.")] = False,
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    page_tokens: Annotated[int, typer.Option(help="Tokens a page.")] = 128,
    kernels: Annotated[str, typer.Option(help="plain (the reference's order of sums), fast or auto.")] = "plain",
) -> None:
    """Run a prompt and a forced continuation, and write the named tensors."""
    from rorqual.analysis.saving import save_tensors
    from rorqual.analysis.trace import trace
    from rorqual.cli.files import read_ids, read_tensors
    from rorqual.model.load import load

    if out.suffix != ".safetensors":
        raise InputError(f"out: {out} does not end in .safetensors")
    if not out.parent.is_dir():
        raise InputError(f"out: the folder {out.parent} does not exist")
    prompt = read_ids(ids, "ids")
    continuation = None if forced is None else read_ids(forced, "forced")
    given = None if inject is None else read_tensors(inject, "inject")
    loaded = load(model, numerics=numerics, page_tokens=page_tokens, kernels=kernels)
    tensors = trace(
        loaded,
        prompt,
        continuation,
        prefill=prefill,
        chunk=chunk,
        hit=hit,
        spec=spec,
        images=image,
        inject=given,
        select=select,
        stale_decode=stale_decode,
    )
    if not tensors:
        raise InputError(f"select: {select!r} matches no tensor of this run")
    save_tensors(tensors, out)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print_facts(str(out), {"tensors": len(tensors), "bytes": size})
