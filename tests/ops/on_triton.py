"""Where Triton's kernels are tried: on a GPU, or in its interpreter on the CPU (`tests/conftest.py` asks for it)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.ops.paged import PagedRegion

pytest.importorskip("triton", reason="triton is not installed (the extra 'triton', Linux only)")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)


def there(value: Any) -> Any:
    """A tensor or a region on the device; anything else as it is."""
    if isinstance(value, PagedRegion):
        return dataclasses.replace(value, pool=value.pool.to(DEVICE))
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def on_device(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` run on the device, its result on the CPU."""

    def run(*args: Any) -> Tensor:
        out = op(*(there(value) for value in args))
        assert out.device.type == DEVICE.type
        return out.cpu()

    return run


def forbidden(*_: object) -> Tensor:
    """In the place of a plain op that a kernel is to serve."""
    raise AssertionError("the plain op served")
