"""The baseline computes what the plain twins compute, on weights that nothing expands any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.bench.baseline import ExpandedWeight, baseline_ops, expand_model, expanded, load_baseline
from rorqual.bench.inputs import random_region, random_weight
from rorqual.bench.model import BARS, judged
from rorqual.bench.report import Bar, TimeRow
from rorqual.bench.roofline import Roofline, Work
from rorqual.bench.timing import Sample
from rorqual.checkpoint.random import write_random
from rorqual.cli.bench import show
from rorqual.config import presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.formats.codec import quantize
from rorqual.formats.spec import E2M1_E4M3_16, E2M1_E8M0_32
from rorqual.formats.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight
from rorqual.model.load import load
from rorqual.model.numerics import MODES
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import reference_ops
from rorqual.ops.paged import PagedRegion


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("baseline") / "tiny"
    write_random(presets.load("tiny"), made, seed=5)
    return made


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["fp4", "fp8", "dense"])
def test_an_expanded_weight_multiplies_as_the_packed_one(kind: str, native: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight: Weight = DenseWeight(torch.randn(1100, 64, generator=generator).to(torch.bfloat16))
    if kind != "dense":
        weight = random_weight(kind, (1100, 64), generator)
    dense, x = expanded(weight), torch.randn(5, 64, generator=generator)
    assert dense.shape == weight.shape and dense.nbytes == 4 * 1100 * 64
    ops = reference_ops()
    for short in (0, 2, 5):
        assert torch.equal(ops.linear(x, dense, short, native), ops.linear(x, weight, short, native))
    # The input is quantised for the one kind of weight and not for the other.
    quantised = not torch.equal(ops.linear(x, dense, 0, True), ops.linear(x, dense, 0, False))
    assert quantised == (kind != "dense")


def test_nothing_is_expanded_again(folder: Path) -> None:
    model = expand_model(load(folder, kernels="plain"))
    held = [value for module in model.modules() for value in vars(module).values()]
    flat = [one for value in held for one in (value if isinstance(value, list) else [value])]
    assert not any(isinstance(one, Fp4Weight | Fp8Weight) for one in flat)
    made = [one for one in flat if isinstance(one, ExpandedWeight | DenseWeight)]
    assert sum(isinstance(one, ExpandedWeight) for one in made) > 100
    assert all(one.tensor.dtype == torch.float32 and one.expand().data_ptr() == one.tensor.data_ptr() for one in made)


@pytest.mark.parametrize("numerics", MODES)
def test_a_model_with_expanded_weights_gives_the_same_bits(folder: Path, numerics: str) -> None:
    plain = load(folder, numerics=numerics, kernels="plain")
    assert torch.equal(logits(expand_model(load(folder, numerics=numerics, kernels="plain"))), logits(plain))


Call = tuple[Tensor, Tensor, Tensor, int, int, int, PagedRegion, Tensor, Tensor, Tensor, float, bool]


def attention_call(rows: int, entries: int, chosen: int, native: bool, held: int) -> Call:
    """4 heads x 32, a window of 16 whose floor cuts into it; a third of the groups absent, row 0 without any."""
    generator = torch.Generator().manual_seed(rows + chosen)
    region, table = random_region(E2M1_E4M3_16, 32, entries, generator)
    positions = torch.arange(40, 40 + rows)
    topk = torch.randint(0, entries, (rows, chosen), generator=generator)
    topk[torch.rand(rows, chosen, generator=generator) < 0.3] = -1
    topk[0] = -1
    q, near = torch.randn(rows, 4, 32, generator=generator), torch.randn(held, 32, generator=generator)
    sink, base = torch.randn(4, generator=generator), 40 + rows - held
    return q, positions, near, base, max(base, 30), 16, region, table, topk, sink, 0.2, native


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("held", [0, 3, 20])
@pytest.mark.parametrize(("rows", "entries", "chosen"), [(1, 512, 8), (5, 64, 16), (300, 64, 16), (4, 16, 0)])
def test_batched_attention_is_attention(rows: int, entries: int, chosen: int, held: int, native: bool) -> None:
    call = attention_call(rows, entries, chosen, native, held)
    found, wanted = baseline_ops().sparse_attention(*call), reference_ops().sparse_attention(*call)
    bound = (2**-8 if native else 2e-6) * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=bound)
    assert held < 20 or float(wanted.abs().max()) > 0.1
    assert held > 0 or not found[0].any()


def test_batched_attention_without_groups_is_attention() -> None:
    q, positions, near, base, floor, window, _, _, _, *rest = attention_call(9, 16, 0, False, 24)
    call = (q, positions, near, base, floor, window, None, None, None, *rest)
    found, wanted = baseline_ops().sparse_attention(*call), reference_ops().sparse_attention(*call)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("rows", "entries", "asked"), [(1, 512, 40), (70, 64, 40), (2, 64, 0)])
def test_batched_scores_are_the_scores(rows: int, entries: int, asked: int, native: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    region, table = random_region(E2M1_E8M0_32, 64, entries, generator)
    query = quantize(torch.randn(rows, 8, 64, generator=generator), E2M1_E8M0_32)
    index = torch.randint(0, entries, (rows, asked), generator=generator)
    index[torch.rand(rows, asked, generator=generator) < 0.3] = -1
    call = *query, torch.randn(rows, 8, generator=generator), region, table, index, native
    found, wanted = baseline_ops().index_scores_at(*call), reference_ops().index_scores_at(*call)
    assert torch.equal(found == -torch.inf, index == -1)
    torch.testing.assert_close(found, wanted, rtol=2**-6 if native else 1e-5, atol=0.5 if native else 1e-4)


def test_the_baseline_is_the_model(folder: Path) -> None:
    found, wanted = logits(load_baseline(folder, "fp32")), logits(load(folder, kernels="plain"))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def logits(model: Transformer) -> Tensor:
    """Of a prompt in two chunks, and of three decoded tokens."""
    ids = torch.arange(3, 43)
    sequence = Sequence(model, new_cache(model, 64))
    outputs = sequence.prefill(Prompt(ids=ids), mode="full", chunk=24, logits_from=0)
    outputs += [sequence.append(token[None]) for token in ids[:3]]
    found = [output.logits for output in outputs if output.logits is not None]
    assert len(found) == len(outputs)
    return torch.cat(found)


ROOFLINE = Roofline(read_bytes_per_s=100.0, read_bytes=1, gemm_flops_per_s=100.0, gemm_side=1)


def row(name: str, plain_s: float, fast_s: float, numerics: str = "fp32") -> TimeRow:
    work, own = (Work(bytes=count, flops=0, formula="bytes") for count in (100, 600))
    times = {"plain": Sample.of([plain_s]), "fast": Sample.of([fast_s])}
    return TimeRow(name=name, shape="1", times=times, work=work, baseline_work=own, extra={"numerics": numerics})


def test_a_row_says_whether_its_baseline_is_fair(capsys: pytest.CaptureFixture[str]) -> None:
    fair: Any = judged(row("decode", 8.0, 2.0), "real-pair").as_json(ROOFLINE)
    assert fair["bar"] == {"at_least": 3, "reached": True}
    assert fair["roofline"]["share"] == 0.5 and fair["roofline"]["bar"] == {"at_least": 0.45, "reached": True}
    assert fair["baseline_roofline"]["share"] == 0.75
    assert fair["baseline_roofline"]["bar"] == {"at_least": 0.6, "reached": True}
    slow: Any = judged(row("decode", 12.0, 2.5), "real-pair").as_json(ROOFLINE)
    assert [slow[key]["bar"]["reached"] for key in ("roofline", "baseline_roofline")] == [False, False]
    document = {"rows": [fair, slow], "command": "c", "machine": {}, "roofline": {}, "notes": []}
    show(document)
    out = capsys.readouterr().out
    assert "4 >= 3: reached; share 50.0% >= 45%: reached; baseline 75.0% >= 60%: fair" in out
    assert "share 40.0% >= 45%: MISSED; baseline 50.0% >= 60%: NOT FAIR" in out


def test_only_fp32_of_the_two_presets_is_judged() -> None:
    assert judged(row("decode", 1, 1), "mid").bar == Bar(at_least=7.5)
    assert judged(row("prefill full", 1, 1), "mid").baseline_bar == Bar(at_least=0.07)
    assert judged(row("prefill full", 1, 1), "real-pair").share_bar == Bar(at_least=0.55)
    for name, numerics, preset in (("decode", "native", "mid"), ("decode", "fp32", "tiny"), ("decode", "fp32", None)):
        plain = judged(row(name, 1, 1, numerics), preset)
        assert plain.bar is plain.share_bar is plain.baseline_bar is None
    assert "bar" not in judged(row("decode", 1, 1), "mid").as_json(ROOFLINE, judged=False)
    assert set(BARS) == {"mid", "real-pair"}
