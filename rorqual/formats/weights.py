"""Weights of a linear layer as a checkpoint stores them: plain, FP8 in 32 x 32 tiles, or packed FP4.

Shape letters: N output rows, K input columns; SPEC 2 gives both layouts.

    FP8   codes  [N, K]   E4M3                     scales [ceil(N/32), ceil(K/32)] E8M0, one a tile
    FP4   packed [N, K/2] E2M1, even column low    scales [N, K/32] E8M0, along the input

Constructors hold views of what they are given (a memory-mapped file stays mapped) and read the scales only: a byte 255
would be a NaN tile. Element codes are not scanned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.codec import check_finite, dequantize, quantize
from rorqual.formats.fp8 import E4M3_MAX, E8M0_NAN, decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0_ceil
from rorqual.formats.spec import E2M1_E8M0_32, E4M3_E8M0_32

TILE = 32
"""Side of an FP8 tile and length of an FP4 group."""

_ALL_ROWS = slice(None)
_SCALE_DTYPES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
# The release stores packed FP4 as int8, so int8 codes offered as FP8 are a mistake worth catching.
_FP8_DTYPES = (torch.uint8, torch.float8_e4m3fn)
_FP4_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """An unquantised weight [N, K] in fp32, bf16 or fp16. Raises FormatError on any other dtype or rank."""

    tensor: Tensor
    addresses: tuple[int, int] | None = field(init=False, repr=False)
    """Of the values, twice, for kernels of the CPU; None where these would have to be copied first."""

    def __post_init__(self) -> None:
        _check_dtype("dense weight", self.tensor, _DENSE_DTYPES)
        _check_matrix("dense weight", self.tensor)
        usable = self.tensor.is_contiguous() and self.tensor.dtype != torch.float16 and self.tensor.device.type == "cpu"
        object.__setattr__(self, "addresses", (self.tensor.data_ptr(),) * 2 if usable else None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def row_range(self, rows: slice) -> DenseWeight:
        """Some rows as a weight of their own, a view."""
        return DenseWeight(self.tensor[rows])

    def expand(self, dtype: torch.dtype = torch.float32, rows: slice = _ALL_ROWS) -> Tensor:
        """The rows as `dtype` [n, K]; a view, and differentiable, when the dtype is already that."""
        start, end = _row_range(rows, self.shape[0])
        return self.tensor[start:end].to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """E4M3 codes [N, K] under one E8M0 scale a 32 x 32 tile; both edges may be ragged.

    Args:
        codes: uint8 or float8_e4m3fn [N, K]; kept as a uint8 view.
        scales: uint8, int8 or float8_e8m0fnu [ceil(N/32), ceil(K/32)]; kept as a uint8 view.

    Raises:
        FormatError: other dtypes, scales of another shape (packed FP4 read as FP8 ends here), or a scale byte 255.
    """

    codes: Tensor
    scales: Tensor
    addresses: tuple[int, int] | None = field(init=False, repr=False)
    """Of codes and scales, for kernels of the CPU; None where these would have to be copied first."""

    def __post_init__(self) -> None:
        _view_as_bytes(self, "codes", "FP8 codes", _FP8_DTYPES)
        _view_as_bytes(self, "scales", "FP8 scales", _SCALE_DTYPES)
        n, k = _check_matrix("FP8 codes", self.codes)
        _check_scales("FP8 codes [N, K]", self.codes, self.scales, (_tiles(n), _tiles(k)))
        object.__setattr__(self, "addresses", _addresses(self.codes, self.scales))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def expand(self, dtype: torch.dtype = torch.float32, rows: slice = _ALL_ROWS) -> Tensor:
        """The rows as a fresh `dtype` [n, K]. `rows` may start and end inside a tile."""
        start, end = _row_range(rows, self.shape[0])
        values = decode_e4m3(self.codes[start:end])
        tile_of_row = torch.arange(start, end, device=values.device) // TILE
        scales = decode_e8m0(self.scales).index_select(0, tile_of_row)
        # Whole tiles in one broadcast product, then the ragged last one, so that scales are never spread over K.
        whole = self.shape[1] // TILE
        tiled = torch.unflatten(values[:, : whole * TILE], 1, (whole, TILE))
        tiled *= scales[:, :whole, None]
        values[:, whole * TILE :] *= scales[:, whole:]
        return values.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Weight:
    """Packed E2M1 codes, one E8M0 scale per 32 inputs of an output row: rows of the format E2M1_E8M0_32.

    Args:
        packed: uint8, int8 or float4_e2m1fn_x2 [N, K/2], K a multiple of 32; kept as a uint8 view.
        scales: uint8, int8 or float8_e8m0fnu [N, K/32]; kept as a uint8 view.

    Raises:
        FormatError: other dtypes, scales of another shape, or a scale byte 255.
    """

    packed: Tensor
    scales: Tensor
    addresses: tuple[int, int] | None = field(init=False, repr=False)
    """Of codes and scales, for kernels of the CPU; None where these would have to be copied first."""

    def __post_init__(self) -> None:
        _view_as_bytes(self, "packed", "FP4 codes", _FP4_DTYPES)
        _view_as_bytes(self, "scales", "FP4 scales", _SCALE_DTYPES)
        n, half = _check_matrix("FP4 codes", self.packed)
        if half % (TILE // 2):
            raise FormatError(f"FP4 codes [N, K/2] are {(n, half)}: K is {half * 2}, must be a multiple of {TILE}")
        _check_scales("FP4 codes [N, K/2]", self.packed, self.scales, (n, half * 2 // TILE))
        object.__setattr__(self, "addresses", _addresses(self.packed, self.scales))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), the packed dimension counted in elements."""
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        return self.packed.nbytes + self.scales.nbytes

    def expand(self, dtype: torch.dtype = torch.float32, rows: slice = _ALL_ROWS) -> Tensor:
        """The rows as a fresh `dtype` [n, K]."""
        start, end = _row_range(rows, self.shape[0])
        return dequantize(self.packed[start:end], self.scales[start:end], E2M1_E8M0_32, dtype)


Weight = DenseWeight | Fp8Weight | Fp4Weight


def _addresses(codes: Tensor, scales: Tensor) -> tuple[int, int] | None:
    if not (codes.is_contiguous() and scales.is_contiguous() and codes.device.type == "cpu"):
        return None
    return codes.data_ptr(), scales.data_ptr()


def quantize_weight(w: Tensor, kind: Literal["fp8", "fp4"]) -> Fp8Weight | Fp4Weight:
    """Quantise fp32, bf16 or fp16 [N, K] to the checkpoint's layout.

    The scale is the least power of two with amax / scale <= 448 (6 for FP4): SPEC 2 leaves the rule of stored weights
    open, and this one gives back every weight that the format can hold, bit for bit. An all-zero tile gets 2^-126.

    Raises:
        FormatError: NaN or Inf, another dtype or rank, an unknown kind, or for FP4 a K that is no multiple of 32.
    """
    quantizers: dict[str, Callable[[Tensor], Fp8Weight | Fp4Weight]] = {"fp8": _quantize_fp8, "fp4": _quantize_fp4}
    if kind not in quantizers:
        raise FormatError(f"weight format is {kind!r}, must be one of: {', '.join(quantizers)}")
    _check_dtype(f"{kind} weight", w, _DENSE_DTYPES)
    _check_matrix(f"{kind} weight", w)
    return quantizers[kind](w.detach().to(torch.float32))


def _quantize_fp8(w: Tensor) -> Fp8Weight:
    n, k = w.shape
    check_finite(w, E4M3_E8M0_32)
    padded = w.new_zeros(_tiles(n) * TILE, _tiles(k) * TILE)
    padded[:n, :k] = w
    tiles = padded.view(_tiles(n), TILE, _tiles(k), TILE)
    # Floored lower than activations are: weights may be small throughout. Below 2^-126 a quotient would lose bits.
    amax = tiles.abs().amax(dim=(1, 3)).clamp(min=E4M3_MAX * 2.0**-126)
    scales = encode_e8m0_ceil(amax / amax.new_full((), E4M3_MAX))
    tiles /= decode_e8m0(scales)[:, None, :, None]
    return Fp8Weight(encode_e4m3(padded[:n, :k]).contiguous(), scales)


def _quantize_fp4(w: Tensor) -> Fp4Weight:
    return Fp4Weight(*quantize(w, E2M1_E8M0_32))


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _row_range(rows: slice, n: int) -> tuple[int, int]:
    start, end, step = rows.indices(n)
    if step != 1:
        raise FormatError(f"rows have a step of {step}, must be 1")
    return start, max(start, end)


def _view_as_bytes(weight: Fp8Weight | Fp4Weight, field: str, what: str, dtypes: tuple[torch.dtype, ...]) -> None:
    tensor: Tensor = getattr(weight, field)
    _check_dtype(what, tensor, dtypes)
    object.__setattr__(weight, field, tensor.view(torch.uint8))


def _check_dtype(what: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise FormatError(f"{what} is {str(tensor.dtype).removeprefix('torch.')}, must be one of: {legal}")


def _check_matrix(what: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise FormatError(f"{what} has shape {tuple(tensor.shape)}, must be two dimensions, neither of them 0")
    return tensor.shape[0], tensor.shape[1]


def _check_scales(what: str, codes: Tensor, scales: Tensor, expected: tuple[int, int]) -> None:
    if tuple(scales.shape) != expected:
        raise FormatError(
            f"{what} of shape {tuple(codes.shape)} need scales of shape {expected}, got {tuple(scales.shape)}"
        )
    if int(scales.max()) == E8M0_NAN:
        row, column = (scales == E8M0_NAN).nonzero()[0].tolist()
        raise FormatError(f"scale byte {E8M0_NAN} (NaN) at ({row}, {column}) of {what}; legal bytes are 0..254")
