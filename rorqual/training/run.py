"""A whole run: recipe and texts in, a folder with checkpoints, metrics, a curve and an exported model out.

out/run.json        what was asked for
out/metrics.jsonl   one object a step and an evaluation
out/samples.txt     how the model goes on from held-out beginnings
out/checkpoints/    what --resume goes on from
out/data/           tokenizer and token shards, unless another cache is named
out/loss.png        the curve (needs matplotlib)
out/model/          the exported model, as `rorqual.load` takes it
out/model-plain/    the same unquantised, if asked for
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from rorqual.errors import ConfigError, InputError
from rorqual.training.data.prepare import TrainingData
from rorqual.training.data.tokens import special_ids
from rorqual.training.distributed import Processes, joined
from rorqual.training.fit import fit_config
from rorqual.training.learner import Learner
from rorqual.training.metrics import METRICS, TensorBoard, read_metrics, require_tensorboard
from rorqual.training.optim import Optimizers, query_heads
from rorqual.training.plot import PLOT, draw
from rorqual.training.progress import Reporter, duration_text
from rorqual.training.recipe import Recipe
from rorqual.training.start import Start
from rorqual.training.state import (
    State,
    check_recipe,
    checkpoints,
    copy_into,
    read,
    recipe_document,
    write_atomically,
)
from rorqual.training.trainer import CHECKPOINTS, Ended, Trainer

RUN = "run.json"
CACHE = "data"
MODEL, PLAIN_MODEL = "model", "model-plain"

LearnerFactory = Callable[[Recipe, Tokenizer, torch.device], Learner]
"""Builds what is trained, from the recipe's seed; a baseline brings its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run left: its folder, how it ended, the curve and the exported model (None where not made).

    first: whether this process is the one that speaks.
    """

    out: Path
    first: bool
    ended: Ended
    plot: Path | None
    model: Path | None


def train(
    recipe: Recipe | str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    overrides: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
    export: bool = True,
    plain: bool = False,
    device: str = "cpu",
    init: str | os.PathLike[str] | None = None,
    learner: LearnerFactory | None = None,
    reporter: Reporter | None = None,
) -> Trained:
    """Train by a recipe; under `torchrun` every process calls this.

    Args:
        recipe: one, or a preset's name or a TOML file.
        data: files and folders of text or JSONL; may be empty where the recipe names a corpus.
        out: new or empty, unless `resume`; default `runs/NAME`.
        resume: go on from the last checkpoint in `out`, if there is one.
        overrides: `section.key` of the recipe -> value, as in {"run.steps": 100}.
        cache: where tokenizer and shards are kept, so that runs can share them; default `out/data`.
        export: write `out/model` at the end, in the recipe's weight formats; `plain`: and beside it `out/model-plain`,
            the same weights as BF16.
        device: cpu, cuda, or auto (cuda where there is one; plain torch ops there, and never tried on a real one).
        init: a checkpoint's folder, whose values the parameters start from and whose tokenizer reads the texts; the
            recipe's model must be its model.
        learner: what to train instead of the V4.1 model; nothing is exported then.

    Raises:
        ConfigError: the recipe; or a loss that is not finite.
        InputError: data, out, init, or a resume that does not fit.
        CheckpointError: init cannot be read.
    """
    recipe = changed(recipe if isinstance(recipe, Recipe) else Recipe.load(recipe), overrides or {})
    place = chosen_device(device)
    folder = Path("runs") / recipe.name if out is None else Path(out)
    paths = [Path(path) for path in data]
    start = None if init is None else Start.read(init)
    if start is None and recipe.loss.learn == "draft":
        raise InputError("init: none given; drafts alone are trained for a model that is there: --init FOLDER")
    with joined(place.type) as processes, ExitStack() as stack:
        reporter = reporter or Reporter(silent=not processes.first)
        state = _resumed(recipe, folder, processes, reporter) if resume else None
        if not resume:
            _refuse_occupied(folder)
        if tensorboard:
            require_tensorboard()
        processes.barrier()  # nobody writes before all have looked
        tokenizer = None if start is None else start.tokenizer
        texts = _prepared(recipe, paths, folder / CACHE if cache is None else Path(cache), processes, tokenizer)
        if (lock := processes.first_does(lambda: _locked(folder))) is not None:
            stack.callback(os.close, lock)
        if state is not None and state.fingerprint != texts.fingerprint:
            raise InputError(f"resume: the data differ from those of {folder}; give the same --data, or a new --out")
        trained = (learner or v41_learner)(recipe, texts.tokenizer, place)
        if start is not None:
            copy_into(trained.parameters, start.values(fit_config(recipe.model, texts.tokenizer)))
        trainer = _trainer(recipe, texts, trained, folder, processes, reporter)
        if state is not None:
            trainer.restore(state)
            reporter.note(f"resumed after step {state.step} of {recipe.run.steps}")
            del state  # as large as the model and its optimiser
        if processes.first:
            for line in texts.summary().splitlines():
                reporter.note(line)
            _begin(recipe, texts, folder, paths, start)
            if tensorboard:
                trainer.sinks.append(TensorBoard(folder / "tensorboard", trainer.steps_done))
        ended = trainer.run()
        plot = _draw(recipe, folder, reporter) if processes.first else None
        model = None
        if export and learner is None and processes.first and not ended.signal:
            model = _export(trained, recipe, texts.tokenizer, folder / MODEL, quantised=True)
            if plain:
                _export(trained, recipe, texts.tokenizer, folder / PLAIN_MODEL, quantised=False)
    return Trained(out=folder, first=processes.first, ended=ended, plot=plot, model=model)


def _trainer(
    recipe: Recipe, texts: TrainingData, learner: Learner, folder: Path, processes: Processes, reporter: Reporter
) -> Trainer:
    return Trainer(
        recipe,
        texts,
        learner,
        folder,
        optimiser=Optimizers(learner.parameters, recipe.optim, query_heads(learner.parameters, recipe.model)),
        processes=processes,
        reporter=reporter,
        stop_id=special_ids(texts.tokenizer).eos,
    )


def changed(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe with single fields changed, checked as in a file.

    Raises:
        ConfigError: an unknown key, another type, or out of range.
    """
    known = {
        section.name: [key.name for key in dataclasses.fields(getattr(recipe, section.name))]
        for section in dataclasses.fields(recipe)
        if section.name not in ("name", "model")
    }
    sections: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        name, _, key = path.partition(".")
        if name not in known:
            raise ConfigError(f"{path} is no key of a recipe; legal: SECTION.KEY, the sections {', '.join(known)}")
        if key not in known[name]:
            raise ConfigError(f"{path} is unknown; legal: {', '.join(known[name])}")
        sections.setdefault(name, {})[key] = value
    return recipe.replace(
        **{name: dataclasses.replace(getattr(recipe, name), **values) for name, values in sections.items()}
    )


def chosen_device(name: str) -> torch.device:
    """cpu, cuda (this process's own under torchrun), or auto.

    Raises:
        InputError: another name, or no such device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device: {name} is not legal; legal: auto, cpu, cuda")
    if name == "cpu" or not torch.cuda.is_available():
        if name == "cuda":
            raise InputError("device: cuda was asked for and there is none; legal here: cpu")
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(place + 1))) > count:
        raise InputError(f"processes: more than the {count} CUDA devices of this machine; legal: 1..{count}")
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device


def v41_learner(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> Learner:
    """The V4.1 model of a recipe, fresh."""
    from rorqual.training.learner_v41 import V41Learner

    return V41Learner(fit_config(recipe.model, tokenizer), tokenizer, recipe.loss, recipe.run.seed, device=device)


def _refuse_occupied(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"out: {out} is a file; give a new or empty folder")
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    # A cache alone is what an earlier try left that failed or was stopped while it read the texts.
    if held not in ([], [CACHE]):
        hint = "go on with --resume, or give a new folder" if RUN in held else "give a new or empty folder"
        raise InputError(f"out: {out} is not empty (it holds {held[0]}); {hint}")


def _resumed(recipe: Recipe, out: Path, processes: Processes, reporter: Reporter) -> State | None:
    """The last checkpoint of a run that this recipe may go on with; None where the run has none yet."""
    if not out.is_dir() or not any(out.iterdir()):
        return None
    if sorted(path.name for path in out.iterdir()) == [CACHE]:
        return None  # stopped while it read the texts
    if not (out / RUN).is_file():
        raise InputError(f"out: {out} holds other files and no {RUN}; there is no run to resume")
    kept = checkpoints(out / CHECKPOINTS)
    if not kept:
        return None
    state = read(kept[-1])
    rounding = check_recipe(state.recipe, recipe_document(recipe))
    if state.processes != processes.world:
        rounding.append("the number of processes")
    if rounding:
        reporter.note(f"resume: {', '.join(rounding)} differs: sums are taken in another order, the bits will part")
    return state


def _prepared(
    recipe: Recipe, data: Sequence[Path], cache: Path, processes: Processes, tokenizer: Tokenizer | None
) -> TrainingData:
    """The first process builds the cache, the others read it."""
    texts = processes.first_does(lambda: TrainingData.prepare(recipe, data, cache, recipe.run.seed, tokenizer))
    return texts or TrainingData.prepare(recipe, data, cache, recipe.run.seed, tokenizer)


def _locked(out: Path) -> int:
    """A handle that keeps other runs out of a folder until it is closed, or this process is gone.

    Raises:
        InputError: another run is in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(f"out: another run is training in {out}; wait for it, or give a new folder") from None
    return handle


def _begin(recipe: Recipe, texts: TrainingData, out: Path, data: Sequence[Path], start: Start | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "recipe": recipe_document(recipe),
        "data": [str(path) for path in data],
        "fingerprint": texts.fingerprint,
        **({} if start is None else {"init": str(start.folder)}),
    }
    write_atomically(out / RUN, json.dumps(document, indent=2) + "\n")


def _draw(recipe: Recipe, out: Path, reporter: Reporter) -> Path | None:
    if draw(read_metrics(out / METRICS), recipe, out / PLOT):
        return out / PLOT
    reporter.note("no plot of the loss: matplotlib is not installed; pip install 'rorqual[plots]'")
    return None


def _export(learner: Learner, recipe: Recipe, tokenizer: Tokenizer, folder: Path, *, quantised: bool) -> Path:
    """Written beside what an earlier, finished resume may have left, which it then replaces."""
    from rorqual.training.export import export

    parameters = {name: parameter.detach().cpu() for name, parameter in learner.parameters.items()}
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    export(parameters, fit_config(recipe.model, tokenizer), tokenizer, part, quantised=quantised)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder


def summary(trained: Trained) -> list[str]:
    """Where things are, a line each."""
    ended = trained.ended
    lines = [f"{trained.out}: {ended.step} of {ended.steps} steps"]
    if ended.last:
        lines[0] += f" in {duration_text(ended.last['seconds'])}, loss {ended.last['loss']:.4f}"
    if ended.evaluation:
        lines.append(
            f"held out: loss {ended.evaluation['loss']:.4f}, "
            f"{ended.evaluation['bits_per_character']:.4f} bits a character"
        )
    if trained.plot:
        lines.append(f"curve: {trained.plot}")
    lines.append(f"checkpoints: {trained.out / CHECKPOINTS}")
    if ended.signal:
        lines.append("stopped; go on with the same command and --resume")
    if trained.model:
        lines.append(f"model: {trained.model}  (rorqual generate --model {trained.model} PROMPT)")
    return lines
