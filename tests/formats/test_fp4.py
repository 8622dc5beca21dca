"""E2M1 element codes against their definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from rorqual.formats.fp4 import E2M1_BY_BYTE, decode_packed_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize(("value", "rounded"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)])
def test_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    codes = encode_e2m1(torch.tensor([value, -value]))
    assert codes.tolist() == [MAGNITUDES.index(rounded), MAGNITUDES.index(rounded) | 8]
    assert MAGNITUDES.index(rounded) % 2 == 0


def test_beside_a_tie_the_nearer_value_wins() -> None:
    for code, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        tie = torch.tensor((low + high) / 2)
        assert encode_e2m1(torch.nextafter(tie, torch.tensor(0.0))) == code
        assert encode_e2m1(torch.nextafter(tie, torch.tensor(9.0))) == code + 1


def test_values_encode_to_their_own_code_and_zero_keeps_its_sign() -> None:
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    assert encode_e2m1(values).tolist() == list(range(16))
    assert encode_e2m1(torch.tensor([-1e-45, 1e-45])).tolist() == [8, 0]


def test_saturates_at_six() -> None:
    assert encode_e2m1(torch.tensor([7.0, 1e30, -3e38])).tolist() == [7, 7, 15]


def test_low_nibble_is_the_even_element() -> None:
    assert pack_nibbles(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert decode_packed_e2m1(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [0.5, 1.0]


def test_every_byte_survives_unpack_decode_encode_pack() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    decoded = decode_packed_e2m1(packed)
    assert decoded.shape == (4, 128)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)
    assert torch.equal(pack_nibbles(encode_e2m1(decoded)), packed)
    assert torch.equal(decoded.view(256, 2), E2M1_BY_BYTE)
