"""Opening a checkpoint: everything is checked against the config first, then tensors are handed out as mapped views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rorqual.checkpoint.check import check_tensors
from rorqual.checkpoint.index import StoredTensor, read_index
from rorqual.checkpoint.mapping import MappedFile
from rorqual.checkpoint.scope import TensorSource, WeightScope
from rorqual.config import ModelConfig
from rorqual.inventory.names import TensorSpec, expected_tensors


class Checkpoint:
    """An opened checkpoint. Shards are mapped when first touched; weights stay in the file and stay packed."""

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        stored: Mapping[str, StoredTensor],
        device: torch.device | None = None,
    ) -> None:
        """Use `open`. `stored` must have been checked against `specs`."""
        self.specs = specs
        self.stored = stored
        self._files: dict[Path, MappedFile] = {}
        self._source = TensorSource(
            specs=specs,
            read=self.tensor,
            random_reads=self._expect_random_reads,
            device=device or torch.device("cpu"),
        )

    @classmethod
    def open(cls, path: str | Path, config: ModelConfig, device: torch.device | None = None) -> Checkpoint:
        """Open a folder (`model.safetensors`, or shards and their index) or one .safetensors file.

        Reads headers only. Scopes hand tensors out on `device`, the CPU unless given. CheckpointError, one line, when a
        file is missing, truncated or damaged, or when names, shapes or dtypes are not those of the config.
        """
        specs = expected_tensors(config)
        stored = read_index(path)
        check_tensors(specs, stored)
        return cls(specs, stored, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(entry.end - entry.start for _, entry in self.stored.values())

    def tensor(self, name: str) -> Tensor:
        """One tensor by its full name, a mapped view; takes no part in the accounting of scopes."""
        path, entry = self.stored[name]
        return self._file(path).view(entry)

    def scope(self, prefix: str = "") -> WeightScope:
        """The tensors below `prefix`; all scopes of this checkpoint share one account of what was taken."""
        return WeightScope(self._source, prefix)

    def assert_all_taken(self, wanted: Callable[[str], bool] | None = None) -> None:
        """wanted: names of those tensors that were to be taken, and no others; all, if not given."""
        self.scope().assert_all_taken(wanted)

    def _file(self, path: Path) -> MappedFile:
        if path not in self._files:
            self._files[path] = MappedFile(path)
        return self._files[path]

    def _expect_random_reads(self, name: str) -> None:
        path, entry = self.stored[name]
        self._file(path).expect_random_reads(entry)
