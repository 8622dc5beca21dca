"""Finds the config file or files, parses them, and recognises the layout by name, never by a prefix of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rorqual.config import huggingface, inference
from rorqual.config.checks import refuse
from rorqual.config.reading import Reading
from rorqual.errors import ConfigError

FILE_NAMES = ("config.json", "inference_config.json", "inference/config.json")
"""Looked for in a folder, the preferred one first; the last is where the release keeps its own."""


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Reading:
    """A parsed config, a file, or a folder that holds one or more of FILE_NAMES."""
    if isinstance(source, Mapping):
        return recognise(source, "config")
    path = Path(source)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; expected a folder or a file in either layout")
    return recognise(_parse_file(path), path.name)


def recognise(root: Mapping[str, Any], label: str) -> Reading:
    """Hands the object to the layout it is in. An unknown `model_type` is refused by name."""
    if "model_type" in root:
        if root["model_type"] != huggingface.MODEL_TYPE:
            raise refuse("model_type", f"exactly {huggingface.MODEL_TYPE}", root["model_type"])
        with Reading(stated={}, label=label).located():
            return huggingface.read(root, label)
    if inference.looks_like(root):
        with Reading(stated={}, label=label, keys=inference.ERROR_KEYS).located():
            return inference.read(root, label)
    raise ConfigError(
        f"model_type is missing: {label} is neither a Hugging Face config.json of {huggingface.MODEL_TYPE} "
        "nor an inference_config.json with dim and n_layers"
    )


def _read_folder(folder: Path) -> Reading:
    found = [name for name in FILE_NAMES if (folder / name).is_file()]
    if not found:
        raise ConfigError(f"config file not found in {folder}; expected {', '.join(FILE_NAMES)}")
    preferred, *others = (recognise(_parse_file(folder / name), name) for name in found)
    for other in others:
        preferred = other.merged_under(preferred)
    return preferred


def _parse_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    return parse(text, str(path))


def parse(text: str, label: str) -> Mapping[str, Any]:
    """A JSON object, in which no key is given twice."""
    try:
        root = json.loads(text, object_pairs_hook=_without_repeats)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"config file {label} is not JSON: {error}") from None
    if not isinstance(root, dict):
        raise ConfigError(f"config file {label} must hold a JSON object; got {type(root).__name__}")
    return root


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    root = dict(pairs)
    if len(root) != len(pairs):
        repeated = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        raise ConfigError(f"{repeated[0]} is given twice in one JSON object")
    return root
