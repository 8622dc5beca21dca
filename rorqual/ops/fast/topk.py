"""The k best of each row by radix select: the Numba twin of `rorqual.ops.reference.topk`, the same indices.

A score's bits, turned so that they order as unsigned integers, are looked at in digits of 11, 11 and 10 bits from the
top: a histogram of a digit tells which value of it the k-th best score has, and the next one looks only at scores that
agree so far. What remains is the k-th best score itself and how many of its equals are still wanted. Of a long row only
scores that k of its first part reach are looked at in this way.

Of many rows each thread takes whole ones. Fewer rows than threads are cut into parts: the k best of a row are among the
k best of its parts, and since those stay in index order, ties fall as they do on the whole row.
"""

# Kernels are typed by their Numba signatures.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.ops.cpu import Path
from rorqual.ops.fast.kernel import Kernel, allocating, inlined, kernel, workers
from rorqual.ops.fast.vectors import ARRAY, I32, LANES, VECTOR_F32, broadcast, const, instruction, load_at
from rorqual.ops.reference.topk import topk_lowest as plain_topk_lowest

# R rows, G scores a row, K chosen

SCORES_A_TASK = 1 << 14
"""Fewer scores than this are not worth another thread."""

SAMPLE = 8
"""A long row is chosen from by what its first part, one in so many scores, says: a score that k of them reach. Few of
the others do, and only those are looked at again."""

_U32 = np.uint32
_NONE = np.float32(-np.inf)
_I16 = ir.IntType(16)
_FIRST, _SECOND = 21, 10
_HIDDEN_KEY, _BEST_KEY = _U32(0x007FFFFF), _U32(0xFF800000)
_SIGNATURE = "void(float32[::1], int64, int64, int64, int64[::1], int64[::1])"


@instruction(types.uint32, types.float32)
def _key(builder: Any, score: Any) -> Any:
    """Bits that order as the scores do: -inf is 0x007FFFFF, +inf 0xFF800000, NaN outside; -0.0 equals 0.0."""
    bits = builder.bitcast(builder.fadd(score, const(score.type, 0.0)), I32)
    return builder.xor(bits, builder.or_(builder.ashr(bits, const(I32, 31)), const(I32, 0x80000000)))


@instruction(types.float32, types.uint32)
def _score(builder: Any, key: Any) -> Any:
    """Inverse of `_key`."""
    negative = builder.xor(builder.ashr(key, const(I32, 31)), const(I32, -1))
    bits = builder.xor(key, builder.or_(negative, const(I32, 0x80000000)))
    return builder.bitcast(bits, ir.FloatType())


@inlined
def _edge(counts, wanted):
    """The digit value of the `wanted`-th best, and how many have a better one. counts holds at least `wanted`."""
    above = 0
    for value in range(counts.size - 1, -1, -1):
        if above + counts[value] >= wanted:
            return value, above
        above += counts[value]
    return 0, above


@inlined
def _count_first(row, counts):
    """Histogram of the first digit; the position of a NaN, or -1."""
    counts[:] = 0
    bad = -1
    for i in range(row.size):
        key = _key(row[i])
        if key < _HIDDEN_KEY or key > _BEST_KEY:
            bad = i
        counts[key >> _U32(_FIRST)] += 1
    return bad


@inlined
def _count_next(keys, known, known_shift, shift, counts):
    """Histogram of the digit between the two shifts, among keys whose higher bits are `known`."""
    counts[:] = 0
    mask = (_U32(1) << (known_shift - shift)) - _U32(1)
    for i in range(keys.size):
        if keys[i] >> known_shift == known:
            counts[(keys[i] >> shift) & mask] += 1


@instruction(types.boolean, ARRAY, types.intp, types.float32)
def _any_above(builder: Any, row: Any, at: Any, least: Any) -> Any:
    """Whether one of sixteen scores is at least `least`, or NaN."""
    scores = load_at(builder, row, at, VECTOR_F32)
    above = builder.fcmp_unordered(">=", scores, broadcast(builder, least, VECTOR_F32))
    return builder.icmp_unsigned("!=", builder.bitcast(above, _I16), const(_I16, 0))


@inlined
def _floor(row, k, counts):
    """A score that at least k of a row reach, found in its first part; -inf where that part does not tell."""
    part = row[: row.size // SAMPLE]
    bad = _count_first(part, counts)
    if bad >= 0 or part.size - counts[_HIDDEN_KEY >> _U32(_FIRST)] < k:
        return _NONE
    digit, _ = _edge(counts, k)
    return _score(_U32(digit) << _U32(_FIRST))


@inlined
def _reaching(row, least, scores, at):
    """Scores that reach `least`, and NaN, with their places; how many, or -1 where there are more than fit."""
    n, i = 0, 0
    while i < row.size:
        if i + LANES <= row.size and not _any_above(row, i, least):
            i += LANES
            continue
        for j in range(i, min(i + LANES, row.size)):
            if not row[j] < least:
                if n == scores.size:
                    return -1
                scores[n], at[n] = row[j], j
                n += 1
        i += LANES
    return n


@allocating
def select(row, k, counts, out):
    """Fill out [k] with one row's indices; returns where a NaN stands, or -1."""
    if row.size >= SAMPLE * SAMPLE * k:
        least = _floor(row, k, counts)
        if least > _NONE:
            scores, at = np.empty(row.size // SAMPLE, np.float32), np.empty(row.size // SAMPLE, np.int64)
            n = _reaching(row, least, scores, at)
            if n >= 0:
                bad = _select_all(scores[:n], k, counts, out)
                for i in range(k):
                    if out[i] >= 0:
                        out[i] = at[out[i]]
                return at[bad] if bad >= 0 else -1
    return _select_all(row, k, counts, out)


@allocating
def _select_all(row, k, counts, out):
    """`_select` by every digit of every score."""
    out[:] = -1
    bad = _count_first(row, counts)
    # Finite scores begin one digit above the hidden ones.
    wanted = min(k, row.size - counts[_HIDDEN_KEY >> _U32(_FIRST)])
    if bad >= 0 or wanted <= 0:
        return bad
    digit, above = _edge(counts, wanted)
    n = 0
    keys, at = np.empty(above + counts[digit], np.uint32), np.empty(above + counts[digit], np.int64)
    least = _U32(digit) << _U32(_FIRST)
    for i in range(row.size):
        key = _key(row[i])
        if key >= least:
            keys[n], at[n] = key, i
            n += 1
    _count_next(keys, _U32(digit), _U32(_FIRST), _U32(_SECOND), counts)
    second, better = _edge(counts, wanted - above)
    above += better
    known = (_U32(digit) << _U32(_FIRST - _SECOND)) | _U32(second)
    _count_next(keys, known, _U32(_SECOND), _U32(0), counts)
    third, better = _edge(counts, wanted - above)
    ties = wanted - above - better
    edge = (known << _U32(_SECOND)) | _U32(third)
    n = 0
    for i in range(keys.size):
        if keys[i] > edge or (keys[i] == edge and ties > 0):
            ties -= keys[i] == edge
            out[n] = at[i]
            n += 1
    return -1


@kernel(_SIGNATURE, parallel=True)
def _topk(scores, rows, k, tasks, out, bad):
    width = scores.size // rows
    for task in prange(tasks):
        counts = np.empty(2048, np.int64)
        for row in range(task, rows, tasks):
            bad[row] = select(scores[row * width : (row + 1) * width], k, counts, out[row * k : (row + 1) * k])


@allocating
def _join(row, k, best, out):
    """The k best of one row among its parts' best, indices ascending with -1 between them."""
    n = 0
    at, scores = np.empty(best.size, np.int64), np.empty(best.size, np.float32)
    for i in range(best.size):
        if best[i] >= 0:
            at[n], scores[n] = best[i], row[best[i]]
            n += 1
    select(scores[:n], k, np.empty(2048, np.int64), out)
    for i in range(k):
        if out[i] >= 0:
            out[i] = at[out[i]]


@kernel(_SIGNATURE, parallel=True)
def _topk_split(scores, rows, k, parts, out, bad):
    width = scores.size // rows
    step = (width + parts - 1) // parts
    best, wrong = np.empty(rows * parts * k, np.int64), np.empty(rows * parts, np.int64)
    for unit in prange(rows * parts):
        first, at = unit % parts * step, unit // parts * width
        own = best[unit * k : (unit + 1) * k]
        part = scores[at + min(first, width) : at + min(first + step, width)]
        found = select(part, k, np.empty(2048, np.int64), own)
        wrong[unit] = first + found if found >= 0 else -1
        for i in range(k):
            if own[i] >= 0:
                own[i] += first
    for row in range(rows):
        bad[row] = -1
        for unit in range(row * parts, (row + 1) * parts):
            bad[row] = max(bad[row], wrong[unit])
        if bad[row] < 0:
            share = best[row * parts * k : (row + 1) * parts * k]
            _join(scores[row * width : (row + 1) * width], k, share, out[row * k : (row + 1) * k])


def kernels(path: Path) -> tuple[Kernel, ...]:
    """What `topk_lowest` runs: the same on every path."""
    return (_topk, _topk_split)


def topk_lowest(scores_RG: Tensor, k: int) -> Tensor:
    """As the plain `topk_lowest`, which serves scores that are not fp32 on a CPU."""
    if scores_RG.dtype != torch.float32 or scores_RG.device.type != "cpu" or not k or not scores_RG.numel():
        return plain_topk_lowest(scores_RG, k)
    rows = scores_RG.shape[0]
    out, bad = torch.empty(rows, k, dtype=torch.int64), np.empty(rows, np.int64)
    tasks = max(1, min(workers(), scores_RG.numel() // SCORES_A_TASK))
    # A part that is not much longer than k chooses too little to pay.
    parts = min(-(-tasks // rows), scores_RG.shape[1] // (8 * k))
    flat = scores_RG.detach().contiguous().view(-1).numpy()
    if parts > 1:
        _topk_split(flat, rows, k, parts, out.view(-1).numpy(), bad, tasks=rows * parts)
    else:
        tasks = min(tasks, rows)
        _topk(flat, rows, k, tasks, out.view(-1).numpy(), bad, tasks=tasks)
    if bad.max() >= 0:
        row = int(bad.argmax())
        raise FormatError(f"score {(row, int(bad[row]))} is NaN: scores must be numbers or -inf")
    return out
