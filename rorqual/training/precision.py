"""Products in bf16 where the device gains by it: one setting (`run.autocast`), two ways of torch.

A CPU with AMX tiles: every fp32 product goes through bf16 tiles, inputs rounded, sums and results fp32 (oneDNN; 3 to 5
times as fast at the sizes that small models have, measured). That rounds the inputs of the router and of the mixing
coefficients too, which inference computes in fp32. A CPU without AMX: fp32, the faster one there. A GPU: torch's
autocast for the products with weights that a checkpoint quantises (`with_autocast`); its gain was not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from rorqual.ops.dispatch import Ops
from rorqual.ops.precision import products

_LOWERED = ContextVar("products under autocast", default=False)


def gains_by_bf16(device: torch.device) -> bool:
    """Whether products of this device are faster in bf16 than in fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # Numba takes half a second to import; training has it loaded anyway.
    from rorqual.ops.cpu import features

    return "amx-bf16" in features()


@contextmanager
def reduced_products(device: torch.device, setting: str) -> Iterator[None]:
    """Products as `run.autocast` says ("auto" or "off") for the block; forward passes and their backward passes."""
    if setting != "auto" or not gains_by_bf16(device):
        yield
        return
    if device.type == "cpu":
        with products("medium"):
            yield
        return
    token = _LOWERED.set(True)
    try:
        yield
    finally:
        _LOWERED.reset(token)


def with_autocast(ops: Ops) -> Ops:
    """Ops whose products with weights of a quantised kind run under torch's autocast to bf16 inside `reduced_products`,
    gradients included. What they give is fp32; so is everything else: router, mixing, head, norms, attention."""

    def lowered(product: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
        def run(x: Tensor, *rest: Any) -> Tensor:
            if not _LOWERED.get() or not _is_quantised(rest[place]):
                return product(x, *rest)
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                return product(x, *rest).float()

        return run

    return dataclasses.replace(
        ops,
        linear=lowered(ops.linear, 0),
        grouped_linear=lowered(ops.grouped_linear, 0),
        experts=lowered(ops.experts, 2),
    )


def _is_quantised(weights: Any) -> bool:
    """Whether a checkpoint stores a weight, or the first of several, in FP8 or FP4."""
    first = weights[0] if isinstance(weights, list | tuple) else weights
    return getattr(first, "kind", None) is not None
