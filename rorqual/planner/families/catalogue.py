"""Models by name, and configs by their exact `model_type`: an unknown one is refused, never read as a similar one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rorqual.config import inference, presets
from rorqual.config.checks import refuse
from rorqual.config.files import parse
from rorqual.errors import ConfigError, InputError
from rorqual.planner.families import compressed, grouped, latent, v41
from rorqual.planner.families.family import Family

Reader = Callable[[Mapping[str, Any], str], Family]
"""(parsed config.json, name) -> family."""

READERS: Mapping[str, Reader] = MappingProxyType(
    {
        **dict.fromkeys(grouped.MODEL_TYPES, grouped.read),
        **dict.fromkeys(latent.MLA_TYPES, latent.read_mla),
        **dict.fromkeys(latent.DSA_TYPES, latent.read_dsa),
        **dict.fromkeys(compressed.MODEL_TYPES, compressed.read),
        **dict.fromkeys(v41.MODEL_TYPES, v41.read),
    }
)
"""By exact model type."""


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Models carried in the package: the presets, then facts about other models, by name.

    Without unit; source: the files in the package.

    >>> "v4.1-flash" in names(), "deepseek-v3.2" in names(), "llama-3.1-70b" in names()
    (True, True, True)
    """
    files = (resources.files(__package__) / "facts").iterdir()
    facts = (file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))
    return (*presets.NAMES, *sorted(facts))


def load(name: str) -> Family:
    """A carried model; upper and lower case are one.

    Units are `Family`'s. Source: the preset, or the model card that the facts name.

    >>> load("Llama-3.1-8B").token_bytes(), load("deepseek-v2").token_bytes()
    (Fraction(131072, 1), Fraction(69120, 1))

    Raises:
        InputError: no such model; the message names those there are.
    """
    key = name.lower()
    if key not in names():
        raise InputError(f"model must be one of {', '.join(names())}; got {name!r}")
    if key in presets.NAMES:
        return v41.of_config(presets.load(key), key)
    file = resources.files(__package__) / "facts" / f"{key}.json"
    facts = parse(file.read_text(encoding="utf-8"), file.name)
    return replace(from_config(facts["config"], key), source=facts["source"])


def from_config(root: Mapping[str, Any], name: str) -> Family:
    """The cache of a parsed config.json. Units are `Family`'s; source: the config.

    >>> fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    >>> from_config({"model_type": "llama", **fields}, "small").token_bytes()
    Fraction(512, 1)

    Raises:
        ConfigError: an unknown `model_type`, a field that is missing or illegal, or one that may change the cache in a
            way that its family's reader does not know.
    """
    model_type = root.get("model_type")
    if model_type is None and inference.looks_like(root):
        return v41.read(root, name)
    # A list or an object is no key, hence the type.
    if not isinstance(model_type, str) or model_type not in READERS:
        raise refuse("model_type", f"exactly one of {', '.join(sorted(READERS))}", model_type)
    return READERS[model_type](root, name)


def read_family(source: str) -> Family:
    """The family that an argument names: a config.json, a folder that holds one, or a carried name.

    Units are `Family`'s; source: the config that is named.

    A path that exists wins over a carried name. It is called by its folder, or by its file if that is no config.json.

    >>> read_family("DeepSeek-V3").token_bytes()
    Fraction(70272, 1)

    Raises:
        InputError: neither a path nor a carried name. ConfigError: as `from_config`.
    """
    path = Path(source)
    if not source or not path.exists():
        if source.lower() in names():
            return load(source)
        raise InputError(f"'{source}' is neither a folder, a config file, nor a carried model ({', '.join(names())})")
    file = path / "config.json" if path.is_dir() else path
    name = file.absolute().parent.name if file.name == "config.json" else file.stem
    root = _parsed(file) if file.is_file() else None
    if root is None or root.get("model_type") in v41.MODEL_TYPES:
        # The release's folder holds two files that must agree, or one under another name.
        return v41.read(source, name)
    try:
        return from_config(root, name)
    except ConfigError as error:
        raise ConfigError(f"{error} ({file})") from None


def _parsed(file: Path) -> Mapping[str, Any]:
    try:
        return parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read: {error}") from None
