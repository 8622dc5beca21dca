"""Studies of a trained model: what cache formats, prefill, hits and drafts do to it, and how well it writes.

A study is a row of `VERBS`, a function here or beside, and what it calls in `rorqual.analysis`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rorqual.cli.app import Verb
from rorqual.cli.output import Cell, ProgressLine, print_table
from rorqual.errors import InputError

if TYPE_CHECKING:
    from rorqual.analysis.quality_windows import Document
    from rorqual.config import ModelConfig

VERBS: tuple[Verb, ...] = (
    Verb(name="quality", target="rorqual.cli.lab:quality", help="Loss of every cache, prefill, hit; drafts accepted"),
    Verb(name="language", target="rorqual.cli.lab:language", help="Loss against counts and a dense twin; its writing"),
    Verb(name="twin", target="rorqual.cli.lab_twin:twin", help="Train the dense twin of a recipe's model"),
    Verb(name="own-text", target="rorqual.cli.lab_own_text:own_text", help="What a model says: texts for its drafts"),
    Verb(name="speed", target="rorqual.cli.lab_twin:speed", help="Race a training step against the dense twin's"),
)

RECIPE = "demo"
"""Whose held-out documents are read when no texts are given."""
LENGTHS, PROMPTS, DRAFTS, CHUNK = "512,2048,3968", 100, 24, 512


def quality(
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; else the run's, or the shipped one.")] = None,
    data: Annotated[list[Path] | None, typer.Option(help="Held-out text: file, folder, JSONL; repeatable.")] = None,
    ids: Annotated[Path | None, typer.Option(help="Or its ids: JSON, .npy, .npz or .safetensors.")] = None,
    run: Annotated[Path | None, typer.Option(help="Or a training run's folder: what it held out.")] = None,
    prompts: Annotated[int, typer.Option(help="Prompts of each length.")] = PROMPTS,
    lengths: Annotated[str, typer.Option(help="Prompt tokens, ascending.")] = LENGTHS,
    drafts: Annotated[int, typer.Option(help="Prompts whose continuation is drafted.")] = DRAFTS,
    plain: Annotated[
        Path | None, typer.Option(help="The same model exported unquantised, to compare with; else the run's, if any.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results; a stopped study goes on there.")] = Path("quality"),
    chunk: Annotated[int, typer.Option(help="Prompt tokens a prefill step.")] = CHUNK,
    numerics: Annotated[str, typer.Option(help="fp32 or native.")] = "fp32",
    kernels: Annotated[str, typer.Option(help="auto, fast or plain.")] = "auto",
    seed: Annotated[int, typer.Option(help="Draws the windows of text.")] = 0,
) -> None:
    """Measure the loss after prompts in every way to run a model, and the tokens a verification of drafts.

    Without --data, --ids and --run it reads what the demo's recipe holds out. Writes quality.json and quality.md.
    """
    from rorqual.analysis.quality import Settings, run_quality
    from rorqual.analysis.quality_report import log_text, tables
    from rorqual.bench.report import write_document
    from rorqual.checkpoint.shipped import shipped_model
    from rorqual.config import ModelConfig
    from rorqual.training.run import MODEL, PLAIN_MODEL

    settings = Settings(
        lengths=counts(lengths),
        prompts=prompts,
        drafts=drafts,
        chunk=chunk,
        numerics=numerics,
        kernels=kernels,
        seed=seed,
    )
    if model is None and run is not None:
        model = run / MODEL
        if plain is None and (run / PLAIN_MODEL).is_dir():
            plain = run / PLAIN_MODEL
    folder = shipped_model() if model is None else model
    documents = texts(folder, ModelConfig.from_json(folder), data or [], ids, run)
    named = {"model": model, "data": data, "ids": ids, "run": run, "plain": plain}
    changed = {"prompts": (prompts, PROMPTS), "lengths": (lengths, LENGTHS), "drafts": (drafts, DRAFTS)}
    changed |= {"chunk": (chunk, CHUNK), "numerics": (numerics, "fp32"), "kernels": (kernels, "auto")}
    changed |= {"seed": (seed, 0)}
    with ProgressLine("measuring", minutes) as line:
        found = run_quality(
            folder,
            documents,
            settings,
            out,
            plain=plain,
            progress=lambda passed, expected: line(round(passed), round(expected)),
        )
    document = {**found, **circumstances(spelled("quality", named, changed))}
    write_document(document, out / "quality.json")
    (out / "quality.md").write_text(log_text(document), encoding="utf-8")
    for title, columns, rows in tables(document):
        print_table(columns, rows, title=title)
        print()
    for note in document["notes"]:
        print(note)
    print(f"{out / 'quality.json'} and {out / 'quality.md'} are written")


def language(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A finished training run's folder.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder; else the run's, or the shipped one.")] = None,
    twin: Annotated[Path | None, typer.Option(help="The run of its dense twin, to compare with.")] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Without RUN: tokenizer and shards; default data beside out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write, .json; default RUN/language.json.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw the loss by position beside it (needs matplotlib).")] = True,
) -> None:
    """Measure what a trained model has learned: bits a character, loss by position, its words and replies.

    Without RUN it reads what the demo's recipe trains on and holds out.
    """
    from rorqual.analysis.fingerprint import fingerprint
    from rorqual.analysis.language import language_report
    from rorqual.analysis.positions import by_learner
    from rorqual.analysis.quality_texts import run_data
    from rorqual.analysis.twin_run import load_twin
    from rorqual.bench.report import check_out, write_document
    from rorqual.checkpoint.shipped import shipped_model
    from rorqual.model.load import load
    from rorqual.training.data.prepare import TrainingData
    from rorqual.training.learner import Phase
    from rorqual.training.recipe import Recipe
    from rorqual.training.run import MODEL

    if run is not None and cache is not None:
        raise InputError("cache: a run has its own data; legal: RUN or --cache")
    out = (Path() if run is None else run) / "language.json" if out is None else out
    check_out(out)
    folder = (shipped_model() if run is None else run / MODEL) if model is None else model
    measured = {"name": folder.name, "fingerprint": fingerprint(folder, "model")}
    weights = load(folder)
    # Twins until the kernels are compiled, as `auto` has it, would round the first documents otherwise.
    weights.backend.warm()
    if run is not None:
        corpus = run_data(run)
    else:
        recipe = Recipe.load(RECIPE)
        corpus = TrainingData.prepare(recipe, [], cache or out.parent / "data", recipe.run.seed)
    baseline = None if twin is None else load_twin(twin, weights.config, corpus.fingerprint)
    report = language_report(
        weights,
        corpus,
        twin=None if baseline is None else by_learner(baseline.learner, Phase()),
        trained=None if baseline is None else baseline.trained,
        plot=out.with_suffix(".png") if plot else None,
        note=lambda text: print(text, file=sys.stderr, flush=True),
    )
    command = spelled("language", {"model": model, "twin": twin}, {}, *([] if run is None else [run.name]))
    document = {"what": "language", "model": measured, **circumstances(command), **report}
    write_document(document, out)
    rows: list[tuple[Cell, ...]] = [
        (name, "undecided" if reached is None else reached) for name, reached in bars(report)
    ]
    print_table(("bar", "reached"), rows, title=command)
    print(f"{out} is written")


def bars(report: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, bool | None]]:
    """(where in the report, whether it was reached, None for undecided) of everything that has a bar."""
    for key, value in report.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from bars(value, name)
        elif isinstance(value, bool | None) and (key.endswith("reached") or key == "no_step"):
            yield name.removesuffix(".reached").removesuffix("_reached"), value


def counts(text: str) -> tuple[int, ...]:
    """`512,2048` as numbers. Raises InputError on anything else."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"lengths: '{text}' is not legal; legal: ascending counts, as in 512,2048,3968")
    return tuple(int(part) for part in parts)


def texts(folder: Path, config: ModelConfig, data: list[Path], ids: Path | None, run: Path | None) -> list[Document]:
    """What the study reads, in the model's ids."""
    from rorqual.analysis.quality_texts import heldout_documents, id_documents, run_documents, text_documents
    from rorqual.checkpoint.tokenizer import read_tokenizer
    from rorqual.training.recipe import Recipe

    if bool(data) + (ids is not None) + (run is not None) > 1:
        raise InputError("data: given twice; legal: one of --data, --ids and --run")
    if ids is not None:
        return id_documents(ids, config)
    file = folder / "tokenizer.json"
    if not file.exists():
        raise InputError(f"data: {folder} has no tokenizer.json; give --ids instead of text")
    tokenizer = read_tokenizer(file)
    if run is not None:
        return run_documents(run, tokenizer)
    if data:
        return text_documents(data, tokenizer, config)
    return heldout_documents(Recipe.load(RECIPE).data, tokenizer, config)


def spelled(study: str, paths: Mapping[str, Any], changed: Mapping[str, tuple[Any, Any]], *words: str) -> str:
    """The command line that measures the same: what differs from the defaults, without paths of this machine."""
    found = ["rorqual", "lab", study, *words]
    for name, value in paths.items():
        for path in value if isinstance(value, list) else [value]:
            found += [f"--{name}", path.name] if path is not None else []
    for name, (value, default) in changed.items():
        found += [f"--{name}", str(value)] if value != default else []
    return shlex.join(found)


def circumstances(command: str) -> dict[str, Any]:
    """What every study's document says about its run."""
    from rorqual.bench.machine import commit, machine

    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
    }


def minutes(seconds: int) -> str:
    """`41 s`, `12 min`."""
    return f"{seconds} s" if seconds < 100 else f"{seconds / 60:.0f} min"
