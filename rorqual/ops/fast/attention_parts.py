"""What the vector kernels of `attention` are made of: queries turned, logits, softmax, output. See there."""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np

from rorqual.ops.fast.kernel import inlined, spliced
from rorqual.ops.fast.tiles import product, transpose
from rorqual.ops.fast.vectors import LANES, add, exp, load, maximum, multiply, round_bf16, splat, store, subtract
from rorqual.ops.fast.vectors import divide as quotient


@inlined
def turn_queries(q, row, heads, channels, padded, turned, to):
    """One row's q [H, C] to panels [P, C, 16]; `padded` [16, C] is scratch for a last panel that is not full."""
    for panel in range((heads + LANES - 1) // LANES):
        at = (row * heads + panel * LANES) * channels
        have = min(LANES, heads - panel * LANES) * channels
        if have < LANES * channels:
            for i in range(LANES * channels):
                padded[i] = q[at + i] if i < have else np.float32(0)
        for c in range(0, channels, LANES):
            if have < LANES * channels:
                transpose(padded, c, channels, turned, to + (panel * channels + c) * LANES)
            else:
                transpose(q, at + c, channels, turned, to + (panel * channels + c) * LANES)


@spliced
def dot_keys(keys, at, n, channels, turned, q_at, stride, logits, to):
    """q . k of n keys for all heads."""
    panels, panel = stride // LANES, channels * LANES
    product(keys, at, channels, 1, n, turned, q_at, LANES, panel, panels, channels, logits, to, stride, False)


@inlined
def softmax(logits, at, n, stride, sink, sink_at, scale, native, denominators, to):
    """Sixteen heads' logits [n] to p in place, rounded for the numerator where native; and their denominators."""
    factor, top = splat(scale), splat(np.float32(-np.inf))
    for s in range(n):
        scaled = multiply(load(logits, at + s * stride), factor)
        store(logits, at + s * stride, scaled)
        top = maximum(scaled, top)
    total = splat(np.float32(0))
    for s in range(n):
        p = exp(subtract(load(logits, at + s * stride), top))
        total = add(total, p)
        store(logits, at + s * stride, round_bf16(p) if native else p)
    store(denominators, to, add(total, exp(subtract(load(sink, sink_at), top))))


@spliced
def add_keys(p, p_at, stride, heads, keys, at, n, channels, vecs, out, to, onto):
    """out [heads, 16 vecs] (+)= sum over n slots of p * key, for some heads and channels."""
    product(p, p_at, 1, stride, heads, keys, at, channels, LANES, vecs, n, out, to, channels, onto)


@inlined
def divide(out, at, channels, vecs, denominators, head, step, heads):
    """Output of some heads over their denominators, which stand `step` apart."""
    for h in range(heads):
        below = splat(denominators[head + h * step])
        for v in range(vecs):
            place = at + h * channels + v * LANES
            store(out, place, quotient(load(out, place), below))
