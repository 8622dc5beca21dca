"""The ops of a training step on a CPU: plain signatures, gradients, and kernels where autograd is slow."""

from __future__ import annotations

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
