"""Dumps of tensors on disk, read one tensor at a time, and the file that maps another project's names to ours.

A rename file is TOML or JSON: their name -> our name, first match wins, names without a match stay as they are.

    "blk.*.attn.o"            = "layers.*.attn_out"       # a * is a run of characters without a dot, ** any run;
    "model.**.hash"           = "**.engram.hash_ids"      # the stars on the right take what those on the left matched
    're:^blk(\\d+)_(in|out)$' = 're:layers.\\1.ffn_\\2'   # after re: a regular expression and a replacement

TOML tables and nested JSON objects are joined by dots, so that unquoted TOML keys work too.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from rorqual.errors import InputError

EXPECTED = "expected.safetensors"
BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
"""Dtypes whose tensors are compared as the bytes that they are: codes and scales."""


class Dump(Mapping[str, Tensor]):
    """Tensors by name, read when asked for. `readme` is the README.json of a golden folder, or empty."""

    def __init__(self, path: Path, names: Sequence[str], source: Any, readme: Mapping[str, Any]) -> None:
        self.path, self.readme = path, readme
        self._names = dict.fromkeys(names)
        self._source = source

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            found = self._source.get_tensor(name) if hasattr(self._source, "get_tensor") else self._source[name]
            return found if isinstance(found, Tensor) else from_numpy(found)
        except Exception as error:
            raise InputError(f"{self.path}: tensor '{name}' cannot be read ({error})") from error


def open_dump(path: str | Path) -> Dump:
    """Open a .safetensors or .npz file, or a golden folder (its expected.safetensors).

    Raises:
        InputError: no such file, a folder without one, or a file that is not what its ending says.
    """
    file = Path(path)
    readme: Mapping[str, Any] = {}
    if file.is_dir():
        if not (file / EXPECTED).is_file():
            raise InputError(
                f"{file}: a folder without {EXPECTED}; a dump is a .safetensors or .npz file or a golden folder"
            )
        readme = _readme(file / "README.json")
        file = file / EXPECTED
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if file.suffix not in (".safetensors", ".npz"):
        raise InputError(f"{file}: a dump ends in .safetensors or .npz, or is a golden folder")
    try:
        source: Any = (
            np.load(file, allow_pickle=False) if file.suffix == ".npz" else safe_open(str(file), framework="pt")
        )
        names = list(source.files if file.suffix == ".npz" else source.keys())
    except Exception as error:
        raise InputError(f"{file}: cannot be read as {file.suffix} ({error})") from error
    return Dump(file, names, source, readme)


def _readme(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def from_numpy(array: Any) -> Tensor:
    """A tensor of an array; numpy has no bf16 and stores one as two raw bytes an element."""
    array = np.ascontiguousarray(array) if array.ndim else array
    if array.dtype.kind == "V" and array.dtype.itemsize in (1, 2):
        raw = torch.from_numpy(array.view(np.uint8 if array.dtype.itemsize == 1 else np.int16))
        return raw if array.dtype.itemsize == 1 else raw.view(torch.bfloat16)
    if array.dtype.kind not in "biufc":
        raise InputError(f"dtype {array.dtype} is no number")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array.astype(array.dtype.newbyteorder("="))))


def numbers(x: Tensor) -> Tensor:
    """float64 or int64 of any dtype, at least one dimension. fp8 and E8M0 become their bytes, complex gets a last
    dimension of 2, bool is 0 and 1."""
    if x.dtype in BYTE_FLOATS:
        x = x.view(torch.uint8)
    if x.is_complex():
        x = torch.view_as_real(x)
    x = x.double() if x.is_floating_point() else x.to(torch.int64)
    return x.reshape(1) if x.dim() == 0 else x


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a rename file, compiled."""

    theirs: str
    ours: str
    pattern: re.Pattern[str]
    replacement: str


@dataclass(slots=True)
class Renames:
    """Rules in the order of their file. `unused` is filled by `apply`."""

    rules: Sequence[Rule] = ()
    unused: list[str] = field(default_factory=list)

    def apply(self, names: Sequence[str]) -> dict[str, str]:
        """our name -> their name of all of `names`.

        Raises InputError when two of their names become one of ours.
        """
        used: set[str] = set()
        found: dict[str, str] = {}
        for name in names:
            target = name
            for rule in self.rules:
                if match := rule.pattern.fullmatch(name):
                    target = match.expand(rule.replacement)
                    used.add(rule.theirs)
                    break
            if target in found:
                raise InputError(f"rename: '{found[target]}' and '{name}' both become '{target}'")
            found[target] = name
        self.unused = [rule.theirs for rule in self.rules if rule.theirs not in used]
        return found


def read_renames(path: str | Path) -> Renames:
    """Read a rename file.

    Raises:
        InputError: no such file, not TOML or JSON, a value that is no string, a bad pattern or a star too many.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"rename: {file} does not exist")
    try:
        text = file.read_text(encoding="utf-8")
        table = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise InputError(f"rename: {file} is not {'JSON' if file.suffix == '.json' else 'TOML'} ({error})") from error
    if not isinstance(table, dict):
        raise InputError(f"rename: {file} must map their names to ours")
    return Renames([compile_rule(theirs, ours) for theirs, ours in _flat(table)])


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield prefix + key, value
        else:
            raise InputError(f"rename: '{prefix}{key}' maps to {value!r}; needed: a name in quotes")


def compile_rule(theirs: str, ours: str) -> Rule:
    """A rule of two globs, or of two regular expressions after `re:`. Raises InputError naming the rule."""
    if theirs.startswith("re:"):
        source, replacement = theirs[3:].removeprefix("^"), ours.removeprefix("re:")
    else:
        pieces = re.split(r"(\*\*|\*)", theirs)
        source = "".join({"*": r"([^.]+)", "**": r"(.+)"}.get(p, re.escape(p)) for p in pieces)
        stars = re.split(r"\*\*|\*", ours)
        if len(stars) - 1 > len(pieces) // 2:
            raise InputError(f"rename: '{ours}' has more stars than '{theirs}'")
        replacement = "".join(s.replace("\\", r"\\") + f"\\g<{n}>" for n, s in enumerate(stars[:-1], 1))
        replacement += stars[-1].replace("\\", r"\\")
    try:
        pattern = re.compile(source)
        # A reference to a group that the pattern lacks shows only when expanded.
        re.compile(f"(?:{source})|").fullmatch("").expand(replacement)  # type: ignore[union-attr]
    except (re.error, IndexError) as error:
        raise InputError(f"rename: rule '{theirs}' -> '{ours}': {error}") from error
    return Rule(theirs, ours, pattern, replacement)
