"""`rorqual train`: a recipe and texts in, a trained model out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A preset (demo, drafts, tiny) or a TOML file.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help="More of --data.")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="Text, JSONL, or folders of them: --data PATH...")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder, new or empty; default runs/NAME.")] = None,
    init: Annotated[
        Path | None, typer.Option(help="Checkpoint folder to start from: its values, its tokenizer.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimiser, instead of the recipe's.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None,
    micro_tokens: Annotated[int | None, typer.Option(help="Tokens at once; the rest of a step accumulates.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides parameters, order and every random choice.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; 0: none.")] = None,
    sample_every: Annotated[int | None, typer.Option(help="Steps between samples; 0: none.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Tokenizer and shards, to share; default OUT/data.")] = None,
    processes: Annotated[int, typer.Option(help="Processes on this machine, the cores shared out among them.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files too.")] = False,
    export: Annotated[bool, typer.Option(help="Write the model to OUT/model at the end.")] = True,
    plain: Annotated[
        bool, typer.Option("--plain", help="Write OUT/model-plain too: the same weights as BF16.")
    ] = False,
) -> None:
    """Train a small model on text. Ctrl-C saves; --resume goes on as if nothing had happened."""
    from rorqual.training.launch import inside_a_group, run_processes

    if processes != 1 and not inside_a_group():
        raise typer.Exit(run_processes(context.obj, processes))
    from rorqual.training.run import summary, train

    asked: dict[str, Any] = {
        "run.steps": steps,
        "data.batch_tokens": batch_tokens,
        "data.micro_tokens": micro_tokens,
        "run.seed": seed,
        "run.eval_every": eval_every,
        "run.sample_every": sample_every,
        "run.save_every": save_every,
        "run.keep": keep,
    }
    trained = train(
        recipe,
        [*(data or ()), *(more or ())],
        out,
        resume=resume,
        overrides={key: value for key, value in asked.items() if value is not None},
        cache=cache,
        tensorboard=tensorboard,
        export=export,
        plain=plain,
        device=device,
        init=init,
    )
    if trained.first:
        for line in summary(trained):
            print(line)
    if trained.ended.signal:
        raise typer.Exit(128 + trained.ended.signal)
