"""What this machine can do at best, measured: bytes read from memory and fp32 multiply-adds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rorqual.bench.timing import elapsed, undisturbed

READ_BYTES, GEMM_SIDE = 1 << 30, 2048
QUICK_READ_BYTES, QUICK_GEMM_SIDE = 1 << 22, 128
TRIES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Rates of all threads together: the best of TRIES, since it stands for a ceiling.

    read_bytes_per_s: summing `read_bytes` of fp32. gemm_flops_per_s: a square fp32 product of side `gemm_side`, 2 flops
    a multiply-add.
    """

    read_bytes_per_s: float
    read_bytes: int
    gemm_flops_per_s: float
    gemm_side: int

    @classmethod
    def measure(cls, quick: bool = False) -> Roofline:
        read_bytes, side = (QUICK_READ_BYTES, QUICK_GEMM_SIDE) if quick else (READ_BYTES, GEMM_SIDE)
        values, a, b = torch.ones(read_bytes // 4), torch.rand(side, side), torch.rand(side, side)
        out = torch.empty(side, side)
        with undisturbed(), torch.inference_mode():
            read_s = min(elapsed(values.sum) for _ in range(TRIES))
            gemm_s = min(elapsed(lambda: torch.mm(a, b, out=out)) for _ in range(TRIES))
        return cls(
            read_bytes_per_s=read_bytes / read_s,
            read_bytes=read_bytes,
            gemm_flops_per_s=2 * side**3 / gemm_s,
            gemm_side=side,
        )

    def or_better(self, other: Roofline) -> Roofline:
        """The higher rate of two measurements of the same sizes: a busy machine shows less than it can do."""
        return replace(
            self,
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            gemm_flops_per_s=max(self.gemm_flops_per_s, other.gemm_flops_per_s),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a call cannot do without, counted; `formula` says how, in words and numbers."""

    bytes: int
    flops: int
    formula: str

    def floor_s(self, roofline: Roofline) -> float:
        """Seconds at the roofline: whichever of reading and multiplying takes longer."""
        return max(self.bytes / roofline.read_bytes_per_s, self.flops / roofline.gemm_flops_per_s)

    def bound(self, roofline: Roofline) -> str:
        """Which of the two it is."""
        by_bytes = self.bytes / roofline.read_bytes_per_s >= self.flops / roofline.gemm_flops_per_s
        return "bytes" if by_bytes else "flops"
