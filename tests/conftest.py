"""Shared by all tests: one thread, the golden tensors, a small config."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rorqual.config import ModelConfig

# Both libraries read their thread count once, when they load. One thread makes results independent of the machine and
# spares a shared one the spinning workers.
assert "torch" not in sys.modules, "torch was imported before tests/conftest.py could set its threads"
assert "numba" not in sys.modules, "numba was imported before tests/conftest.py could set its threads"
for _variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Triton too decides when it loads: whether it compiles kernels, or interprets them, as it must without a GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

GOLDENS = Path(__file__).resolve().parent / "goldens"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of reference tensors, one folder a case."""
    return GOLDENS


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """The preset `tiny`: every mechanism at widths that a test can afford."""
    from rorqual.config import presets

    return presets.load("tiny")
