"""`rorqual lab twin` and `rorqual lab speed`: the dense baseline, trained by a recipe, and raced against the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.cli.output import Cell, bytes_text, print_table
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.training.data.prepare import TrainingData
    from rorqual.training.recipe import Recipe

NOTE_EVERY_S = 5.0
STAGES = (0.05, 0.3, 0.7, 0.95)
"""Of a run, where its speed is measured: phases and sequence lengths differ."""

Data = Annotated[list[Path] | None, typer.Option(help="The recipe's texts beside its corpus; may be repeated.")]
Cache = Annotated[Path | None, typer.Option(help="Tokenizer and shards, to share; default OUT/data.")]


def twin(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A preset (demo, tiny) or a TOML file.")] = "demo",
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder, new or empty; default runs/NAME-twin.")] = None,
    cache: Cache = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimiser, instead of the recipe's.")] = None,
    processes: Annotated[int, typer.Option(help="Processes on this machine, the cores shared out among them.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
) -> None:
    """Train a plain dense transformer of equal active parameters by a recipe: same texts, order and optimisers."""
    from rorqual.training.launch import inside_a_group, run_processes

    if processes != 1 and not inside_a_group():
        raise typer.Exit(run_processes(context.obj, processes))
    from rorqual.analysis.twin_run import train_twin
    from rorqual.training.run import summary

    overrides = {} if steps is None else {"run.steps": steps}
    trained = train_twin(recipe, data or (), out, resume=resume, cache=cache, overrides=overrides)
    if trained.first:
        print("\n".join(summary(trained)))
    if trained.ended.signal:
        raise typer.Exit(128 + trained.ended.signal)


def speed(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A preset (demo, tiny) or a TOML file.")] = "demo",
    data: Data = None,
    cache: Cache = None,
    repeats: Annotated[int, typer.Option(help="Steps of each, at each stage of the run.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("lab-speed"),
) -> None:
    """Time training steps of the model and of its dense twin in turns, at four stages of a recipe's run.

    Writes speed.json.
    """
    import torch

    from rorqual.analysis.training_speed import training_speed
    from rorqual.analysis.twin_run import twin_learner
    from rorqual.bench.report import write_document
    from rorqual.cli.lab import circumstances, spelled
    from rorqual.training.recipe import Recipe
    from rorqual.training.run import v41_learner

    if repeats < 1:
        raise InputError(f"repeats: {repeats} is not legal; legal: at least 1")
    plan = Recipe.load(recipe)
    corpus, device, note = _corpus(plan, data, cache, out), torch.device("cpu"), _notes()
    learners = {
        "model": v41_learner(plan, corpus.tokenizer, device),
        "twin": twin_learner(plan, corpus.tokenizer, device),
    }
    stages: dict[str, Any] = {}
    for stage in STAGES:
        step = int(stage * plan.run.steps)
        note(f"step {step}")
        batches = [corpus.batch(step + turn) for turn in range(min(repeats, plan.run.steps - step))]
        stages[f"step {step}"] = training_speed(
            learners, batches, plan.phase_at(step), plan, plan.model, repeats=repeats
        )
    command = spelled("speed", {"data": data}, {"repeats": (repeats, 5)}, recipe)
    write_document({"what": "speed", **circumstances(command), "stages": stages}, out / "speed.json")
    _show_speed(stages)
    print(f"{out / 'speed.json'} is written")


def _corpus(recipe: Recipe, data: list[Path] | None, cache: Path | None, out: Path) -> TrainingData:
    """What the recipe trains on; `out` is made first, so that hours later there is a place for the results."""
    from rorqual.training.data.prepare import TrainingData

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out: {out} cannot be a folder ({error.strerror})") from None
    return TrainingData.prepare(recipe, data or [], cache or out / "data", recipe.run.seed)


def _notes() -> Callable[[str], None]:
    """On a terminal one line that changes, elsewhere a line every few seconds; on stderr."""
    live, shown_s = sys.stderr.isatty(), time.monotonic()

    def note(what: str) -> None:
        nonlocal shown_s
        if live:
            print(f"\r{what}\x1b[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - shown_s >= NOTE_EVERY_S:
            print(what, file=sys.stderr, flush=True)
            shown_s = time.monotonic()

    return note


def _show_speed(stages: Mapping[str, Any]) -> None:
    rows: list[tuple[Cell, ...]] = []
    for name, stage in stages.items():
        rates = [one["tokens_per_s"]["median"] for one in stage["learners"].values()]
        spread = f"{stage['ratio']['min']:.2f} - {stage['ratio']['max']:.2f}"
        rows.append((name, *rates, stage["ratio"]["median"], spread, stage["reached"], bytes_text(stage["peak_bytes"])))
    columns = ("stage", "model tokens/s", "twin tokens/s", "ratio", "range", ">= 0.4", "peak memory")
    print_table(columns, rows, title="training steps")
