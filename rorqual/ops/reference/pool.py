"""The groups of a candidate pool (SPEC 5), in plain torch. The fast twin is `rorqual.ops.fast.pool`."""

from __future__ import annotations

import torch
from torch import Tensor

# R rows, B candidate blocks


def pool_groups(blocks_RB: Tensor, visible_R: Tensor, block: int) -> Tensor:
    """Groups int64 [R, B x block] of each row's candidate blocks, in their order; -1 where the row sees none.

    Worked example: blocks [1, -1] of 4 groups, of which the row sees 6, give [4, 5, -1, -1, -1, -1, -1, -1].

    Args:
        blocks_RB: int64 block ids, -1 padded.
        visible_R: int64, groups [0, visible) are visible to the row.
        block: groups a block.
    """
    at = blocks_RB[..., None] * block + torch.arange(block, device=blocks_RB.device)
    return at.masked_fill((blocks_RB[..., None] < 0) | (at >= visible_R[:, None, None]), -1).flatten(1)
