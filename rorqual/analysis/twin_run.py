"""Training the dense twin by a V4.1 recipe, and reading it back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from rorqual.analysis.dense_twin import DenseTwin
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.training.fit import fit_config
from rorqual.training.recipe import Recipe
from rorqual.training.run import Trained, train
from rorqual.training.state import checkpoints, copy_into, read
from rorqual.training.trainer import CHECKPOINTS


def twin_learner(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> DenseTwin:
    """The untrained twin of a recipe's model: what `train(learner=...)` takes."""
    twin = DenseTwin.fresh(fit_config(recipe.model, tokenizer), recipe.run.seed)
    for parameter in twin.parameters.values():
        parameter.data = parameter.data.to(device)
    return twin


def train_twin(
    recipe: Recipe | str | os.PathLike[str],
    data: Sequence[str | os.PathLike[str]] = (),
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Trained:
    """`train` with the twin in the model's place: same data, order, steps, optimisers and schedule; nothing exported.

    Raises:
        ConfigError, InputError: as `train`.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    folder = Path("runs") / f"{recipe.name}-twin" if out is None else out
    return train(recipe, data, folder, learner=twin_learner, **options)


def load_twin(run: Path, config: ModelConfig) -> DenseTwin:
    """The twin of a model `config` after the last checkpoint of a run folder.

    Raises:
        InputError: no checkpoint there, or one of something else than this model's twin.
    """
    kept = checkpoints(run / CHECKPOINTS)
    if not kept:
        raise InputError(f"twin: {run} holds no checkpoint of a run")
    twin = DenseTwin.fresh(config, 0)
    try:
        copy_into(twin.parameters, read(kept[-1]).parameters)
    except InputError as error:
        raise InputError(f"twin: {run} is not the dense twin of this model ({error})") from None
    return twin
