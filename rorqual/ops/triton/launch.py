"""Starting a Triton kernel, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction


def serves(kernel: Any, device: torch.device) -> bool:
    """Whether `kernel` runs on tensors of `device`: CUDA's, or any where Triton interprets (TRITON_INTERPRET=1)."""
    return device.type == "cuda" or not isinstance(kernel, JITFunction)


def launch(kernel: Any, grid: Sequence[int], out: Tensor, *args: Any, **constants: Any) -> Tensor:
    """Run `kernel(*args, out, **constants)` over `grid` on the device of `out`, and return `out`.

    Products and sums are not fused: a kernel's roundings are those that it spells out.
    """
    # Triton starts kernels on the current device, which need not be the tensors'.
    with torch.cuda.device(out.device) if out.device.type == "cuda" else nullcontext():
        kernel[tuple(grid)](*args, out, **constants, enable_fp_fusion=False)
    return out


def refuse_gradients(*tensors: Tensor) -> None:
    """Assert that no gradient is asked of a kernel."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    assert not recorded, "kernels have no gradient: use the plain op, or torch.no_grad()"
