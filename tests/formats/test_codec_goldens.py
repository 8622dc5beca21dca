"""The `formats` goldens, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rorqual.formats.codec import dequantize, quantize
from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.fp8 import E4M3_BY_BYTE, E8M0_BY_BYTE
from rorqual.formats.spec import FORMATS
from rorqual.formats.weights import Fp4Weight, Fp8Weight

GOLDENS = Path(__file__).parents[1] / "goldens" / "formats" / "expected.safetensors"


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDENS)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("inputs", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["e2m1_e4m3_16", "e2m1_e8m0_32", "e4m3_e8m0_32"])
def test_quantise_and_dequantise(golden: dict[str, Tensor], inputs: str, name: str) -> None:
    fmt = FORMATS[name]
    packed = quantize(golden[f"{inputs}.x"], fmt)
    codes = golden[f"{inputs}.{name}.{'packed' if fmt.value == 'e2m1' else 'codes'}"]
    assert same_bits(packed.codes, codes)
    assert same_bits(packed.scales, golden[f"{inputs}.{name}.scale"])
    assert same_bits(dequantize(*packed, fmt), golden[f"{inputs}.{name}.dequant"])


def test_tables(golden: dict[str, Tensor]) -> None:
    assert same_bits(E2M1_BY_BYTE, golden["table.e2m1_by_byte"])
    for ours, name in ((E4M3_BY_BYTE, "table.e4m3_by_byte"), (E8M0_BY_BYTE, "table.e8m0_by_byte")):
        nan = torch.isnan(golden[name])
        assert torch.equal(torch.isnan(ours), nan)
        assert same_bits(ours[~nan], golden[name][~nan])


def test_weights(golden: dict[str, Tensor]) -> None:
    fp8 = Fp8Weight(golden["weight.fp8.q"], golden["weight.fp8.scale"])
    assert same_bits(fp8.expand(), golden["weight.fp8.dequant"])
    fp4 = Fp4Weight(golden["weight.fp4.packed"], golden["weight.fp4.scale"])
    assert same_bits(fp4.expand(), golden["weight.fp4.dequant"])
