"""How torch multiplies fp32 matrices, for a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products(precision: str) -> Iterator[None]:
    """ "highest": fp32. "medium": inputs rounded, sums in fp32; through bf16 tiles where a CPU has them, TF32 on a GPU.

    The setting is torch's and the process's; the one before comes back at the end of the block.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
