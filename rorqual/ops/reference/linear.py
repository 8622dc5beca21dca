"""Linear layers over dense, FP8 and FP4 weights, in plain torch (SPEC 3).

The first `short_rows` rows (decode and verification) are multiplied one by one, each as a fresh [1, K] tensor, so that
their bits depend on nothing else in the call (DESIGN 12: a GEMM's last bits depend on its number of rows). The rest
share one GEMM. Quantised weights are expanded a tile of rows at a time, never whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import DenseWeight, Weight

# T rows, K inputs, N outputs

BLOCK = E4M3_E8M0_32.group
"""Inputs whose products are summed before they join the running sum (SPEC 3)."""
TILE_ROWS = 1024
"""Weight rows held expanded at once: 20 MB at K = 5120."""


def linear(x_TK: Tensor, weight: Weight, short_rows: int, native: bool) -> Tensor:
    """y = x W^T, fp32 [T, N]; the caller rounds it. Differentiable in x, and in a dense weight.

    Args:
        x_TK: activations, fp32 or bf16, each taken at its exact value.
        weight: [N, K].
        short_rows: leading rows whose bits must not depend on the others; T or more means all.
        native: a quantised weight takes x quantised to E4M3 / E8M0 per 32, and blocks of 32 are summed in K order. A
            dense weight takes x as it is.

    Raises:
        FormatError: NaN or Inf in an x that is to be quantised.
    """
    quantised = native and not isinstance(weight, DenseWeight)
    x_TK = quantize_activation(x_TK) if quantised else x_TK.float()
    multiply = block_linear if quantised else F.linear
    return torch.cat([_mixed_rows(x_TK, w_NK, short_rows, multiply) for w_NK in _tiles(weight)], dim=1)


def grouped_linear(x_TGK: Tensor, weights: Sequence[Weight], short_rows: int) -> Tensor:
    """y[t, g] = weights[g] x[t, g], fp32 [T, G, N]: one weight a group, no quantised input (Wo_a). Differentiable."""
    return torch.stack([linear(x_TGK[:, g], w, short_rows, False) for g, w in enumerate(weights)], dim=1)


def quantize_activation(x_TK: Tensor) -> Tensor:
    """x after E4M3 codes and E8M0 scales per 32 of K, as fp32; straight-through gradient. K may be ragged."""
    width = x_TK.shape[-1]
    padded = F.pad(x_TK.float(), (0, -width % BLOCK))
    return fake_quantize(padded, E4M3_E8M0_32)[..., :width]


def block_linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x W^T with the products of each 32-block summed in fp32, then the blocks summed in K order (SPEC 3).

    Scales are powers of two, so products of dequantised values are the scaled products of the codes, exactly.
    """
    rows = x_TK.shape[0]
    if rows == 1:
        # A lone row would go to a matrix-vector product, which adds a block in another order than a matrix product.
        x_TK = torch.cat((x_TK, torch.zeros_like(x_TK)))
    y_TN = x_TK.new_zeros(x_TK.shape[0], w_NK.shape[0])
    for k in range(0, w_NK.shape[1], BLOCK):
        y_TN = y_TN + F.linear(x_TK[:, k : k + BLOCK], w_NK[:, k : k + BLOCK])
    return y_TN[:rows]


def _tiles(weight: Weight) -> Iterator[Tensor]:
    """The weight as fp32 tiles [n, K]; an fp32 weight whole, since nothing has to be expanded."""
    if isinstance(weight, DenseWeight) and weight.tensor.dtype == torch.float32:
        yield weight.tensor
        return
    for start in range(0, weight.shape[0], TILE_ROWS):
        yield weight.expand(rows=slice(start, start + TILE_ROWS))


def _mixed_rows(x_TK: Tensor, w_NK: Tensor, short_rows: int, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    # Cloned: a view into the batch may be aligned differently from call to call, and a GEMM library may mind.
    products = [multiply(x_TK[t : t + 1].clone(), w_NK) for t in range(min(short_rows, x_TK.shape[0]))]
    if x_TK.shape[0] > short_rows or not products:
        products.append(multiply(x_TK[short_rows:], w_NK))
    return torch.cat(products)
