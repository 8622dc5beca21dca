"""The rotation of positions: the fast twin gives the plain bits, there and back, at any shape."""

from __future__ import annotations

import pytest
import torch

from rorqual.ops.fast.rope import rotate
from rorqual.ops.reference.rope import rotate as plain_rotate


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 96), (70, 3, 128), (300, 2, 80)])
@pytest.mark.parametrize("width", [16, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_the_plain_twin(shape: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype)
    angles = torch.randn(shape[0], width // 2, generator=generator)
    for inverse in (False, True):
        kept = x.clone()
        found = rotate(x, (angles.cos(), angles.sin()), inverse=inverse)
        expected = plain_rotate(x, (angles.cos(), angles.sin()), inverse=inverse)
        assert found.dtype == torch.float32 and torch.equal(found, expected)
        assert torch.equal(x, kept), "the input is not written"
        spent = rotate(x, (angles.cos(), angles.sin()), inverse=inverse, overwrite=True)
        assert torch.equal(spent, expected)
        x = kept


def test_a_view_is_rotated_as_its_values() -> None:
    x, angles = torch.randn(40, 4, 64, generator=torch.Generator().manual_seed(1)), torch.linspace(0, 3, 40)[:, None]
    turn = angles.expand(40, 32).cos(), angles.expand(40, 32).sin()
    assert torch.equal(rotate(x[:, 1], turn), plain_rotate(x[:, 1], turn))
