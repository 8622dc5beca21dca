"""Texts for a quality study in the ids of the model: files, ids, or what a recipe holds out of its corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.analysis.quality_windows import Document
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.training.data.documents import Document as Text
from rorqual.training.data.english import English
from rorqual.training.data.prepare import TrainingData
from rorqual.training.data.sources import Files
from rorqual.training.data.split import heldout_groups
from rorqual.training.data.tokens import plain_ids
from rorqual.training.recipe import DataRecipe, Recipe
from rorqual.training.run import CACHE, MODEL, RUN

ENDINGS = (".json", ".npy", ".npz", ".safetensors")


def text_documents(paths: Sequence[Path], tokenizer: Tokenizer, config: ModelConfig) -> list[Document]:
    """Text files, folders and JSONL, every document of them; conversations are left out.

    Raises:
        InputError: a path that does not exist or is no text.
    """
    return encoded(Files(paths).documents(), tokenizer, config)


def encoded(texts: Iterable[Text], tokenizer: Tokenizer, config: ModelConfig) -> list[Document]:
    """The plain texts among them between bos and eos, as training packs them."""
    return [
        Document(
            name=text.name,
            ids=torch.tensor([config.bos_token_id, *plain_ids(tokenizer, text.text), config.eos_token_id]),
        )
        for text in texts
        if text.kind == "text"
    ]


def id_documents(path: Path, config: ModelConfig) -> list[Document]:
    """Ids from JSON (a list of integers, or a list of such lists), .npy or .safetensors (rows are documents), .npz.

    Raises:
        InputError: no such file, another kind of file, no integers, or ids outside the vocabulary.
    """
    if not path.is_file():
        raise InputError(f"ids: {path} does not exist")
    try:
        arrays = _arrays(path)
    except (ValueError, OSError, EOFError, SafetensorError, RecursionError) as error:
        raise InputError(f"ids: {path} cannot be read ({' '.join(str(error).split())})") from error
    documents = []
    for name, array in arrays.items():
        if array.dtype.is_floating_point or array.dtype == torch.bool or array.dim() not in (1, 2) or not array.numel():
            raise InputError(f"ids: {path} holds {list(array.shape)} of {array.dtype}; legal: integers, [n] or [p, n]")
        if int(array.min()) < 0 or int(array.max()) >= config.vocab_size:
            raise InputError(f"ids: {path} holds ids outside the vocabulary; legal ids are 0..{config.vocab_size - 1}")
        rows = array.to(torch.int64).reshape(-1, array.shape[-1])
        names = [name] if len(rows) == 1 else [f"{name}:{i}" for i in range(len(rows))]
        documents += [Document(name=own, ids=row) for own, row in zip(names, rows, strict=True)]
    return documents


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".json":
        return _json_arrays(json.loads(path.read_text(encoding="utf-8")), path.stem)
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix not in ENDINGS:
        raise ValueError(f"legal: {', '.join(ENDINGS)}")
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        return {path.stem: _tensor(found)}
    with found:
        return {name: _tensor(found[name]) for name in found.files}


def _json_arrays(value: Any, name: str) -> dict[str, Tensor]:
    lists = {name: value}
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        lists = {f"{name}:{i}": row for i, row in enumerate(value)}
    for row in lists.values():
        if not isinstance(row, list) or not all(type(item) is int for item in row):
            raise ValueError("a JSON list of integers, or of such lists, is needed")
    return {own: torch.tensor(row, dtype=torch.int64) for own, row in lists.items()}


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "iu":
        raise ValueError(f"integers are needed, not {array.dtype}")
    return torch.from_numpy(array.astype(np.int64))


def heldout_documents(data: DataRecipe, tokenizer: Tokenizer, config: ModelConfig) -> list[Document]:
    """The texts that a recipe with a corpus of its own never trains on.

    Raises:
        InputError: the corpus's packages are missing; the recipe has no corpus, or holds nothing out.
    """
    if data.corpus != "english":
        raise InputError("data: the recipe has no corpus of its own; give --data, --ids or --run")
    source = English()
    held = heldout_groups(source.documents(), data.heldout, data.heldout_fraction)
    if not held:
        raise InputError("data: the recipe holds nothing out; give --data, --ids or --run")
    return encoded((d for d in source.documents() if d.family in held), tokenizer, config)


def trained_documents(data: DataRecipe, tokenizer: Tokenizer, config: ModelConfig) -> list[Document]:
    """The texts that a recipe with a corpus of its own trains on: what `heldout_documents` leaves.

    Raises:
        InputError: the corpus's packages are missing; the recipe has no corpus.
    """
    if data.corpus != "english":
        raise InputError("data: the recipe has no corpus of its own; give --data")
    source = English()
    held = heldout_groups(source.documents(), data.heldout, data.heldout_fraction)
    return encoded((d for d in source.documents() if d.family not in held), tokenizer, config)


def run_documents(run: Path, tokenizer: Tokenizer) -> list[Document]:
    """The held-out texts of a training run.

    Raises:
        InputError: not a run's folder; data or tokenizer that are not the run's.
    """
    data = run_data(run)
    if data.tokenizer.to_str() != tokenizer.to_str():
        raise InputError(f"run: the model's tokenizer is not that of {run}")
    return [Document(name=name, ids=ids.to(torch.int64)) for name, _, ids in data.documents("heldout", "text")]


def run_data(run: Path) -> TrainingData:
    """What a training run was trained on, from its own folder.

    Raises:
        InputError: not a run's folder, or its data have changed since.
    """
    try:
        stated = json.loads((run / RUN).read_text(encoding="utf-8"))
        recipe, paths, fingerprint = stated["recipe"], stated["data"], stated["fingerprint"]
        sections = {name: recipe[name] for name in ("data", "loss", "phases", "optim", "run")}
        # Recipes are read from TOML only, and JSON's scalars and lists of strings are TOML's too.
        lines = [f"model = {json.dumps(MODEL)}"]
        for name, section in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"run: {run} is not the folder of a finished training run ({error!r})") from None
    read = Recipe.parse("\n".join(lines), run.name, run)
    data = TrainingData.prepare(read, paths, run / CACHE, read.run.seed)
    if data.fingerprint != fingerprint:
        raise InputError(f"run: the texts of {run} have changed since it was trained")
    return data
