"""Weights as checkpoints store them: field cases 25 (scale byte 255) and 26 (32 x 32 tiles, FP4 read as FP8)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.fp8 import decode_e4m3
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight, quantize_weight


def finite_codes(*shape: int) -> Tensor:
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return torch.where(codes & 127 == 127, codes ^ 1, codes)


def tile_scales(n: int, k: int) -> Tensor:
    """A distinct byte for every tile."""
    return (torch.arange(n * k) + 120).to(torch.uint8).view(n, k)


def expand_by_loop(codes: Tensor, scales: Tensor) -> Tensor:
    expanded = decode_e4m3(codes).double()
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            expanded[row, column] *= 2.0 ** (int(scales[row // 32, column // 32]) - 127)
    return expanded.float()


def test_64_by_64_has_four_tiles_with_their_own_scales() -> None:
    ones = torch.full((64, 64), 0x38, dtype=torch.uint8)
    expanded = Fp8Weight(ones, torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)).expand()
    quarters = [expanded[:32, :32], expanded[:32, 32:], expanded[32:, :32], expanded[32:, 32:]]
    assert [quarter.unique().tolist() for quarter in quarters] == [[1.0], [2.0], [4.0], [8.0]]


@pytest.mark.parametrize(("n", "k"), [(64, 64), (80, 96), (33, 31), (1, 1), (32, 65), (95, 40)])
def test_ragged_edges_use_the_last_tile(n: int, k: int) -> None:
    codes, scales = finite_codes(n, k), tile_scales(-(-n // 32), -(-k // 32))
    weight = Fp8Weight(codes, scales)
    expected = expand_by_loop(codes, scales)
    assert weight.shape == (n, k)
    assert torch.equal(weight.expand(), expected)
    assert torch.equal(weight.expand(torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("rows", [slice(0, 7), slice(30, 35), slice(40, None), slice(-3, None), slice(50, 50)])
def test_a_slice_of_rows_is_that_slice_of_the_whole(rows: slice) -> None:
    fp8 = Fp8Weight(finite_codes(70, 96), tile_scales(3, 3))
    fp4 = Fp4Weight(finite_codes(70, 48), torch.randint(118, 130, (70, 3), dtype=torch.uint8))
    dense = DenseWeight(torch.randn(70, 96))
    for weight in (fp8, fp4, dense):
        assert torch.equal(weight.expand(rows=rows), weight.expand()[rows])


def test_rows_come_in_one_run() -> None:
    with pytest.raises(FormatError, match="step of 2"):
        DenseWeight(torch.ones(4, 4)).expand(rows=slice(0, 4, 2))


def test_packed_fp4_read_as_fp8_is_a_shape_error() -> None:
    packed, scales = finite_codes(64, 64), tile_scales(64, 1).expand(64, 4).contiguous()
    assert Fp4Weight(packed, scales).shape == (64, 128)
    with pytest.raises(FormatError, match=r"need scales of shape \(2, 2\), got \(64, 4\)"):
        Fp8Weight(packed, scales)
    with pytest.raises(FormatError, match="FP8 codes is int8"):
        Fp8Weight(packed.view(torch.int8), scales)
    with pytest.raises(FormatError, match=r"need scales of shape \(64, 4\), got \(2, 2\)"):
        Fp4Weight(packed, tile_scales(2, 2))


def test_scale_byte_255_is_refused_where_it_stands() -> None:
    scales = tile_scales(2, 2)
    scales[1, 0] = 255
    with pytest.raises(FormatError, match=r"scale byte 255 \(NaN\) at \(1, 0\) .*0\.\.254$"):
        Fp8Weight(finite_codes(64, 64), scales)
    scales = torch.full((4, 2), 127, dtype=torch.uint8)
    scales[3, 1] = 255
    with pytest.raises(FormatError, match=r"at \(3, 1\)"):
        Fp4Weight(finite_codes(4, 32), scales.view(torch.float8_e8m0fnu))
    scales[3, 1] = 254
    Fp4Weight(finite_codes(4, 32), scales)


def test_bad_dtypes_and_shapes_are_refused() -> None:
    codes, scales = finite_codes(4, 32), torch.full((4, 2), 127, dtype=torch.uint8)
    with pytest.raises(FormatError, match="FP4 scales is float32"):
        Fp4Weight(codes, scales.float())
    with pytest.raises(FormatError, match="FP4 codes is float8_e4m3fn"):
        Fp4Weight(codes.view(torch.float8_e4m3fn), scales)
    with pytest.raises(FormatError, match="K is 40, must be a multiple of 32"):
        Fp4Weight(codes[:, :20], scales)
    with pytest.raises(FormatError, match="two dimensions"):
        Fp8Weight(codes[0], scales)
    with pytest.raises(FormatError, match="dense weight is uint8"):
        DenseWeight(codes)
    with pytest.raises(FormatError, match="two dimensions"):
        DenseWeight(torch.ones(0, 3))


def test_dtypes_of_the_release_are_held_without_a_copy(tmp_path: Path) -> None:
    fp8, fp4 = finite_codes(64, 64).view(torch.float8_e4m3fn), finite_codes(64, 32).view(torch.int8)
    tiles, groups = tile_scales(2, 2).view(torch.float8_e8m0fnu), tile_scales(64, 2).view(torch.float8_e8m0fnu)
    save_file({"fp8": fp8, "tiles": tiles, "fp4": fp4, "groups": groups}, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    first, second = Fp8Weight(loaded["fp8"], loaded["tiles"]), Fp4Weight(loaded["fp4"], loaded["groups"])
    assert first.codes.data_ptr() == loaded["fp8"].data_ptr() and first.codes.dtype == torch.uint8
    assert second.packed.data_ptr() == loaded["fp4"].data_ptr() and second.scales.dtype == torch.uint8
    assert first.nbytes == 64 * 64 + 4
    assert second.nbytes == 64 * 32 + 64 * 2
    assert DenseWeight(torch.ones(4, 3, dtype=torch.bfloat16)).nbytes == 24


def test_dense_weights_expand_to_a_view_that_trains() -> None:
    parameter = torch.randn(6, 4, requires_grad=True)
    weight = DenseWeight(parameter)
    weight.expand(rows=slice(2, 4)).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.sum(1).tolist() == [0, 0, 4, 4, 0, 0]
    assert weight.expand().data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_weights_round_trip_exactly(kind: str) -> None:
    weight = torch.randn(80, 96, generator=torch.Generator().manual_seed(5)) * 0.02
    weight[:32, 32:64] = 0
    weight[40:, 64:] *= 1e4
    weight[0, 0] = -0.0
    once = quantize_weight(weight, kind)  # type: ignore[arg-type]
    again = quantize_weight(once.expand(), kind)  # type: ignore[arg-type]
    assert once.shape == (80, 96)
    assert torch.equal(again.expand().view(torch.int32), once.expand().view(torch.int32))
    # A tile whose largest weight was rounded down to a power of two below may now do with half the scale.
    assert (again.scales <= once.scales).all()


def test_quantised_weights_are_close_and_clip_nothing() -> None:
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(6))
    fp8, fp4 = quantize_weight(weight, "fp8").expand(), quantize_weight(weight.bfloat16(), "fp4").expand()
    # E4M3 keeps four significant bits; the tile scale puts amax in (224, 448], so nothing here is subnormal but dust.
    assert ((fp8 - weight).abs() <= weight.abs() / 16 + weight.abs().max() * 2.0**-17).all()
    amax = weight.bfloat16().float().unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
    error = (fp4 - weight.bfloat16().float()).abs().unflatten(1, (-1, 32))
    assert (error <= amax / 5 * (1 + 1e-6)).all()


@pytest.mark.parametrize(("kind", "largest"), [("fp8", 448.0), ("fp4", 6.0)])
def test_the_weight_scale_is_exact_at_powers_of_two(kind: str, largest: float) -> None:
    for exponent in (-20, -1, 0, 3, 9):
        weight = torch.full((32, 32), largest * 2.0**exponent)
        quantised = quantize_weight(weight, kind)  # type: ignore[arg-type]
        assert quantised.scales.unique().tolist() == [127 + exponent]
        assert torch.equal(quantised.expand(), weight)


def test_distinct_tiles_quantise_to_distinct_scales() -> None:
    weight = torch.ones(64, 64)
    weight[:32, 32:], weight[32:, :32], weight[32:, 32:] = 8.0, 64.0, 512.0
    quantised = quantize_weight(weight, "fp8")
    assert quantised.scales.tolist() == [[119, 122], [125, 128]]
    assert torch.equal(quantised.expand(), weight)


def test_quantising_refuses_what_it_cannot_hold() -> None:
    weight = torch.ones(4, 40)
    with pytest.raises(FormatError, match=r"width 40 .* multiple of 32"):
        quantize_weight(weight, "fp4")
    with pytest.raises(FormatError, match="must be one of: fp8, fp4"):
        quantize_weight(weight, "int8")  # type: ignore[arg-type]
    weight[3, 2] = float("nan")
    with pytest.raises(FormatError, match=r"nan at \(3, 2\)"):
        quantize_weight(weight, "fp8")
