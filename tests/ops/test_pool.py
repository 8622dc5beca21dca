"""The groups of a candidate pool: the twins agree, and say what the rule says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rorqual.ops.fast.pool import pool_groups
from rorqual.ops.reference.pool import pool_groups as plain_pool_groups

TWINS = [pytest.param(plain_pool_groups, id="plain"), pytest.param(pool_groups, id="fast")]


@pytest.mark.parametrize("twin", TWINS)
def test_blocks_become_their_visible_groups(twin: Callable[..., Tensor]) -> None:
    blocks, visible = torch.tensor([[1, -1], [0, 2], [2, 1]]), torch.tensor([6, 0, 12])
    expected = [[4, 5, -1, -1, -1, -1, -1, -1], [-1] * 8, [8, 9, 10, 11, 4, 5, 6, 7]]
    assert twin(blocks, visible, 4).tolist() == expected


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (1, 1), (70, 33), (300, 256)])
def test_the_twins_agree(shape: tuple[int, int], block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    blocks = torch.randint(-1, 50, (shape[1], shape[0]), generator=generator).t()
    visible = torch.randint(0, 50 * block, (shape[0],), generator=generator)
    found, expected = pool_groups(blocks, visible, block), plain_pool_groups(blocks, visible, block)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
