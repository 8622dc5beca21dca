"""The tensors of a checkpoint as the model takes them: by name below a prefix, each exactly once.

Taking twice is a bug of ours and asserts; what is left over at the end names a part of the model that was never built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.checkpoint.table import EngramTable
from rorqual.errors import CheckpointError, FormatError
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight
from rorqual.inventory.names import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSource:
    """What scopes of one checkpoint share: the table of names, how to get one, and which were taken."""

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]
    """Full name -> tensor, in the dtype it is stored in."""
    random_reads: Callable[[str], None]
    """Full name of a tensor whose rows will be read here and there."""
    device: torch.device
    """Where tensors are moved; tables are not, they are read row by row."""
    taken: set[str] = field(default_factory=set)


class WeightScope:
    """The part of a checkpoint below `prefix`. Names are relative: scope("layers.3").scope("attn").weight("wq_a")."""

    def __init__(self, source: TensorSource, prefix: str = "") -> None:
        self._source = source
        self.prefix = prefix

    def scope(self, prefix: str) -> WeightScope:
        """The part below `prefix.`; it need not hold anything."""
        return WeightScope(self._source, self._full(prefix))

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor, taken or not."""
        return self._full(name) in self._source.specs

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored: on the CPU a view of the mapped file, elsewhere a copy."""
        return self._take(name).to(self._source.device)

    def _take(self, name: str) -> Tensor:
        full = self._full(name)
        assert full in self._source.specs, f"{full} is not a tensor of this checkpoint"
        assert full not in self._source.taken, f"{full} was already taken"
        self._source.taken.add(full)
        return self._source.read(full)

    def param(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy in `dtype`, for small things: norms, biases, mixing coefficients. Never a quantised code."""
        tensor = self.tensor(name)
        assert self._source.specs[self._full(name)].dtypes[0] in ("BF16", "F32"), f"{name} is quantised: use weight()"
        return tensor.to(dtype, copy=True)

    def weight(self, name: str) -> Weight:
        """`name.weight`, kept packed, with `name.scale` where it is quantised.

        CheckpointError naming the tensor when a scale byte is 255 (NaN).
        """
        codes_name, scale_name = f"{name}.weight", f"{name}.scale"
        try:
            if not self.has(scale_name):
                return DenseWeight(self.tensor(codes_name))
            packed = self._source.specs[self._full(codes_name)].dtypes[0] == "I8"
            pair = self.tensor(codes_name), self.tensor(scale_name)
            return Fp4Weight(*pair) if packed else Fp8Weight(*pair)
        except FormatError as error:
            raise CheckpointError(f"{self._full(scale_name)}: {error}") from None

    def table(self, name: str) -> EngramTable:
        """`name.weight` (with `name.scale` where quantised) as a look-up table whose rows are read when asked for."""
        codes_name, scale_name = f"{name}.weight", f"{name}.scale"
        self._source.random_reads(self._full(codes_name))
        if not self.has(scale_name):
            return EngramTable(self._take(codes_name), None, self._full(name))
        self._source.random_reads(self._full(scale_name))
        return EngramTable(self._take(codes_name), self._take(scale_name), self._full(name))

    def assert_all_taken(self, wanted: Callable[[str], bool] | None = None) -> None:
        """Every tensor below the prefix was taken; otherwise an assertion that names what is left.

        wanted: of full names: which were to be taken. Of the others none was.
        """
        below = self.prefix + "." if self.prefix else ""
        names = [name for name in self._source.specs if name.startswith(below)]
        extra = [name for name in names if wanted is not None and not wanted(name) and name in self._source.taken]
        assert not extra, f"{len(extra)} tensors were not to be used: {', '.join(extra[:5])}"
        left = [name for name in names if name not in self._source.taken and (wanted is None or wanted(name))]
        assert not left, f"{len(left)} tensors were never used: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}"

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name
