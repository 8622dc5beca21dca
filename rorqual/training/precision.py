"""Products in bf16 where the device gains by it.

A GPU: autocast. A CPU with AMX tiles: fp32 matrix products through bf16 tiles, inputs rounded, sums in fp32 (oneDNN;
3 to 5 x a product of the sizes that small models have, measured). A CPU without AMX: fp32, the faster one there.
Everything but products stays fp32 in each case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rorqual.ops.precision import products


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
    if device.type == "cuda":
        # Backward ops run in the dtype that autocast chose for their forward ops.
        with torch.autocast("cuda", dtype=torch.bfloat16):
            yield
        return
    with products("medium"):
        yield
