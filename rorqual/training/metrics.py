"""What a run measures: one JSON object a step and an evaluation, and the same to TensorBoard where it is asked for."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.errors import InputError
from rorqual.training.state import sync

METRICS = "metrics.jsonl"

Record = dict[str, Any]
"""kind ("step" or "eval"), step (finished steps), and numbers by name."""


class Sink(Protocol):
    """Where records go."""

    def __call__(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Nothing more comes."""


class Log:
    """A text file that only grows, cut back to what a checkpoint knew when a run resumes from it."""

    def __init__(self, path: Path, size: int | None) -> None:
        """size: bytes to keep of what stands there; None keeps all of it."""
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        if size is not None and size < self.size:
            self._file.truncate(size)
            self._file.seek(size)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self.path.stat().st_size

    def write(self, text: str) -> None:
        """Append, visible to readers at once."""
        self._file.write(text)
        self._file.flush()

    def sync(self) -> None:
        """Push all of it to the disk."""
        self._file.flush()
        sync(self.path)

    def close(self) -> None:
        self._file.close()


class MetricsLog(Log):
    """metrics.jsonl as a sink. A number that is not finite is null: JSON has no other."""

    def __call__(self, record: Record) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self.write(json.dumps(finite) + "\n")


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics.jsonl; a last line that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def require_tensorboard() -> Any:
    """The class that writes event files.

    Raises:
        InputError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("tensorboard: not installed; pip install 'rorqual[training]'") from None
    return SummaryWriter


class TensorBoard:
    """Scalars under `step/` and `eval/` in an event file. InputError when tensorboard is not installed."""

    def __init__(self, folder: Path, step: int) -> None:
        """step: where the run resumes; events beyond it are hidden."""
        self._writer = require_tensorboard()(str(folder), purge_step=step + 1)

    def __call__(self, record: Record) -> None:
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
                self._writer.add_scalar(f"{record['kind']}/{key}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


def imbalance(loads: Mapping[str, Tensor]) -> float:
    """Tokens of the busiest expert over the mean, in the worst layer: 1 is even; 0 without experts."""
    worst = 0.0
    for load in loads.values():
        mean = float(load.sum()) / load.numel()
        worst = max(worst, float(load.max()) / mean if mean else 0.0)
    return worst


def peak_bytes(device: torch.device) -> int:
    """The most memory so far: of the device's tensors, or on a CPU of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def add_up(sums: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Add numbers or tensors by name, in place."""
    for name, value in parts.items():
        sums[name] = sums[name] + value if name in sums else value
