"""Codes and scale bytes inside Triton kernels are those of `rorqual.formats`, byte by byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.formats.fp4 import E2M1_BY_BYTE
from rorqual.formats.fp8 import E4M3_BY_BYTE, E8M0_BY_BYTE
from tests.ops.on_triton import there

import triton  # isort: skip
import triton.language as tl  # isort: skip

from rorqual.ops.triton.decode import e2m1_doubled, e4m3, e8m0, round_bf16  # isort: skip


@triton.jit
def _codes(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, e2m1_doubled(tl.load(x + at)))


@triton.jit
def _e4m3(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, e4m3(tl.load(x + at)))


@triton.jit
def _e8m0(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, e8m0(tl.load(x + at)))


@triton.jit
def _bf16(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, round_bf16(tl.load(x + at)))


def each(kernel: Any, x: Tensor) -> Tensor:
    out = there(torch.empty(len(x)))
    kernel[(1,)](there(x), out, N=len(x))
    return out.cpu()


def bits(x: Tensor) -> list[int]:
    """fp32 bits, NaN as one."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32).tolist()


def test_codes_are_twice_their_values() -> None:
    expected = 2 * E2M1_BY_BYTE[:16, 0]
    expected[8] = 0.0  # -0
    assert bits(each(_codes, torch.arange(16, dtype=torch.uint8))) == bits(expected)


@pytest.mark.parametrize(("kernel", "table"), [(_e4m3, E4M3_BY_BYTE), (_e8m0, E8M0_BY_BYTE)], ids=["e4m3", "e8m0"])
def test_every_byte_has_its_value(kernel: Callable[..., None], table: Tensor) -> None:
    found = each(kernel, torch.arange(256, dtype=torch.uint8))
    assert bits(found) == bits(table)
    assert found.isnan().sum() == (2 if kernel is _e4m3 else 1)


def test_bf16_rounds_to_nearest_even() -> None:
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (1000,), generator=generator, dtype=torch.int64).to(torch.int32)
    halves = torch.arange(12, dtype=torch.int32) * 0x8000 + 0x3F80_0000
    specials = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45])
    # A GPU's own NaN has all its bits set: a carry would make it -0.
    nan = torch.tensor([0x7FFF_FFFF, -1, 0x7F80_0001, 0x7FC0_0000], dtype=torch.int32)
    x = torch.cat((random, halves, specials.view(torch.int32), nan)).view(torch.float32)
    x = torch.cat((x, torch.zeros(1024 - len(x)))) if len(x) < 1024 else x[:1024]
    assert bits(each(_bf16, x)) == bits(x.to(torch.bfloat16).float())


# Whether the kernels compile, down to machine code, shows on any machine; in a process that does not interpret.
COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rorqual.ops.triton import attention, index_scores
page = dict(PAGE_BYTES=5000, CODES_OFFSET=8, CODE_BYTES=32, SCALES_OFFSET=4000, SCALE_BYTES=2, ENTRIES=64)
types = dict.fromkeys(["q_codes", "q_scales", "pool"], "*u8")
types |= dict.fromkeys(["q", "w", "window_keys", "sink"], "*fp32")
types |= dict.fromkeys(["visible", "index", "table", "topk", "positions"], "*i64") | {"scale": "fp32", "out": "*fp32"}
score = dict(HEADS=32, BLOCKS=2, NATIVE=True, GROUPS=64)
attend = dict(HEADS=8, CHANNELS=64, WIDE=64, NATIVE=True, HEADS_TILE=16, SLOTS=16)
for kernel, constants, options in (
    (index_scores._score_groups, page | score | dict(ROWS=4), {}),
    (index_scores._score_candidates, page | score, {}),
    (attention._attend, page | attend | dict(SCALE_BYTES=4, GROUP=16, E4M3_SCALES=True), attention.OPTIONS),
    (attention._attend, page | attend | dict(GROUP=32, E4M3_SCALES=False), attention.OPTIONS),
):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    for arch in (80, 90):
        made = compile(source, target=GPUTarget("cuda", arch, 32), options=options | {"enable_fp_fusion": False})
        assert len(made.asm["cubin"]) > 1000
print("compiled")
"""


@pytest.mark.full
def test_kernels_compile_for_gpus_without_one(tmp_path: Any) -> None:
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["compiled"], done.stderr[-2000:]
