"""Rows of values <-> packed rows, in plain torch. The fast twins live in `rorqual.ops.fast.codec`.

Shapes: [..., width] values, [..., code_bytes] codes, [..., scale_bytes] scales; the leading dimensions are free.

The scale of a group is computed from its largest magnitude, floored at `fmt.amax_floor` (SPEC 2):
    E4M3 scale   e4m3(amax / 6), a true division, saturating at 448: a group above 2688 clips
    E8M0 scale   2^ceil(log2(amax * fp32(1 / value_max))), a product with the rounded reciprocal
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.fp4 import decode_packed_e2m1, encode_e2m1, pack_nibbles
from rorqual.formats.fp8 import decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0_ceil
from rorqual.formats.spec import NumberFormat

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantised and what can be asked back; all are exact in fp32."""

_RAW_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Packed(NamedTuple):
    """One packed tensor: uint8 codes [..., code_bytes] and uint8 scales [..., scale_bytes]."""

    codes: Tensor
    scales: Tensor


def quantize(x: Tensor, fmt: NumberFormat) -> Packed:
    """Pack [..., width] values of dtype fp32, bf16 or fp16, each taken at its exact fp32 value.

    bf16 and fp32 formats store the raw little-endian bytes. Near the end of the fp32 range an E8M0 group may round up
    to 2^128 (|x| from 3.5 * 2^126 for E2M1), which reads back as infinity; no finite input gives NaN.

    Raises:
        FormatError: NaN or Inf in x, another dtype, or a width the format does not hold.
    """
    values = _as_fp32(x, fmt)
    if fmt.scale is None:
        check_finite(values, fmt)
        return Packed(_encode(values, fmt), values.new_empty((*values.shape[:-1], 0), dtype=torch.uint8))
    grouped = torch.unflatten(values, -1, (-1, fmt.group))
    scales = _encode_scale(grouped, fmt)
    scaled = grouped / _decode_scale(scales, fmt).unsqueeze(-1)
    return Packed(_encode(scaled.flatten(-2), fmt), scales)


def dequantize(codes: Tensor, scales: Tensor, fmt: NumberFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack to [..., width]: element times scale in fp32 (exact, barring underflow), then rounded once to `dtype`.

    A NaN code or scale byte comes back as NaN: a poisoned cache slot stays visible.

    Raises:
        FormatError: codes and scales that are not uint8 or not of one row each.
    """
    width = check_packed(codes, scales, fmt)
    values = _decode(codes, fmt)
    if fmt.scale is not None:
        grouped = torch.unflatten(values, -1, (-1, fmt.group))
        grouped *= _decode_scale(scales, fmt).unsqueeze(-1)
    assert values.shape[-1] == width
    return values.to(dtype)


def fake_quantize(x: Tensor, fmt: NumberFormat) -> Tensor:
    """`dequantize(quantize(x))` in the dtype of x, bit for bit; the gradient passes unchanged (straight-through).

    Raises FormatError as `quantize`.
    """
    return cast(Tensor, _apply_fake_quantize(x, fmt))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: NumberFormat) -> Tensor:
        return dequantize(*quantize(x, fmt), fmt, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


_apply_fake_quantize: Any = _FakeQuantize.apply


def pack_row(packed: Packed) -> Tensor:
    """Codes then scales as one uint8 [..., row_bytes]: a window slot, or a row on disk."""
    return torch.cat([packed.codes, packed.scales], dim=-1)


def split_row(rows: Tensor, fmt: NumberFormat) -> Packed:
    """Inverse of `pack_row`, as views. Raises FormatError where the last dimension is no row of `fmt`."""
    code_bytes = fmt.code_bytes(fmt.width_of(rows.shape[-1]))
    return Packed(rows[..., :code_bytes], rows[..., code_bytes:])


def check_finite(x: Tensor, fmt: NumberFormat) -> None:
    """Raise FormatError naming the first NaN or Inf of x, if there is one."""
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        first = tuple((~finite).nonzero()[0].tolist())
        raise FormatError(f"cannot quantise to {fmt.name}: {x[first].item()} at {first}; every value must be finite")


def check_packed(codes: Tensor, scales: Tensor, fmt: NumberFormat) -> int:
    """The width of a packed pair. Raises FormatError unless both are uint8 and describe the same rows."""
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise FormatError(f"codes and scales of {fmt.name} must be uint8, got {codes.dtype} and {scales.dtype}")
    if codes.ndim == 0 or codes.shape[-1] * 8 % fmt.bits:
        raise FormatError(f"codes {tuple(codes.shape)} hold no whole number of {fmt.bits}-bit elements of {fmt.name}")
    width = codes.shape[-1] * 8 // fmt.bits
    expected = (*codes.shape[:-1], fmt.scale_bytes(width))
    if tuple(scales.shape) != expected:
        raise FormatError(
            f"{fmt.name} codes {tuple(codes.shape)} need scales {expected} (width {width}), got {tuple(scales.shape)}"
        )
    return width


def _as_fp32(x: Tensor, fmt: NumberFormat) -> Tensor:
    if x.dtype not in FLOAT_DTYPES:
        raise FormatError(f"cannot quantise {x.dtype} to {fmt.name}: must be float32, bfloat16 or float16")
    fmt.code_bytes(x.shape[-1] if x.ndim else 0)
    return x.detach().to(torch.float32)


def _encode_scale(grouped: Tensor, fmt: NumberFormat) -> Tensor:
    """[..., groups, group] -> scale bytes [..., groups]."""
    amax = grouped.abs().amax(dim=-1)
    if not bool(torch.isfinite(amax).all()):
        check_finite(grouped.flatten(-2), fmt)
    amax = amax.clamp(min=fmt.amax_floor)
    # A tensor, not a number: some devices divide by a number through its reciprocal.
    value_max = amax.new_full((), fmt.value_max)
    if fmt.scale == "e4m3":
        return encode_e4m3(amax / value_max)
    return encode_e8m0_ceil(amax * (1 / value_max))


def _decode_scale(scales: Tensor, fmt: NumberFormat) -> Tensor:
    return decode_e4m3(scales) if fmt.scale == "e4m3" else decode_e8m0(scales)


def _encode(x: Tensor, fmt: NumberFormat) -> Tensor:
    if fmt.value == "e2m1":
        return pack_nibbles(encode_e2m1(x))
    if fmt.value == "e4m3":
        return encode_e4m3(x)
    # Always a copy: stored bytes must not alias the caller's values.
    raw = torch.empty(x.shape, dtype=_RAW_DTYPES[fmt.value], device=x.device)
    return raw.copy_(x).view(torch.uint8)


def _decode(codes: Tensor, fmt: NumberFormat) -> Tensor:
    """A fresh fp32 tensor, so that the caller may scale it in place."""
    if fmt.value == "e2m1":
        return decode_packed_e2m1(codes)
    if fmt.value == "e4m3":
        return decode_e4m3(codes)
    # Cloned: the bytes may start anywhere inside a page, and a view needs them aligned.
    return codes.clone(memory_format=torch.contiguous_format).view(_RAW_DTYPES[fmt.value]).to(torch.float32)
