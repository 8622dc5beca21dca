"""E4M3 and E8M0 against their definitions."""

from __future__ import annotations

import math

import torch

from rorqual.formats.fp8 import E4M3_BY_BYTE, decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0_ceil

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
FINITE_E4M3 = ALL_BYTES[(ALL_BYTES & 127) != 127]


def test_table_is_torchs_own_reading() -> None:
    theirs = ALL_BYTES.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(E4M3_BY_BYTE, theirs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        decode_e8m0(ALL_BYTES), ALL_BYTES.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True
    )


def test_every_finite_code_round_trips_signed_zero_included() -> None:
    assert torch.equal(encode_e4m3(decode_e4m3(FINITE_E4M3)), FINITE_E4M3)


def test_midpoints_go_to_the_even_code_and_neighbours_to_the_nearer() -> None:
    values = E4M3_BY_BYTE[:127]
    midpoints = (values[:-1] + values[1:]) / 2
    even = torch.arange(126) + torch.arange(126) % 2
    assert encode_e4m3(midpoints).tolist() == even.tolist()
    assert encode_e4m3(torch.nextafter(midpoints, values[:-1])).tolist() == list(range(126))
    assert encode_e4m3(torch.nextafter(midpoints, values[1:])).tolist() == list(range(1, 127))


def test_saturates_at_448() -> None:
    codes = encode_e4m3(torch.tensor([448.0, 464.0, 480.0, 1e38, math.inf, -449.0, -math.inf]))
    assert codes.tolist() == [126] * 5 + [254] * 2


def test_e8m0_is_the_least_power_of_two_not_below() -> None:
    powers = torch.tensor([2.0**exponent for exponent in range(-126, 128)])
    exact = torch.arange(1, 255)
    assert encode_e8m0_ceil(powers).tolist() == exact.tolist()
    assert encode_e8m0_ceil(torch.nextafter(powers, torch.tensor(0.0))).tolist()[1:] == exact.tolist()[1:]
    above = encode_e8m0_ceil(torch.nextafter(powers, torch.tensor(math.inf))).tolist()
    assert above == [*range(2, 255), 254]


def test_e8m0_never_writes_the_nan_byte() -> None:
    extremes = torch.tensor([0.0, 1e-45, 1e-38, 3.4e38, math.inf])
    assert encode_e8m0_ceil(extremes).tolist() == [0, 1, 1, 254, 254]
    assert torch.isnan(decode_e8m0(torch.tensor([255], dtype=torch.uint8))).all()
    assert decode_e8m0(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 2.0**127]
