"""The fused Engram write against the ops that it stands for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.table import EngramTable
from rorqual.cli.init import distinct_keys
from rorqual.config import WeightFormats, presets
from rorqual.errors import CheckpointError, FormatError
from rorqual.model.engram import Engram
from rorqual.model.load import load
from rorqual.model.rope import Rotary
from rorqual.model.rows import Rows
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops import cpu

pytestmark = pytest.mark.skipif(
    "avx512f" not in cpu.features(), reason="this CPU has no AVX512: there are no fused regions"
)
NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Transformer]:
    return {n: load(tiny_folder, page_tokens=16, kernels="fast", numerics=n) for n in ("fp32", "native")}


def engrams(model: Transformer) -> list[Engram]:
    found = [layer.engram for layer in (*model.backbone.encoder, *model.backbone.decoder)]
    return [engram for engram in found if engram is not None]


def run_of(model: Transformer) -> Run:
    return Run(ops=model.backend.ops(), numerics=model.numerics, kv=None, tap=Tap())  # type: ignore[arg-type]


def rows_of(model: Transformer, count: int, short: int, image: Tensor | None = None) -> Rows:
    """Look-ups among the rows that every table has."""
    assert model.ngram is not None
    at, seed = torch.arange(count), torch.Generator().manual_seed(count)
    least = min(engram.table.shape[0] for engram in engrams(model))
    columns = engrams(model)[0].wkv.shape[1] // engrams(model)[0].table.shape[1]
    index = torch.randint(0, least, (count, len(engrams(model)), columns), generator=seed)
    rotary = Rotary(model.backbone.freqs, at, short)
    return Rows(segments=(), positions_T=at, rotary=rotary, short_rows=short, image_T=image, engram_TLE=index)


def streams(model: Transformer, count: int, seed: int = 0) -> Tensor:
    shape = count, model.config.hc_mult, model.config.hidden_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.numerics.act_dtype)


def close(fused: Tensor, plain: Tensor) -> None:
    """To the last bits of the gate; in native these move a sum to the neighbouring bf16."""
    assert fused.dtype == plain.dtype
    tolerance = 2e-6 if fused.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(fused.float(), plain.float(), rtol=tolerance, atol=tolerance)
    assert float((fused == plain).float().mean()) > 0.9


@NUMERICS
@pytest.mark.parametrize("image", [False, True])
def test_the_write_agrees_with_the_ops(models: dict[str, Transformer], numerics: str, image: bool) -> None:
    model = models[numerics]
    for count in (1, 2, 19):
        mask = torch.arange(count) % 3 == 0 if image else None
        rows, run, x = rows_of(model, count, count, mask), run_of(model), streams(model, count)
        kept = x.clone()
        for engram in engrams(model):
            fused, plain = engram(x, rows, run, "x"), engram._by_op(x, rows, run, "x")
            assert engram._packed is not None
            close(fused, plain)
            assert torch.equal(x, kept), "an input is not written"
            assert torch.equal(fused, x) == (mask is not None and bool(mask.all()))
            if mask is not None:
                assert torch.equal(fused[mask], x[mask]), "images get nothing"


@NUMERICS
def test_a_rows_bits_are_its_own(models: dict[str, Transformer], numerics: str) -> None:
    model, count, short = models[numerics], 50, 7
    rows, run, x = rows_of(model, count, short), run_of(model), streams(model, count)
    for engram in engrams(model):
        whole = engram(x, rows, run, "x")
        assert whole.shape == x.shape
        close(whole, engram._by_op(x, rows, run, "x"))
        for t in range(short):
            cut = slice(t, t + 1)
            assert rows.engram_TLE is not None
            own = replace(rows, positions_T=rows.positions_T[cut], short_rows=1, engram_TLE=rows.engram_TLE[cut])
            assert torch.equal(engram(x[cut], own, run, "x"), whole[cut])


@NUMERICS
def test_an_empty_stream_opens_the_gate_by_half(models: dict[str, Transformer], numerics: str) -> None:
    model = models[numerics]
    rows, run, engram = rows_of(model, 2, 2), run_of(model), engrams(model)[0]
    x = torch.zeros_like(streams(model, 2))
    assert torch.equal(engram(x, rows, run, "x"), engram._by_op(x, rows, run, "x"))


def test_a_nan_of_the_stream_stays_in_its_copy(models: dict[str, Transformer]) -> None:
    model = models["fp32"]
    rows, run, engram, x = rows_of(model, 2, 2), run_of(model), engrams(model)[0], streams(model, 2)
    x[1, 2, 5] = torch.nan
    fused, plain = engram(x, rows, run, "x"), engram._by_op(x, rows, run, "x")
    assert torch.equal(fused.isnan(), plain.isnan())
    assert fused[1, 2].isnan().all() and not fused[0].isnan().any()


def test_a_row_that_may_not_be_read_is_named(models: dict[str, Transformer]) -> None:
    model = models["fp32"]
    engram, run, x = engrams(model)[0], run_of(model), streams(model, 2)
    rows, table, packed = rows_of(model, 2, 2), engram.table, engram._packed
    assert table.packed is not None and rows.engram_TLE is not None
    codes, scales = (part.clone() for part in table.packed)
    scales[int(rows.engram_TLE[1, engram.column, 0]), 0] = 255
    outside = replace(rows, engram_TLE=torch.full_like(rows.engram_TLE, table.shape[0]))
    try:
        with pytest.raises(AssertionError, match="row ids"):
            engram(x, outside, run, "x")
        engram.table = EngramTable(codes, scales)
        engram._packed = run.regions.pack_engram(  # type: ignore[union-attr]
            (codes, scales), engram.wkv, engram.q_weight, engram.k_weight, eps=engram.eps
        )
        with pytest.raises(CheckpointError, match="scale byte 255"):
            engram(x, rows, run, "x")
    finally:
        engram.table, engram._packed = table, packed


def test_what_native_cannot_quantise_is_named(models: dict[str, Transformer]) -> None:
    model = models["native"]
    engram, run, x, rows = engrams(model)[0], run_of(model), streams(model, 2), rows_of(model, 2, 2)
    table, packed = engram.table, engram._packed
    assert table.packed is not None and rows.engram_TLE is not None
    codes, scales = (part.clone() for part in table.packed)
    codes[int(rows.engram_TLE[0, engram.column, 1]), 3] = 0x7F
    try:
        engram.table = EngramTable(codes, scales)
        engram._packed = run.regions.pack_engram(  # type: ignore[union-attr]
            (codes, scales), engram.wkv, engram.q_weight, engram.k_weight, eps=engram.eps
        )
        with pytest.raises(FormatError, match="every value must be finite"):
            engram(x, rows, run, "x")
    finally:
        engram.table, engram._packed = table, packed


def test_formats_without_a_region_go_by_op(tmp_path: Path) -> None:
    config = presets.load("tiny").without("vision")
    config = config.replace(weights=WeightFormats(dense="bf16", experts="bf16", engram="bf16"))
    write_random(config, tmp_path / "m", 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    model = load(tmp_path / "m", page_tokens=16, kernels="fast")
    rows, run, x = rows_of(model, 3, 3), run_of(model), streams(model, 3)
    for engram in engrams(model):
        assert torch.equal(engram(x, rows, run, "x"), engram._by_op(x, rows, run, "x"))
        assert engram._packed is None
