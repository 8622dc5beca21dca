"""`rorqual lab twin` and `rorqual lab speed`: the dense baseline, trained by a recipe, and raced against the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.cli.output import Cell, ProgressLine, bytes_text, print_table
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.training.data.prepare import TrainingData
    from rorqual.training.recipe import Recipe

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

    Writes speed.json. Its "process_peak_bytes" is the most memory that this process ever held: both learners, both
    optimisers, the texts; what one of them needs cannot be told from it.
    """
    import torch

    from rorqual.analysis.training_speed import training_speed
    from rorqual.analysis.twin_run import twin_learner
    from rorqual.bench.report import write_document
    from rorqual.cli.lab import circumstances, spelled
    from rorqual.training.metrics import peak_bytes
    from rorqual.training.recipe import Recipe
    from rorqual.training.run import v41_learner

    if repeats < 1:
        raise InputError(f"repeats: {repeats} is not legal; legal: at least 1")
    plan = Recipe.load(recipe)
    corpus, device = _corpus(plan, data, cache, out), torch.device("cpu")
    learners = {
        "model": v41_learner(plan, corpus.tokenizer, device),
        "twin": twin_learner(plan, corpus.tokenizer, device),
    }
    stages: dict[str, Any] = {}
    with ProgressLine("stages timed") as progress:
        for done, stage in enumerate(STAGES):
            progress(done, len(STAGES))
            step = int(stage * plan.run.steps)
            batches = [corpus.batch(step + turn) for turn in range(min(repeats, plan.run.steps - step))]
            stages[f"step {step}"] = training_speed(
                learners, batches, plan.phase_at(step), plan, plan.model, repeats=repeats
            )
        progress(len(STAGES), len(STAGES))
    command, peak = spelled("speed", {"data": data}, {"repeats": (repeats, 5)}, recipe), peak_bytes(device)
    document = {"what": "speed", **circumstances(command), "process_peak_bytes": peak, "stages": stages}
    write_document(document, out / "speed.json")
    _show_speed(stages)
    print(f"peak memory of the process, with both learners and optimisers in it: {bytes_text(peak)}")
    print(f"{out / 'speed.json'} is written")


def _corpus(recipe: Recipe, data: list[Path] | None, cache: Path | None, out: Path) -> TrainingData:
    """What the recipe trains on; `out` is made first, so that hours later there is a place for the results."""
    from rorqual.training.data.prepare import TrainingData

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out: {out} cannot be a folder ({error.strerror})") from None
    return TrainingData.prepare(recipe, data or [], cache or out / "data", recipe.run.seed)


def _show_speed(stages: Mapping[str, Any]) -> None:
    rows: list[tuple[Cell, ...]] = []
    for name, stage in stages.items():
        rates = [one["tokens_per_s"]["median"] for one in stage["learners"].values()]
        spread = f"{stage['ratio']['min']:.2f} - {stage['ratio']['max']:.2f}"
        products = "bf16" if stage["bf16_products"] else "fp32"
        rows.append((name, *rates, stage["ratio"]["median"], spread, stage["reached"], products))
    columns = ("stage", "model tokens/s", "twin tokens/s", "ratio", "range", ">= 0.4", "products")
    print_table(columns, rows, title="training steps")
