"""Numba twin of `rorqual.ops.reference.linear`: packed weights are multiplied as they are stored.

Decode and verification rows go through the row kernels, whose bits depend on one row and one weight alone (DESIGN 12).
Larger row counts expand tiles of the weight into a small scratch for torch's GEMM. Without AVX512 every path but
"plain" takes the plain kernel.

T rows of x, N outputs, K inputs (Kp: padded to whole blocks), J weights, P products of a row of x and a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from rorqual.formats.codec import check_finite
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import TILE, DenseWeight, Fp8Weight, Weight
from rorqual.ops.cpu import Path, best_path, check_path, features
from rorqual.ops.fast import panels
from rorqual.ops.fast.kernel import Kernel, refuse_gradients, workers
from rorqual.ops.fast.panels import fits, multiply_panels, pack_panels
from rorqual.ops.fast.row_kernels import EXPAND, MULTIPLY, pack
from rorqual.ops.fast.row_vectors import BF16, FP4, FP8, FP32, ROWS, Array, Kind

SCRATCH_BYTES = 8 << 20
"""Expanded weight held at once for a GEMM."""
GEMM_ROWS = 64
"""From this many rows on, a GEMM over expanded tiles beats the row kernel."""
PART_PRODUCTS = 1 << 17
"""Multiplications worth a thread of their own."""


def linear(x_TK: Tensor, weight: Weight, short_rows: int, native: bool, *, path: Path | None = None) -> Tensor:
    """As the plain `linear`, without gradients. `path` is one of `rorqual.ops.cpu`; None takes the best.

    Fewer than GEMM_ROWS rows beyond the short ones go through the row kernel with them.
    """
    refuse_gradients(x_TK)
    kind, total = kind_of(weight), x_TK.shape[0]
    quantise = native and kind.scale_rows > 0
    short_rows = min(short_rows, total) if total - short_rows >= GEMM_ROWS else total
    y_TN = torch.empty(total, weight.shape[0])
    if short_rows or not total:
        x = pack_rows(x_TK[:short_rows], kind, quantise)
        multiply_rows([weight], x, *_spread(1, short_rows), y_TN.numpy(), path)
    if short_rows < total:
        _multiply_long([weight], x_TK[short_rows:], quantise, y_TN[short_rows:], path)
    return y_TN


def grouped_linear(x_TGK: Tensor, weights: Sequence[Weight], short_rows: int, *, path: Path | None = None) -> Tensor:
    """As the plain `grouped_linear`: one pass over all groups for the short rows."""
    rows, groups, _ = x_TGK.shape
    if rows - short_rows >= GEMM_ROWS and not short_rows and in_panels(weights, path):
        refuse_gradients(x_TGK)
        y_GTN = torch.empty(groups, rows, weights[0].shape[0])
        _multiply_long(weights, x_TGK.flatten(0, 1), False, y_GTN.flatten(0, 1), path)
        return y_GTN.transpose(0, 1)
    if rows - short_rows >= GEMM_ROWS:
        return torch.stack([linear(x_TGK[:, g], weights[g], short_rows, False, path=path) for g in range(groups)], 1)
    refuse_gradients(x_TGK)
    x = pack_rows(x_TGK.flatten(0, 1), kind_of(weights[0]), False)
    y_GTN = torch.empty(groups, rows, weights[0].shape[0])
    multiply_rows(weights, x, *_spread(groups, rows), y_GTN.flatten(0, 1).numpy(), path)
    return y_GTN.transpose(0, 1)


@lru_cache(maxsize=256)
def _spread(groups: int, rows: int) -> tuple[Array, Array, Array]:
    """row_P, first_J and last_J of `multiply_rows` where row t of group g is row t * groups + g. Never written."""
    first = np.arange(groups) * rows
    return np.arange(rows * groups).reshape(rows, groups).T.ravel().copy(), first, first + rows


def _multiply_long(weights: Sequence[Weight], x_PK: Tensor, quantise: bool, y_PN: Tensor, path: Path | None) -> None:
    """Many rows; with G weights, row t of weight g is x[t * G + g] and y[g * T + t]."""
    kind, (n, k) = kind_of(weights[0]), weights[0].shape
    if not in_panels(weights, path):
        (weight,) = weights
        multiply_tiles(weight, torch.from_numpy(pack_rows(x_PK, kind, quantise)), y_PN, path)
        return
    # Plain rows are put in lane order while they are turned.
    x = pack_rows(x_PK, kind, True) if quantise else x_PK.detach().to(torch.float32).contiguous().numpy()
    row_P, first_J, last_J = _spread(len(weights), len(x) // len(weights))
    parts = parts_of(len(x) * n * k)
    turned = pack_panels(x, row_P, first_J, last_J, kind is not FP32 and not quantise, parts)
    multiply_panels(form_of(kind), addresses_of(weights), (n, k), first_J, last_J, turned, y_PN.numpy(), parts)


def in_panels(weights: Sequence[Weight], path: Path | None) -> bool:
    """Whether many rows times these weights go through `panels`."""
    return has_vectors(path) and all(fits(weight) and weight.addresses is not None for weight in weights)


def form_of(kind: Kind) -> tuple[int, int, int]:
    """What kernels are told of a kind."""
    return kind.code, kind.unit, kind.scale_rows


def addresses_of(weights: Sequence[Weight]) -> tuple[Array, Array]:
    """int64 [J] of codes and of scales; for weights that have them."""
    pairs = [weight.addresses or (0, 0) for weight in weights]
    return np.array([w for w, _ in pairs], np.int64), np.array([s for _, s in pairs], np.int64)


def kind_of(weight: Weight) -> Kind:
    """How the kernels read a weight. fp16, which no checkpoint of the release has, is widened to fp32 first."""
    if isinstance(weight, DenseWeight):
        return BF16 if weight.tensor.dtype == torch.bfloat16 else FP32
    return FP8 if isinstance(weight, Fp8Weight) else FP4


def pack_rows(x_TK: Tensor, kind: Kind, quantise: bool) -> Array:
    """x in the lane order of a kind of weight: fp32 [T, Kp], zeros past K.

    Raises:
        FormatError: NaN or Inf in an x that is to be quantised.
    """
    x_TK = x_TK.detach().to(torch.float32).contiguous()
    rows, width = x_TK.shape
    if kind is FP32 and width % TILE == 0:
        return x_TK.numpy()
    packed = (np.zeros if width % TILE else np.empty)((rows, width + -width % TILE), np.float32)
    finite, parts = np.empty(rows, np.bool_), parts_of(rows * width)
    pack(x_TK.numpy(), kind is not FP32, quantise, packed, finite, parts, tasks=parts)
    if quantise and not finite.all():
        check_finite(x_TK, E4M3_E8M0_32)
    return packed


def multiply_rows(
    weights: Sequence[Weight], x_TK: Array, row_P: Array, first_J: Array, last_J: Array, y_PN: Array, path: Path | None
) -> None:
    """y_PN[p] = weights[j] @ x_TK[row_P[p]] for p in [first_J[j], last_J[j]), each sum in the one order.

    Args:
        weights: of one kind and shape.
        x_TK: from `pack_rows`, for this kind.
        row_P: int64.
        first_J: int64.
        last_J: int64.
        y_PN: fp32, written.
        path: as in `linear`.
    """
    kind, (n, k) = kind_of(weights[0]), weights[0].shape
    assert all(kind_of(weight) is kind and weight.shape == (n, k) for weight in weights)
    refuse_gradients(*(weight.tensor for weight in weights if isinstance(weight, DenseWeight)))
    held = [() if weight.addresses else _tensors(weight) for weight in weights]
    pairs = [weight.addresses or tuple(t.data_ptr() for t in held[j]) for j, weight in enumerate(weights)]
    w_J, s_J = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    parts = parts_of(len(row_P) * n * k)
    run, form = _choose(MULTIPLY, kind, path)
    run(*form, w_J, s_J, n, k, first_J, last_J, row_P, x_TK, y_PN, parts, tasks=parts)


def multiply_tiles(weight: Weight, x_TK: Tensor, y_TN: Tensor, path: Path | None) -> None:
    """y = x W^T for many rows from `pack_rows`, by GEMM over expanded tiles of the weight, SCRATCH_BYTES at a time."""
    kind, (n, k), (w, s) = kind_of(weight), weight.shape, _tensors(weight)
    if kind is FP32:
        torch.mm(x_TK[:, :k], w.t(), out=y_TN)
        return
    rows = max(ROWS, min(n, SCRATCH_BYTES // (4 * x_TK.shape[1])))
    scratch = torch.empty(rows, x_TK.shape[1])
    run, form = _choose(EXPAND, kind, path)
    for start in range(0, n, rows):
        tile = scratch[: n - start]
        run(*form, w.data_ptr(), s.data_ptr(), k, start, tile.numpy())
        torch.mm(x_TK, tile.t(), out=y_TN[:, start : start + rows])


def parts_of(products: int) -> int:
    """Into how many parts so many multiplications are cut: one, or one a thread."""
    return workers() if products >= 2 * PART_PRODUCTS else 1


def _choose(
    kernels: Mapping[str, Kernel], kind: Kind, path: Path | None
) -> tuple[Kernel, tuple[Array, tuple[int, ...]]]:
    """A kernel for this kind, and its first two arguments."""
    form = form_of(kind)
    if has_vectors(path):
        return kernels[kind.dtype], (kind.marker, form)
    return kernels["plain"], (FP4.marker, form)


@cache
def has_vectors(path: Path | None) -> bool:
    """Whether products on `path` take the vector kernel, and not the plain one."""
    return (best_path() if path is None else check_path(path)) != "plain" and "avx512f" in features()


def _tensors(weight: Weight) -> tuple[Tensor, Tensor]:
    """Codes and scales, contiguous; a dense weight stands in for its own scales."""
    if isinstance(weight, DenseWeight):
        tensor = weight.tensor.detach().contiguous()
        return (tensor.float() if tensor.dtype == torch.float16 else tensor,) * 2
    codes = weight.codes if isinstance(weight, Fp8Weight) else weight.packed
    return codes.contiguous(), weight.scales.contiguous()


def kernels(path: Path | None = None) -> tuple[Kernel, ...]:
    """All that ops on `path` run; the others may not even compile on this CPU."""
    names = [name for name in MULTIPLY if (name != "plain") == has_vectors(path)]
    found = (pack, *(MULTIPLY[name] for name in names), *(EXPAND[name] for name in names if name in EXPAND))
    return found + panels.KERNELS if has_vectors(path) else found


KERNELS = kernels()
