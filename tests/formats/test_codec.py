"""Packed rows in plain torch: field case 25, properties of the round trip, gradients, errors."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.codec import FLOAT_DTYPES, dequantize, fake_quantize, pack_row, quantize, split_row
from rorqual.formats.spec import (
    BF16,
    E2M1_E4M3_16,
    E2M1_E8M0_32,
    E2M1_UNSCALED,
    E4M3_E8M0_32,
    FORMATS,
    FP32,
    NumberFormat,
)

MAX_EXAMPLES = 60

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
scaled_formats = pytest.mark.parametrize("fmt", [E2M1_E4M3_16, E2M1_E8M0_32, E4M3_E8M0_32], ids=lambda fmt: fmt.name)
bounded = settings(max_examples=MAX_EXAMPLES, deadline=None, derandomize=True, database=None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0.0 from 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def rows(limit: float) -> st.SearchStrategy[Tensor]:
    """fp32 [n, 64], every finite value up to `limit`, subnormals and -0.0 included."""
    elements = st.floats(-limit, limit, width=32)
    return hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.just(64)), elements=elements).map(torch.from_numpy)


LARGEST = float(np.float32(1e38))


@every_format
@bounded
@given(x=rows(LARGEST))
def test_round_trip_keeps_signs_and_fake_equals_packed(fmt: NumberFormat, x: Tensor) -> None:
    packed = quantize(x, fmt)
    assert packed.codes.shape == (len(x), fmt.code_bytes(64)) and packed.codes.dtype == torch.uint8
    assert packed.scales.shape == (len(x), fmt.scale_bytes(64)) and packed.scales.dtype == torch.uint8
    values = dequantize(*packed, fmt)
    assert torch.isfinite(values).all()
    assert same_bits(torch.signbit(values), torch.signbit(x))
    for dtype in FLOAT_DTYPES[:2]:
        cast = x.to(dtype)
        assert same_bits(fake_quantize(cast, fmt), dequantize(*quantize(cast, fmt), fmt, dtype))
    assert same_bits(dequantize(*split_row(pack_row(packed), fmt), fmt), values)


@every_format
@bounded
@given(x=rows(2688.0))
def test_error_stays_within_the_formats_tolerance(fmt: NumberFormat, x: Tensor) -> None:
    # Every group gets a magnitude that keeps its scale normal, as the tolerance requires.
    x[:, ::16] = 1.0
    if fmt == E2M1_UNSCALED:
        x = x.clamp(-6, 6)
    error = (dequantize(*quantize(x, fmt), fmt) - x).abs()
    if fmt.scale is not None:
        reference = x.unflatten(-1, (-1, fmt.group)).abs().amax(-1, keepdim=True).expand(-1, -1, fmt.group).flatten(1)
    elif fmt == E2M1_UNSCALED:
        reference = torch.full_like(x, 6.0)
    else:
        # An element below fp32's normal range has a fixed step, not a relative one.
        reference = x.abs().clamp(min=2.0**-126)
    assert (error <= fmt.tolerance * reference * (1 + 1e-6)).all()


@scaled_formats
def test_the_tolerance_is_tight(fmt: NumberFormat) -> None:
    amax = torch.logspace(-1, 3, 20001)
    x = amax[:, None] * torch.linspace(0, 1, fmt.group)
    worst = ((dequantize(*quantize(x, fmt), fmt) - x).abs() / amax[:, None]).max()
    assert 0.9 * fmt.tolerance < worst <= fmt.tolerance * (1 + 1e-6)


@scaled_formats
def test_all_zero_rows_stay_zero_with_their_signs(fmt: NumberFormat) -> None:
    for zero in (0.0, -0.0):
        x = torch.full((3, 64), zero)
        values = dequantize(*quantize(x, fmt), fmt)
        assert same_bits(values, x)


def test_floors_give_the_least_scale() -> None:
    zeros = torch.zeros(1, 64)
    assert quantize(zeros, E2M1_E4M3_16).scales.unique().tolist() == [1]
    assert quantize(zeros, E2M1_E8M0_32).scales.unique().tolist() == [1]
    # 2^ceil(log2(1e-4 / 448)) = 2^-22
    assert quantize(zeros, E4M3_E8M0_32).scales.unique().tolist() == [127 - 22]


@scaled_formats
@pytest.mark.parametrize("value", [1e-45, 1e-38, 2688.0, -2688.0, 1e30, 3.4e38, -3.4e38])
def test_one_extreme_value_among_zeros_gives_no_nan(fmt: NumberFormat, value: float) -> None:
    x = torch.zeros(2, 64)
    x[1, 37] = value
    values = dequantize(*quantize(x, fmt), fmt)
    assert not torch.isnan(values).any()
    others = torch.ones_like(x, dtype=torch.bool)
    others[1, 37] = False
    assert (values[others] == 0).all()
    assert torch.sign(values[1, 37]) in (0, math.copysign(1, value))


def test_main_kv_saturates_at_2688() -> None:
    x = torch.tensor([[2688.0, -2688.0, 2689.0, -1e30, *[0.0] * 12]])
    packed = quantize(x, E2M1_E4M3_16)
    assert packed.scales.tolist() == [[0x7E]]
    assert dequantize(*packed, E2M1_E4M3_16)[0, :4].tolist() == [2688.0, -2688.0, 2688.0, -2688.0]


def test_power_of_two_scales_clip_nothing() -> None:
    x = torch.full((1, 32), 7.0)
    assert dequantize(*quantize(x, E2M1_E8M0_32), E2M1_E8M0_32).unique().tolist() == [8.0]
    x = torch.full((1, 32), 449.0)
    assert dequantize(*quantize(x, E4M3_E8M0_32), E4M3_E8M0_32).unique().tolist() == [448.0]


@pytest.mark.parametrize("fmt", [E2M1_E8M0_32, E4M3_E8M0_32], ids=lambda fmt: fmt.name)
def test_power_of_two_scales_step_exactly_above_the_largest_value(fmt: NumberFormat) -> None:
    """amax = value_max * 2^k still has scale 2^k, although fp32(1 / value_max) is rounded; one ulp more doubles it."""
    exponents = torch.arange(-20, 100)
    amax = fmt.value_max * torch.exp2(exponents.float())
    for values, bytes_ in ((amax, exponents + 127), (torch.nextafter(amax, torch.tensor(math.inf)), exponents + 128)):
        assert quantize(values[:, None].expand(-1, 32), fmt).scales[:, 0].tolist() == bytes_.tolist()


def test_stored_bytes_never_alias_the_values() -> None:
    x = torch.ones(1, 4)
    codes = quantize(x, FP32).codes
    fake = fake_quantize(x, FP32)
    x.zero_()
    assert codes.any() and fake.all()


def test_unscaled_e2m1_clamps_to_six_and_stores_no_scale() -> None:
    x = torch.tensor([[0.3, -100.0, 5.0, -0.0]])
    packed = quantize(x, E2M1_UNSCALED)
    assert packed.scales.shape == (1, 0)
    assert same_bits(dequantize(*packed, E2M1_UNSCALED), torch.tensor([[0.5, -6.0, 4.0, -0.0]]))


def test_raw_formats_store_little_endian_bytes() -> None:
    x = torch.tensor([[1.0, -2.5]])
    assert quantize(x, BF16).codes.tolist() == [[0x80, 0x3F, 0x20, 0xC0]]
    assert quantize(x, FP32).codes.tolist() == [[0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0]]


def test_raw_rows_may_start_at_any_byte_of_a_page() -> None:
    page = torch.zeros(4, 7 + 16, dtype=torch.uint8)
    x = torch.randn(4, 4)
    page[:, 7:] = quantize(x, FP32).codes
    codes, scales = split_row(page[:, 7:], FP32)
    assert same_bits(dequantize(codes, scales, FP32), x)


@every_format
def test_bf16_inputs_are_taken_at_their_exact_value(fmt: NumberFormat) -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    narrow, wide = quantize(x, fmt), quantize(x.float(), fmt)
    assert torch.equal(narrow.codes, wide.codes) and torch.equal(narrow.scales, wide.scales)
    assert narrow.codes.shape == (5, 3, fmt.code_bytes(64))
    assert dequantize(*narrow, fmt, torch.bfloat16).dtype == torch.bfloat16


@every_format
def test_inputs_may_be_strided_or_empty(fmt: NumberFormat) -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2)).T
    assert torch.equal(quantize(x, fmt).codes, quantize(x.contiguous(), fmt).codes)
    empty = quantize(x[:0], fmt)
    assert dequantize(*empty, fmt).shape == (0, 64)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_passes_straight_through(fmt: NumberFormat, dtype: torch.dtype) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    upstream = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    y = fake_quantize(x * 1, fmt)
    assert y.dtype == dtype and y.requires_grad
    y.backward(upstream)
    assert x.grad is not None and same_bits(x.grad, upstream)


@every_format
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf_are_named(fmt: NumberFormat, poison: float, dtype: torch.dtype) -> None:
    x = torch.ones(4, 64, dtype=dtype)
    x[2, 33] = poison
    with pytest.raises(FormatError, match=rf"^cannot quantise to {fmt.name}: {poison} at \(2, 33\); .*finite$"):
        quantize(x, fmt)
    with pytest.raises(FormatError, match=r"finite$"):
        fake_quantize(x, fmt)


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_refused(fmt: NumberFormat, dtype: torch.dtype) -> None:
    with pytest.raises(FormatError, match=r"must be float32, bfloat16 or float16$"):
        quantize(torch.ones(1, 64, dtype=dtype), fmt)


def test_widths_are_checked_on_the_way_in_and_out() -> None:
    with pytest.raises(FormatError, match=r"width 24 .* multiple of 16"):
        quantize(torch.ones(2, 24), E2M1_E4M3_16)
    with pytest.raises(FormatError, match="width 0 "):
        quantize(torch.tensor(1.0), FP32)
    codes, scales = quantize(torch.ones(2, 64), E2M1_E4M3_16)
    with pytest.raises(FormatError, match="need scales"):
        dequantize(codes, scales, E2M1_E8M0_32)
    with pytest.raises(FormatError, match="need scales"):
        dequantize(codes, scales[:1], E2M1_E4M3_16)
    with pytest.raises(FormatError, match="must be uint8"):
        dequantize(codes.to(torch.int8), scales, E2M1_E4M3_16)
    with pytest.raises(FormatError, match="16-bit elements"):
        dequantize(codes[:, :31], scales[:, :0], BF16)
    with pytest.raises(FormatError, match="multiple of 9"):
        split_row(codes, E2M1_E4M3_16)


def test_a_poisoned_slot_stays_visible() -> None:
    poison = torch.full((1, E4M3_E8M0_32.row_bytes(64)), 255, dtype=torch.uint8)
    assert torch.isnan(dequantize(*split_row(poison, E4M3_E8M0_32), E4M3_E8M0_32)).all()
