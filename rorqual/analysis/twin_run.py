"""Training the dense twin by a V4.1 recipe, and reading it back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
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
    """The untrained twin of a recipe's model: what `train(learner=...)` takes. It reads the same noise."""
    twin = DenseTwin.fresh(fit_config(recipe.model, tokenizer), recipe.run.seed, recipe.loss.noise)
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedTwin:
    """A twin and the run that made it: steps taken, tokens trained on, the recipe as `recipe_document` gives it."""

    learner: DenseTwin
    step: int
    tokens: int
    recipe: dict[str, Any]

    @property
    def trained(self) -> dict[str, Any]:
        """What a comparison with the twin has to say of its training, for JSON."""
        rates = {name: self.recipe["optim"][name] for name in ("lr", "lr_table")}
        return {"step": self.step, "tokens": self.tokens, **rates}


def load_twin(run: Path, config: ModelConfig, fingerprint: str) -> TrainedTwin:
    """The twin of a model `config` after the last checkpoint of a run folder.

    fingerprint: of the data that the twin must have been trained on (`TrainingData.fingerprint`: what they say, how
        they are cut and ordered, the seed).

    Raises:
        InputError: no checkpoint there; one of something else than this model's twin, trained on other data, or
            from before its recipe's last step.
    """
    kept = checkpoints(run / CHECKPOINTS)
    if not kept:
        raise InputError(f"twin: {run} holds no checkpoint of a run")
    twin, state = DenseTwin.fresh(config, 0), read(kept[-1])
    try:
        copy_into(twin.parameters, state.parameters)
    except InputError as error:
        raise InputError(f"twin: {run} is not the dense twin of this model ({error})") from None
    if state.fingerprint != fingerprint:
        raise InputError(
            f"twin: {run} was trained on other data (texts, sequence lengths, batch, share of chats or seed differ); "
            "train it by the model's recipe on the model's texts"
        )
    steps = state.recipe["run"]["steps"]
    if state.step < steps:
        raise InputError(f"twin: {run} stopped after step {state.step:,} of {steps:,}; go on with --resume")
    return TrainedTwin(learner=twin, step=state.step, tokens=state.tokens, recipe=state.recipe)
