"""The ops of a training step on a CPU: plain signatures, gradients, and kernels where autograd is slow."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

from rorqual.ops.dispatch import Ops, reference_ops
from rorqual.ops.fast import (
    codec,
    topk,
    train_experts,
    train_hyper,
    train_linear,
    train_rows,
)

_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 1 << 30


def training_ops() -> Ops:
    """The plain ops, with twins that have hand-written gradients for what training spends its time in.

    For fp32 on a CPU; on another device take `reference_ops()`. Beside the fields of `Ops` there are
    `train_codec.fake_quantize` and `train_codec.fake_quantize_weight`.
    """
    return replace(
        reference_ops(),
        name="training",
        quantize=codec.quantize_fast,
        dequantize=codec.dequantize_fast,
        topk_lowest=topk.topk_lowest,
        experts=train_experts.experts,
        linear=train_linear.linear,
        grouped_linear=train_linear.grouped_linear,
        rms_norm=train_rows.rms_norm,
        rotate=train_rows.rotate,
        hyper_mix=train_hyper.hyper_mix,
        hyper_collapse=train_hyper.hyper_collapse,
        hyper_expand=train_hyper.hyper_expand,
    )


def keep_freed_memory() -> bool:
    """Let the C library keep what it frees, for the rest of the process; False where it cannot be told.

    glibc hands every block of 32 MB and more back to the system at once, and the next one is zeroed page by page: of a
    large elementwise op that is most of its time. A step's tensors have the sizes of the last step's; kept, they are
    reused. The process then holds its peak until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    reused = bool(set_option(_MALLOC_MMAP_THRESHOLD, _LARGEST_REUSED))
    return bool(set_option(_MALLOC_TRIM_THRESHOLD, 2**31 - 1)) and reused
