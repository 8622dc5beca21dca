"""Elementwise functions whose bits do not depend on the batch (DESIGN 12).

torch computes exp, cos and their like in full vectors and a scalar tail, whose last bits differ; where an element lands
depends on the shape of the whole tensor. So rows that must not depend on their neighbours go one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_row(function: Callable[[Tensor], Tensor], x: Tensor, short_rows: int) -> Tensor:
    """`function` on each of the first `short_rows` rows alone, then on the rest together."""
    if short_rows == x.shape[0] == 1:
        return function(x.contiguous())
    results = [function(row.contiguous()) for row in x[:short_rows].split(1)] if short_rows else []
    if x.shape[0] > short_rows or not results:
        results.append(function(x[short_rows:]))
    return joined(results)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts one after the other; one alone as it is, without the copy that `torch.cat` makes."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
