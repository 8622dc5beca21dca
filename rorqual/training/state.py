"""Checkpoints of a run: everything that its next step depends on, written whole or not at all.

    checkpoints/step-00000400/
        state.safetensors   parameters as `parameter/NAME`, the optimiser's tensors as `optimiser/PATH`
        state.json          step, tokens, recipe, fingerprint of the data, the optimiser's structure, sizes of the logs
        tokenizer.json

A folder grows under a hidden name, is synced and then renamed, so a run that is killed at any moment leaves its last
checkpoint whole. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rorqual.errors import CheckpointError, InputError
from rorqual.training.recipe import Recipe

TENSORS, DOCUMENT, TOKENIZER = "state.safetensors", "state.json", "tokenizer.json"
FORMAT = 1

ANY_TIME = frozenset({"name", "run.eval_every", "run.eval_sequences", "run.sample_every", "run.save_every", "run.keep"})
"""Keys of a recipe that may change at a resume: no parameter depends on them."""
ROUNDING = frozenset({"data.micro_tokens"})
"""Keys that change the order of sums and nothing else: allowed, but the bits part."""

_UNFINISHED = ".unfinished-"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State:
    """A run after `step` optimiser steps.

    tokens: trained on so far. seconds: spent so far. logs: file name in the run's folder -> bytes that belong to the
    steps up to this one. recipe: as `recipe_document` gives it. optimiser: nested dicts, lists, tuples, tensors,
    numbers, strings.
    """

    step: int
    tokens: int
    seconds: float
    processes: int
    logs: dict[str, int]
    recipe: dict[str, Any]
    fingerprint: str
    parameters: dict[str, Tensor]
    optimiser: Any


def recipe_document(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON holds it, so that what was written and what is asked for compare equal."""
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe), default=str))
    return document


def save(folder: Path, state: State, tokenizer: str, keep: int) -> Path:
    """Write `folder/step-N` and drop all but the last `keep`; tokenizer: the text of its tokenizer.json.

    Raises:
        CheckpointError: it cannot be written (a full disk); the one before is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{state.step:08d}"
    unfinished = folder / f"{_UNFINISHED}{target.name}"
    _clear(folder)
    unfinished.mkdir()
    try:
        tensors = {f"parameter/{name}": value for name, value in state.parameters.items()}
        document = {
            "format": FORMAT,
            **{field: getattr(state, field) for field in ("step", "tokens", "seconds", "processes", "logs")},
            "fingerprint": state.fingerprint,
            "recipe": state.recipe,
            "optimiser": _pack(state.optimiser, "optimiser", tensors),
        }
        save_file(_own(tensors), unfinished / TENSORS)
        (unfinished / DOCUMENT).write_text(json.dumps(document), encoding="utf-8")
        (unfinished / TOKENIZER).write_text(tokenizer, encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{target}: cannot be written ({error}); the checkpoint before it is whole") from None
        raise
    sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def read(path: Path) -> State:
    """A checkpoint as it was saved.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        document = json.loads((path / DOCUMENT).read_text(encoding="utf-8"))
        tensors = load_file(path / TENSORS)
        if document["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {document['format']}, this version reads {FORMAT}")
        return State(
            **{field: document[field] for field in ("step", "tokens", "seconds", "processes", "logs")},
            recipe=document["recipe"],
            fingerprint=document["fingerprint"],
            parameters={
                name.removeprefix("parameter/"): value
                for name, value in tensors.items()
                if name.startswith("parameter/")
            },
            optimiser=_unpack(document["optimiser"], tensors),
        )
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); remove it to resume from the one before") from None


def check_recipe(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Whether a run may go on under the recipe asked for; the keys that change only the rounding are returned.

    Raises:
        InputError: a key that matters differs; all of them are named.
    """
    old, new = dict(_leaves(recorded, "")), dict(_leaves(asked, ""))
    differing = [key for key in (*old, *(key for key in new if key not in old)) if old.get(key) != new.get(key)]
    refused = [key for key in differing if key not in ANY_TIME | ROUNDING]
    if refused:
        named = "; ".join(f"{key} was {_short(old.get(key))}, is {_short(new.get(key))}" for key in refused[:5])
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        schedule = " (the schedule depends on the steps)" if "run.steps" in refused else ""
        raise InputError(f"resume: the recipe differs: {named}{more}{schedule}; keep it, or give a new --out")
    return [key for key in differing if key in ROUNDING]


def check_model(saved: Mapping[str, Tensor], asked: Mapping[str, Tensor]) -> None:
    """Whether the saved parameters are those of the model.

    Raises:
        InputError: naming the first that is missing, left over or of another shape.
    """
    for name in (*asked, *saved):
        if name not in saved or name not in asked:
            where = "checkpoint" if name in saved else "model"
            raise InputError(f"resume: the model differs: {name} is only in the {where}")
        if saved[name].shape != asked[name].shape or saved[name].dtype != asked[name].dtype:
            raise InputError(
                f"resume: the model differs: {name} was {_form(saved[name])}, is {_form(asked[name])}; "
                "keep the recipe, or give a new --out"
            )


def copy_into(parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Overwrite parameters in place."""
    check_model(saved, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def sync(path: Path) -> None:
    """Push a file's or folder's bytes to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file beside its place, then move it there."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    sync(part)
    part.replace(path)


def _clear(folder: Path) -> None:
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left)


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, each with a storage of its own: the format holds neither views nor shared memory."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        storage = value.untyped_storage()
        shared = storage.nbytes() != value.nbytes or storage.data_ptr() in seen
        found[name] = value.clone() if shared else value
        seen.add(storage.data_ptr())
    return found


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """As JSON, containers tagged by their kind; tensors go into `tensors` under their path."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    assert value is None or isinstance(value, bool | int | float | str), f"{path} is a {type(value).__name__}"
    return value


def _unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def _leaves(document: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(document, Mapping):
        yield path, document
        return
    for key, value in document.items():
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _form(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"
