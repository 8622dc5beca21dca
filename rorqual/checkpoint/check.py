"""A checkpoint against its config: every tensor the config names, no other, each of the right shape and dtype.

All of it is decided from names and headers, before a weight is read. An error names both sides: what is missing and the
unexpected name most like it, or what was found and what the config asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rorqual.checkpoint.index import StoredTensor
from rorqual.errors import CheckpointError
from rorqual.inventory.names import TensorSpec


def check_tensors(expected: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError with one line for the first thing that does not fit."""
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    if missing:
        raise CheckpointError(_missing_line(missing, unexpected, expected, stored))
    if unexpected:
        raise CheckpointError(_unexpected_line(unexpected, expected, stored))
    for name, spec in expected.items():
        path, entry = stored[name]
        if entry.shape != spec.shape or entry.dtype not in spec.dtypes:
            raise CheckpointError(
                f"{name} is {entry.dtype} {list(entry.shape)} in {path.name}; "
                f"the config asks for {' or '.join(spec.dtypes)} {list(spec.shape)}"
            )


def _missing_line(
    missing: Sequence[str],
    unexpected: Sequence[str],
    expected: Mapping[str, TensorSpec],
    stored: Mapping[str, StoredTensor],
) -> str:
    name = missing[0]
    line = f"{name} is missing"
    weight = name.removesuffix(".scale") + ".weight"
    if name.endswith(".scale") and weight in stored:
        found, wanted = stored[weight].entry.dtype, expected[weight].dtypes[0]
        line += f": {weight} is {found} and the config, which asks for {wanted}, needs its scale"
    if unexpected:
        line += f"; the checkpoint has {nearest(name, unexpected)}, which the config does not name"
    if len(missing) > 1 or len(unexpected) > 1:
        line += f" ({len(missing):,} missing, {len(unexpected):,} unexpected in all)"
    return line


def _unexpected_line(
    unexpected: Sequence[str], expected: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]
) -> str:
    name = unexpected[0]
    line = f"{name} in {stored[name].path.name} is not a tensor of this config"
    weight = name.removesuffix(".scale") + ".weight"
    if name.endswith(".scale") and weight in expected:
        line += f", which stores {weight} plain ({' or '.join(expected[weight].dtypes)})"
    if len(unexpected) > 1:
        line += f" ({len(unexpected):,} such in all)"
    return line


def nearest(name: str, candidates: Sequence[str]) -> str:
    """The candidate that shares most with `name` at its two ends: a rename changes a stretch in between."""
    return max(candidates, key=lambda other: _shared_ends(name, other))


def _shared_ends(name: str, other: str) -> int:
    front = _common_length(name, other)
    back = _common_length(name[front:][::-1], other[front:][::-1])
    return 2 * (front + back) - max(len(name), len(other))


def _common_length(name: str, other: str) -> int:
    for position, (left, right) in enumerate(zip(name, other, strict=False)):
        if left != right:
            return position
    return min(len(name), len(other))
