"""Token ids as callers hand them in: lists, arrays or tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rorqual.errors import InputError


def as_ids(ids: Tensor | Sequence[int], name: str) -> Tensor:
    """int64 [N] of a list, [N] or [1, N] array.

    Raises:
        InputError: anything but at least one integer.
    """
    try:
        found = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: not a list of integers ({' '.join(str(error).split())})") from error
    if found.dim() == 2 and found.shape[0] == 1:
        found = found[0]
    if found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool or not found.numel():
        shape = f"{list(found.shape)} {found.dtype}"
        raise InputError(f"{name}: shape {shape}; needed: at least 1 integer id, [N] or [1, N]")
    return found.to(torch.int64)
