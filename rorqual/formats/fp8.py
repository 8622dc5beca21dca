"""E4M3 elements and E8M0 scale bytes (SPEC 2).

E4M3 is the finite variant: no infinities, largest 448, bytes 127 and 255 are NaN. An E8M0 byte is 2^(byte - 127);
255 is NaN, and byte 0 is 2^-127, an fp32 subnormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E8M0_NAN = 255


def _e4m3_value(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    magnitude = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9
    return -magnitude if byte >> 7 else magnitude


def _e8m0_value(byte: int) -> float:
    return float("nan") if byte == E8M0_NAN else 2.0 ** (byte - 127)


E4M3_BY_BYTE = torch.tensor([_e4m3_value(byte) for byte in range(256)], dtype=torch.float32, device="cpu")
"""fp32 [256]. A constant: never written."""

E8M0_BY_BYTE = torch.tensor([_e8m0_value(byte) for byte in range(256)], dtype=torch.float32, device="cpu")
"""fp32 [256]. A constant: never written."""


def encode_e4m3(x: Tensor) -> Tensor:
    """fp32 [...] -> uint8 codes [...]; nearest, ties to even, saturating at +-448, the sign of zero kept.

    Expects no NaN.
    """
    # Clamped here because what a cast does beyond 448 (saturate or NaN) depends on the torch version and device.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """uint8 codes [...] -> fp32 [...], by table: several times faster than torch's cast."""
    return _look_up(E4M3_BY_BYTE, codes)


def encode_e8m0_ceil(x: Tensor) -> Tensor:
    """fp32 [...] >= 0 -> E8M0 bytes [...] of the least power of two that is not below x.

    From the bits: the exponent, plus one when the mantissa is non-zero. A floating log2 misrounds next to powers of
    two. Subnormals give 2^-126 and anything above 2^127 gives 2^127, so the NaN byte never appears.
    """
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    return exponent.clamp(max=E8M0_NAN - 1).to(torch.uint8)


def decode_e8m0(scales: Tensor) -> Tensor:
    """E8M0 bytes [...] -> fp32 [...]; byte 255 gives NaN."""
    return _look_up(E8M0_BY_BYTE, scales)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.to(codes.device).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
