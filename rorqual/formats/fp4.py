"""E2M1 element codes (SPEC 2): sign in bit 3, magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; two codes a byte.

The even element sits in the low nibble. torch's own `float4_e2m1fn_x2` cannot be cast or indexed on a CPU, so codes
are uint8 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Midpoints of neighbouring magnitudes. A tie goes to the even code, so every other midpoint belongs to the code above.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def _values_by_byte() -> Tensor:
    values = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)], dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)


E2M1_BY_BYTE = _values_by_byte()
"""fp32 [256, 2]: the (even, odd) elements of each byte. Code 8 is -0.0. A constant: never written."""


def encode_e2m1(x: Tensor) -> Tensor:
    """fp32 [...] -> uint8 codes 0..15 [...]; ties to the even code, saturating at +-6, the sign of zero kept.

    Expects no NaN.
    """
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for midpoint in _TIES_DOWN:
        code += magnitude > midpoint
    for midpoint in _TIES_UP:
        code += magnitude >= midpoint
    return code


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., n] -> bytes [..., n/2], even element low."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., n/2] -> uint8 codes 0..15 [..., n], even element low."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def decode_packed_e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., n/2] -> fp32 [..., n], by table."""
    # A pair of fp32 is moved as one int64: index_select over a flat table is several times faster than over rows.
    pairs = E2M1_BY_BYTE.to(packed.device).view(torch.int64).flatten()
    decoded = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    return decoded.view(*packed.shape[:-1], packed.shape[-1] * 2)
