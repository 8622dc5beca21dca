"""The Numba codec against its plain twin and the `formats` goldens, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.codec import dequantize, pack_row, quantize, split_row
from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32, FORMATS, NumberFormat
from rorqual.ops.fast.codec import dequantize_fast, quantize_fast

GOLDENS = Path(__file__).parents[1] / "goldens" / "formats" / "expected.safetensors"

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
scaled_formats = pytest.mark.parametrize("fmt", [E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32], ids=lambda fmt: fmt.name)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_twins(x: Tensor, fmt: NumberFormat) -> None:
    fast, plain = quantize_fast(x, fmt), quantize(x, fmt)
    assert same_bits(fast.codes, plain.codes) and same_bits(fast.scales, plain.scales)
    for dtype in (torch.float32, torch.bfloat16):
        assert same_bits(dequantize_fast(*plain, fmt, dtype), dequantize(*plain, fmt, dtype))


def bit_patterns(generator: torch.Generator) -> Iterator[Tensor]:
    """fp32 rows of every kind: whole-range bit patterns, one magnitude a row, ties, zeros and floors."""
    whole = torch.randint(0, 2**32, (400, 64), generator=generator).to(torch.uint32).view(torch.float32)
    yield torch.where(torch.isfinite(whole), whole, 1.0)
    magnitudes = torch.logspace(-42, 38, 800, dtype=torch.float64)
    yield (torch.rand(800, 64, generator=generator, dtype=torch.float64) * 2 - 1).mul(magnitudes[:, None]).float()
    # Sixteenths and 2^-10ths under an exact amax: every tie of both element types.
    ties = torch.arange(-96, 97)[:192] / 16
    yield torch.cat([ties, torch.full((64,), 6.0)]).view(4, 64)
    ladder = torch.arange(31 * 64) / 1024
    yield torch.cat([ladder.view(31, 64)[:, :-1], torch.full((31, 1), 448.0)], dim=1)
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 6 * 2.0**-126, 6 * 2.0**-9, 1e-4, 2.0**-127])
    yield tiny[:, None].expand(-1, 64)
    yield torch.tensor([2688.0, -2688.0, 2784.0, 3.4028e38, -448.0, 464.0])[:, None].expand(-1, 64)


@pytest.mark.parametrize("inputs", ["f32", "bf16"])
@scaled_formats
def test_goldens(inputs: str, fmt: NumberFormat) -> None:
    golden = load_file(GOLDENS)
    packed = quantize_fast(golden[f"{inputs}.x"], fmt)
    codes = golden[f"{inputs}.{fmt.name}.{'packed' if fmt.value == 'e2m1' else 'codes'}"]
    assert same_bits(packed.codes, codes)
    assert same_bits(packed.scales, golden[f"{inputs}.{fmt.name}.scale"])
    assert same_bits(dequantize_fast(*packed, fmt), golden[f"{inputs}.{fmt.name}.dequant"])


@both_dtypes
@scaled_formats
def test_twins_agree_on_every_kind_of_value(fmt: NumberFormat, dtype: torch.dtype) -> None:
    for x in bit_patterns(torch.Generator().manual_seed(0)):
        narrow = x.to(dtype)
        assert_twins(torch.where(torch.isfinite(narrow), narrow, 1.0), fmt)


@both_dtypes
@every_format
def test_twins_agree_on_any_shape(fmt: NumberFormat, dtype: torch.dtype) -> None:
    x = torch.randn(6, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view in (x, x[0, 0], x[:0], x.transpose(0, 1), x[:, ::2], x[..., :32]):
        assert_twins(view, fmt)


@scaled_formats
def test_every_code_and_scale_byte_decodes_alike(fmt: NumberFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    width = 256 * 8 // fmt.bits
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, fmt.scale_bytes(width))
    fast, plain = dequantize_fast(codes, scales, fmt), dequantize(codes, scales, fmt)
    nan = torch.isnan(plain)
    assert nan.any() and torch.equal(torch.isnan(fast), nan)
    assert same_bits(fast[~nan], plain[~nan])


@scaled_formats
def test_reads_rows_in_place_from_a_wider_buffer(fmt: NumberFormat) -> None:
    packed = quantize(torch.randn(5, 64, generator=torch.Generator().manual_seed(2)), fmt)
    page = torch.zeros(5, fmt.row_bytes(64) + 11, dtype=torch.uint8)
    page[:, 3:-8] = pack_row(packed)
    assert same_bits(dequantize_fast(*split_row(page[:, 3:-8], fmt), fmt), dequantize(*packed, fmt))


@both_dtypes
@every_format
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_named_as_in_plain(fmt: NumberFormat, dtype: torch.dtype, poison: float) -> None:
    x = torch.ones(4, 64, dtype=dtype)
    x[3, 63] = poison
    with pytest.raises(FormatError, match=rf"^cannot quantise to {fmt.name}: -?(nan|inf) at \(3, 63\)"):
        quantize_fast(x, fmt)


def test_other_errors_are_the_plain_ones() -> None:
    with pytest.raises(FormatError, match="multiple of 16"):
        quantize_fast(torch.ones(2, 24), E2M1_E4M3_16)
    with pytest.raises(FormatError, match="must be float32"):
        quantize_fast(torch.ones(2, 32, dtype=torch.float64), E2M1_E4M3_16)
    with pytest.raises(FormatError, match="width 0 "):
        quantize_fast(torch.tensor(1.0), E2M1_E4M3_16)
    codes, scales = quantize(torch.ones(2, 64), E2M1_E4M3_16)
    with pytest.raises(FormatError, match="need scales"):
        dequantize_fast(codes, scales, E2M1_E8M0_32)
    half = torch.ones(2, 64, dtype=torch.float16)
    assert same_bits(quantize_fast(half, E2M1_E4M3_16).codes, codes)


def test_inputs_that_carry_gradients_are_only_read() -> None:
    x = torch.randn(2, 64, requires_grad=True)
    assert same_bits(quantize_fast(x, E4M3_E8M0_32).codes, quantize(x, E4M3_E8M0_32).codes)
