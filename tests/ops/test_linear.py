"""Products with packed weights: the release's numbers, twins, and rows whose bits are their own."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from rorqual.errors import FormatError
from rorqual.formats.codec import quantize
from rorqual.formats.spec import E4M3_E8M0_32
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight, quantize_weight
from rorqual.ops import cpu
from rorqual.ops.fast import linear as fast
from rorqual.ops.fast.row_vectors import FP4, FP32, Kind
from rorqual.ops.reference import linear as plain

PATHS = [
    pytest.param(path, marks=pytest.mark.skipif(bool(cpu.missing(path)), reason=f"this CPU has no {path} path"))
    for path in ("vector", "plain")
]
KINDS = ("fp32", "bf16", "fp8", "fp4")
# Whole tiles, ragged tiles of N and K, N below a tile of eight, K below a block.
SHAPES = [(64, 128), (80, 96), (300, 640), (33, 1100), (5, 70), (3, 20)]
Linear = Callable[[Tensor, Weight, int, bool], Tensor]


def make_weight(kind: str, n: int, k: int, seed: int = 0) -> Weight:
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    if kind == "fp32":
        return DenseWeight(w)
    if kind == "bf16":
        return DenseWeight(w.to(torch.bfloat16))
    return quantize_weight(w, "fp8" if kind == "fp8" else "fp4")


def make_rows(t: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(t, k, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def legal(kind: str, k: int) -> bool:
    return kind != "fp4" or k % 32 == 0


def legal_cases(shapes: Iterable[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """Kinds with shapes they can hold: FP4 rows are whole groups."""
    return [(kind, n, k) for kind in KINDS for n, k in shapes if legal(kind, k)]


@pytest.fixture(params=["plain op", *PATHS])
def op(request: pytest.FixtureRequest) -> Linear:
    return plain.linear if request.param == "plain op" else partial(fast.linear, path=request.param)


@pytest.fixture(scope="module")
def gemm(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "formats" / "expected.safetensors")


def test_activation_codes_of_the_release(gemm: dict[str, Tensor]) -> None:
    packed = quantize(gemm["gemm.x"], E4M3_E8M0_32)
    assert torch.equal(packed.codes, gemm["gemm.x_codes"]) and torch.equal(packed.scales, gemm["gemm.x_scale"])


@pytest.mark.parametrize("short_rows", [0, 2, 5])
def test_native_products_of_the_release(op: Linear, gemm: dict[str, Tensor], short_rows: int) -> None:
    weights: dict[str, Weight] = {
        "fp8": Fp8Weight(gemm["weight.fp8.q"], gemm["weight.fp8.scale"]),
        "fp4": Fp4Weight(gemm["weight.fp4.packed"], gemm["weight.fp4.scale"]),
    }
    for name, weight in weights.items():
        y = op(gemm["gemm.x"], weight, short_rows, True).to(torch.bfloat16)
        assert torch.equal(y, gemm[f"gemm.{name}.y"]), name


def test_blocks_are_summed_first_and_then_in_order() -> None:
    big = 2.0**24
    w = torch.ones(1, 96)
    x = torch.zeros(2, 96)
    x[0, 0], x[0, 32:64] = big, 1.0  # one by one, the ones would vanish beside 2^24
    x[1, 0], x[1, 32], x[1, 64] = big, 1.0, -big  # from the left, the one in the middle does
    assert plain.block_linear(x, w).tolist() == [[big + 32], [0.0]]


@pytest.mark.parametrize(("kind", "n", "k"), legal_cases(SHAPES))
def test_value(op: Linear, kind: str, n: int, k: int) -> None:
    weight = make_weight(kind, n, k)
    for native in (False, True):
        for t, short_rows in ((0, 0), (1, 1), (7, 7), (7, 2), (33, 40), (fast.GEMM_ROWS + 5, 3)):
            x = make_rows(t, k)
            values = plain.quantize_activation(x) if native and kind in ("fp8", "fp4") else x
            exact = values.double() @ weight.expand().double().T
            y = op(x, weight, short_rows, native)
            assert y.dtype == torch.float32 and y.shape == (t, n)
            bound = values.double().abs() @ weight.expand().double().abs().T
            assert ((y - exact).abs() <= 2e-6 * bound).all(), (native, t)


def test_fp32_activations_are_not_rounded(op: Linear) -> None:
    weight, x = make_weight("fp32", 16, 64), make_rows(3, 64).float() * 1.0001
    torch.testing.assert_close(op(x, weight, 3, True), x @ weight.expand().T, rtol=1e-5, atol=1e-5)


def test_half_precision_weight(op: Linear) -> None:
    weight = DenseWeight(torch.randn(20, 48, generator=torch.Generator().manual_seed(0)).to(torch.float16))
    x = make_rows(3, 48)
    torch.testing.assert_close(op(x, weight, 3, False), x.float() @ weight.expand().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("kind", "n", "k"), legal_cases([(44, 96), (44, 88), (9, 1120)]))
def test_a_row_has_the_same_bits_in_any_company(op: Linear, kind: str, native: bool, n: int, k: int) -> None:
    weight, x = make_weight(kind, n, k), make_rows(32, k)
    alone = torch.cat([op(x[t : t + 1], weight, 1, native) for t in range(32)])
    for t in range(1, 33):
        assert torch.equal(op(x[:t], weight, t, native), alone[:t]), t
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(op(x[order], weight, 32, native), alone[order])
    for tail in (1, 40, fast.GEMM_ROWS + 9):
        mixed = op(torch.cat([x[:11], make_rows(tail, k, seed=3)]), weight, 11, native)
        assert torch.equal(mixed[:11], alone[:11]), tail
    assert torch.equal(op(x.float()[3:4].clone(), weight, 1, native), alone[3:4])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads(kind: str, path: cpu.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = make_weight(kind, 77, 160), make_rows(fast.GEMM_ROWS + 20, 160)
    whole = fast.linear(x, weight, 9, True, path=path)
    for parts in (2, 3, 40):
        monkeypatch.setattr(fast, "parts_of", lambda products, parts=parts: parts)
        assert torch.equal(fast.linear(x, weight, 9, True, path=path)[:9], whole[:9])


@pytest.mark.skipif(bool(cpu.missing("vector")), reason="this CPU has no vector path")
@pytest.mark.skipif("avx512f" not in cpu.features(), reason="long rows go through torch's GEMM here")
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("kind", "n", "k"), legal_cases([(77, 160), (16, 64), (40, 544)]))
def test_a_long_row_has_the_same_bits_in_any_company(
    kind: str, native: bool, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Full tiles and rests, inputs of one panel and of three; threads take outputs, and rows of narrow weights.
    weight, x = make_weight(kind, n, k), make_rows(fast.GEMM_ROWS + 43, k)
    whole = fast.linear(x, weight, 0, native, path="vector")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))
    assert torch.equal(fast.linear(x[order], weight, 0, native, path="vector"), whole[order])
    for rows in (fast.GEMM_ROWS, fast.GEMM_ROWS + 1, fast.GEMM_ROWS + 30):
        assert torch.equal(fast.linear(x[-rows:], weight, 0, native, path="vector"), whole[-rows:])
    for parts in (1, 2, 7):
        monkeypatch.setattr(fast, "parts_of", lambda products, parts=parts: parts)
        assert torch.equal(fast.linear(x, weight, 0, native, path="vector"), whole)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_several_weights_in_one_call(kind: str, path: cpu.Path) -> None:
    weights = [make_weight(kind, 20, 64, seed) for seed in range(4)]
    x = make_rows(5, 64)
    row = np.array([4, 0, 1, 2, 3, 4, 0, 2])
    first, last = np.array([0, 1, 1, 6]), np.array([1, 1, 6, 8])
    y = np.full((8, 20), np.nan, np.float32)
    fast.multiply_rows(weights, fast.pack_rows(x, fast.kind_of(weights[0]), False), row, first, last, y, path)
    for j in range(4):
        for p in range(first[j], last[j]):
            alone = fast.linear(x[row[p] : row[p] + 1], weights[j], 1, False, path=path)
            assert torch.equal(torch.from_numpy(y[p : p + 1]), alone)


def test_kernels_of_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [kernel.name for kernel in fast.kernels("plain")] == [
        "row_kernels.pack",
        "row_kernels.multiply_plain",
        "row_kernels.expand_plain",
    ]
    # AVX2 alone compiles none of the 512-bit kernels; the CPU of this run may have not even that.
    monkeypatch.setattr(fast, "check_path", lambda path: path)
    monkeypatch.setattr(fast, "features", lambda: frozenset({"avx2", "fma"}))
    assert not fast.has_vectors.__wrapped__("vector")
    monkeypatch.setattr(fast, "features", lambda: frozenset({"avx2", "fma", "avx512f"}))
    assert not fast.has_vectors.__wrapped__("plain")


def _numbers_of_all_sizes() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    spread = torch.randn(400, 64, generator=generator) * 2.0 ** torch.randint(-30, 30, (400, 64), generator=generator)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()]
    between = (codes[:-1] + codes[1:]) / 2  # the ties
    edges = torch.tensor([0.0, -0.0, 448.0, 464.0, 480.0, 2.0**-9, 2.0**-10, 3e38, 1e-30, 1e-45, 1e-4, 448e-4])
    values = torch.cat([codes, between, edges])
    tops = torch.tensor([448.0, 449.0, 1.0, 3e38]).repeat_interleave(values.numel())
    rows = torch.zeros(tops.numel(), 64)
    rows[:, 0], rows[:, 5], rows[:, 40] = tops, values.repeat(4), values.repeat(4)
    return torch.cat([spread, rows, torch.zeros(1, 64)])


@pytest.mark.parametrize("kind", [FP4, FP32])
def test_packing_rounds_as_the_codec(kind: Kind) -> None:
    x = _numbers_of_all_sizes()
    packed = torch.from_numpy(fast.pack_rows(F.pad(x, (0, 1)), kind, True)).view(-1, 3, 2, 16)
    packed = (packed.mT if kind is FP4 else packed).reshape(-1, 96)
    expected = F.pad(plain.quantize_activation(x), (0, 32))
    assert torch.equal(packed.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_quantised_activations_are_finite(op: Linear, value: float) -> None:
    x = make_rows(3, 64)
    x[1, 40] = value
    with pytest.raises(FormatError, match="finite"):
        op(x, make_weight("fp8", 8, 64), 3, True)
    dense = op(x, make_weight("fp32", 8, 64), 3, True)
    assert dense[[0, 2]].isfinite().all() and not dense[1].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 9, fast.GEMM_ROWS])
def test_weights_in_a_file_at_odd_places(op: Linear, kind: str, rows: int, tmp_path: Path) -> None:
    weight = make_weight(kind, 21, 96)
    fields = {name: getattr(weight, name) for name in ("tensor", "codes", "packed", "scales") if hasattr(weight, name)}
    moved = {}
    for name, tensor in fields.items():
        file = tmp_path / name
        file.write_bytes(b"-" * 3 + tensor.contiguous().view(torch.uint8).numpy().tobytes() + b"-" * 9)
        integer = {1: np.uint8, 2: np.int16, 4: np.int32}[tensor.element_size()]
        mapped = np.memmap(file, integer, "r+", offset=3, shape=tuple(tensor.shape))
        assert mapped.ctypes.data % 4 == 3
        moved[name] = torch.from_numpy(mapped).view(tensor.dtype)
    x = make_rows(rows, 96)
    assert torch.equal(op(x, type(weight)(**moved), 2, True), op(x, weight, 2, True))


@pytest.mark.skipif(sys.platform != "linux", reason="guards a page with Linux's mprotect")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "n", "k"), legal_cases([(11, 96), (8, 64), (9, 70), (21, 160)]))
def test_nothing_past_a_weight_is_read(kind: str, path: cpu.Path, n: int, k: int) -> None:
    weight = make_weight(kind, n, k)
    fields = {name: getattr(weight, name) for name in ("tensor", "codes", "packed", "scales") if hasattr(weight, name)}
    maps, moved = [], {}
    for name, tensor in fields.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        end = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
        maps.append(mmap.mmap(-1, end + mmap.PAGESIZE))
        maps[-1][end - len(data) : end] = data
        array = np.frombuffer(maps[-1], np.uint8, len(data), end - len(data))
        libc = ctypes.CDLL(None, use_errno=True)
        guard = ctypes.c_void_p(array.ctypes.data + len(data))
        assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        moved[name] = torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
    for rows in (1, 2, 12, fast.GEMM_ROWS + 1):
        x = make_rows(rows, k)
        y = fast.linear(x, type(weight)(**moved), 1, False, path=path)
        assert torch.equal(y, fast.linear(x, weight, 1, False, path=path))


def test_gradients() -> None:
    x = make_rows(6, 40).float().requires_grad_()
    w = torch.randn(9, 40, generator=torch.Generator().manual_seed(5), requires_grad=True)
    upstream = torch.randn(6, 9, generator=torch.Generator().manual_seed(6))
    for native in (False, True):
        got = torch.autograd.grad(plain.linear(x, DenseWeight(w), 2, native), (x, w), upstream)
        expected = torch.autograd.grad(F.linear(x, w), (x, w), upstream)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
    weight = make_weight("fp8", 9, 40)
    (got_x,) = torch.autograd.grad(plain.linear(x, weight, 2, True), x, upstream)
    torch.testing.assert_close(got_x, upstream @ weight.expand())  # straight through the rounding
    with pytest.raises(AssertionError, match="no gradient"):
        fast.linear(x, weight, 2, False)
    with pytest.raises(AssertionError, match="no gradient"):
        fast.linear(x.detach(), DenseWeight(w), 2, False)
    with torch.no_grad():
        assert fast.linear(x, DenseWeight(w), 2, False).shape == (6, 9)


_PEAK = """
import resource, torch
from rorqual.formats.weights import Fp4Weight
from rorqual.ops.fast import linear as fast
from rorqual.ops.fast.row_vectors import FP4, FP32, Kind
from rorqual.ops.reference import linear as plain
def weight(n):
    return Fp4Weight(torch.ones(n, 1024, dtype=torch.uint8), torch.full((n, 64), 127, dtype=torch.uint8))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x, big = torch.ones(80, 2048), weight(32768)
for op in (fast.linear, plain.linear):
    op(x, weight(64), 2, False)
    before = peak()
    y = op(x, big, 2, False)
    print((peak() - before) * 1024 - y.nbytes)
    del y
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB on Linux")
def test_a_weight_is_never_expanded_whole() -> None:
    # 256 MiB expanded. The plain op comes last, since a peak never falls: it holds a tile in several forms.
    command = [sys.executable, "-c", _PEAK]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True, timeout=120)
    fast_peak, plain_peak = map(int, run.stdout.split())
    assert fast_peak < 16 << 20 and plain_peak < 64 << 20
