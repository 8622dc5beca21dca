"""Fused regions against the ops that they stand for: same bits where all parts are shared, same rows in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rorqual.checkpoint.random import write_random
from rorqual.cli.init import distinct_keys
from rorqual.config import WeightFormats, presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import FormatError
from rorqual.model.forward import forward
from rorqual.model.load import load
from rorqual.model.rope import Rotary
from rorqual.model.rows import Rows
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops import cpu
from rorqual.ops.dispatch import fast_ops, reference_ops

pytestmark = pytest.mark.skipif(
    "avx512f" not in cpu.features(), reason="this CPU has no AVX512: there are no fused regions"
)
GOLDENS = Path(__file__).parents[1] / "goldens"
NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Transformer]:
    made = {n: load(tiny_folder, page_tokens=16, kernels="fast", numerics=n) for n in ("fp32", "native")}
    for model in made.values():
        for layer in layers(model):
            # Far from the text's, so that image rows choose other experts.
            layer.ffn.bias_vl.copy_(torch.linspace(4, -4, layer.ffn.experts))
    return made


def run_of(model: Transformer) -> Run:
    return Run(ops=model.backend.ops(), numerics=model.numerics, kv=None, tap=Tap())  # type: ignore[arg-type]


def some(model: Transformer, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(model.numerics.act_dtype)


def rows_of(model: Transformer, count: int, short: int, image: Tensor | None = None) -> Rows:
    at = torch.arange(100, 100 + count)
    rotary = Rotary(model.backbone.freqs, at, short)
    return Rows(segments=(), positions_T=at, rotary=rotary, short_rows=short, image_T=image)


def alone(rows: Rows, model: Transformer, t: int) -> Rows:
    at = rows.positions_T[t : t + 1]
    image = None if rows.image_T is None else rows.image_T[t : t + 1]
    return replace(rows, positions_T=at, rotary=Rotary(model.backbone.freqs, at, 1), short_rows=1, image_T=image)


def layers(model: Transformer) -> list[torch.nn.Module]:
    return [*model.backbone.encoder, *model.backbone.decoder]


@NUMERICS
def test_projections_give_the_bits_of_the_ops(models: dict[str, Transformer], numerics: str) -> None:
    model = models[numerics]
    for count in (1, 3, 17):
        rows, run = rows_of(model, count, count), run_of(model)
        for layer in layers(model):
            attn = layer.attn
            x = some(model, count, model.config.hidden_size, seed=count)
            o = some(model, count, attn.heads, attn.head_dim, seed=count + 1).float()
            fused, plain = attn.latents(x, rows, run), attn._latents_by_op(x, rows, run)
            assert attn._packed is not None
            for ours, theirs in zip(fused, plain, strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
            kept = o.clone()
            assert torch.equal(attn.project(o, rows, run), attn._project_by_op(o, rows, run))
            assert torch.equal(o, kept), "an input is not written"


@NUMERICS
def test_entering_a_sublayer_gives_the_bits_of_the_ops(models: dict[str, Transformer], numerics: str) -> None:
    model = models[numerics]
    copies, hidden = model.config.hc_mult, model.config.hidden_size
    for count in (1, 5):
        rows, run = rows_of(model, count, count), run_of(model)
        x, out = some(model, count, copies, hidden), some(model, count, hidden, seed=1)
        pre, post, comb = torch.rand(count, copies), torch.rand(count, copies), torch.rand(count, copies, copies)
        for written in (None, (out, post, comb)):
            for layer in layers(model)[:2]:
                for kind in ("attn", "ffn"):
                    fused = layer.enter_sublayer(kind, x, pre, written, rows, run)
                    plain = layer._enter_by_op(kind, x, pre, written, rows, run)
                    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(fused, plain, strict=True))


@NUMERICS
def test_entering_a_sublayer_with_many_rows(models: dict[str, Transformer], numerics: str) -> None:
    """Streams have the bits of the ops, and inputs with them; coefficients differ in last bits."""
    model = models[numerics]
    copies, hidden = model.config.hc_mult, model.config.hidden_size
    for count, short in ((33, 0), (64, 0), (75, 0), (60, 7)):
        rows, run = rows_of(model, count, short), run_of(model)
        x, out = some(model, count, copies, hidden), some(model, count, hidden, seed=1)
        pre, post, comb = torch.rand(count, copies), torch.rand(count, copies), torch.rand(count, copies, copies)
        for written in (None, (out, post, comb)):
            for kind in ("attn", "ffn"):
                layer = layers(model)[1]
                fused = layer.enter_sublayer(kind, x, pre, written, rows, run)
                plain = layer._enter_by_op(kind, x, pre, written, rows, run)
                for ours, theirs in zip(fused[:2], plain[:2], strict=True):
                    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
                for ours, theirs in zip(fused[2:], plain[2:], strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@NUMERICS
def test_leaving_a_layer_with_many_rows_gives_the_bits_of_the_ops(
    models: dict[str, Transformer], numerics: str
) -> None:
    model = models[numerics]
    copies, hidden = model.config.hc_mult, model.config.hidden_size
    layer, run = layers(model)[1], run_of(model)
    watched = replace(run, ops=replace(run.ops, regions=None))
    for count, short in ((33, 0), (75, 0), (60, 7)):
        rows = rows_of(model, count, short)
        x, out = some(model, count, copies, hidden), some(model, count, hidden, seed=1)
        written = out, torch.rand(count, copies), torch.rand(count, copies, copies)
        expected = layer.leave_sublayer(x, written, rows, watched)
        found = layer.leave_sublayer(x, written, rows, run)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@NUMERICS
def test_the_shared_expert_of_many_rows(models: dict[str, Transformer], numerics: str) -> None:
    model, count = models[numerics], 80
    rows, run = rows_of(model, count, 0), run_of(model)
    x, layer = some(model, count, model.config.hidden_size), layers(model)[1].ffn
    watched = replace(run, ops=replace(run.ops, regions=None))
    found, expected = layer._by_op(x, rows, run, "x").float(), layer._by_op(x, rows, watched, "x").float()
    tolerance = 1e-5 if numerics == "fp32" else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@NUMERICS
def test_experts_of_long_rows_do_not_depend_on_short_ones_beside_them(
    models: dict[str, Transformer], numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the other way round, where short rows have no kernel of their own."""
    model, short = models[numerics], 13
    run, x, layer = run_of(model), some(model, 53, model.config.hidden_size), layers(model)[1].ffn
    monkeypatch.setattr(layer, "_packed", None)
    found = layer(x, rows_of(model, 53, short), run, "x")
    assert torch.equal(found[:short], layer(x[:short], rows_of(model, short, short), run, "x"))
    assert torch.equal(found[short:], layer(x[short:], rows_of(model, 40, 0), run, "x"))


@NUMERICS
@pytest.mark.parametrize("image", [False, True])
def test_experts_agree_with_the_ops(models: dict[str, Transformer], numerics: str, image: bool) -> None:
    """To the last bits of exp and log1p, in which the two differ."""
    model, count = models[numerics], 19
    mask = torch.arange(count) % 3 == 0 if image else None
    rows, run = rows_of(model, count, count, mask), run_of(model)
    x = some(model, count, model.config.hidden_size)
    tolerance = 2e-6 if numerics == "fp32" else 2e-2
    for layer in layers(model):
        fused, plain = layer.ffn(x, rows, run, "x").float(), layer.ffn._by_op(x, rows, run, "x").float()
        assert layer.ffn._packed is not None
        torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max()))
        if image:
            text = layer.ffn(x, replace(rows, image_T=None), run, "x").float()
            assert torch.equal(fused[~mask], text[~mask])
            assert not torch.equal(fused[mask], text[mask]), "image rows have a bias of their own"


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sqrtsoftplus"])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_every_way_to_route(models: dict[str, Transformer], scoring: str, limit: float) -> None:
    model = models["fp32"]
    source = model.backbone.encoder[1].ffn
    rows, run, x = rows_of(model, 9, 9), run_of(model), some(model, 9, model.config.hidden_size, seed=4)
    kept = {name: getattr(source, name) for name in ("scoring", "limit", "normalise", "temperature", "_packed")}
    try:
        for normalise, temperature in ((True, 0.5), (False, 1.0)):
            source.scoring, source.limit, source.normalise, source.temperature = scoring, limit, normalise, temperature
            source._packed = run.regions.pack_moe(
                source.gate,
                source.bias,
                source.bias_vl,
                source.w1,
                source.w2,
                source.w3,
                source.shared,
                per_token=source.per_token,
                scoring=scoring,
                temperature=temperature,
                scaling=source.scaling,
                normalise=normalise,
                limit=limit,
            )
            fused, plain = source(x, rows, run, "x"), source._by_op(x, rows, run, "x")
            torch.testing.assert_close(fused, plain, rtol=2e-6, atol=2e-6 * float(plain.abs().max()))
    finally:
        for name, value in kept.items():
            setattr(source, name, value)


def test_ties_go_to_the_lowest_expert(models: dict[str, Transformer]) -> None:
    """With one score for all, the first experts are chosen: the output is that of only those having weights."""
    model = models["fp32"]
    moe, run, rows = model.backbone.encoder[1].ffn, run_of(model), rows_of(model, 2, 2)
    x = torch.zeros(2, model.config.hidden_size)
    x[1] = some(model, model.config.hidden_size)
    index, _ = moe.route(x[:1], rows_of(model, 1, 1), run, "x")
    order = sorted(range(moe.experts), key=lambda e: (-float(moe.bias[e]), e))[: moe.per_token]
    assert index[0].tolist() == order
    fused, plain = moe(x, rows, run, "x"), moe._by_op(x, rows, run, "x")
    torch.testing.assert_close(fused, plain, rtol=2e-6, atol=2e-6)


@NUMERICS
def test_a_rows_bits_are_its_own(models: dict[str, Transformer], numerics: str) -> None:
    """Alone, in a batch, and beside rows that are no short ones (DESIGN 12)."""
    model, count, short = models[numerics], 80, 6
    run, rows = run_of(model), rows_of(model, count, short)
    config = model.config
    x, stream = some(model, count, config.hidden_size), some(model, count, config.hc_mult, config.hidden_size, seed=2)
    pre = torch.rand(count, config.hc_mult, generator=torch.Generator().manual_seed(5))
    for layer in layers(model)[1:3]:
        o = some(model, count, layer.attn.heads, layer.attn.head_dim, seed=9).float()
        whole = (
            *layer.attn.latents(x, rows, run),
            layer.attn.project(o, rows, run),
            layer.ffn(x, rows, run, "x"),
            *layer.enter_sublayer("attn", stream, pre, None, rows, run),
        )
        assert all(len(part) == count for part in whole)
        for t in range(short):
            own, cut = alone(rows, model, t), slice(t, t + 1)
            single = (
                *layer.attn.latents(x[cut], own, run),
                layer.attn.project(o[cut], own, run),
                layer.ffn(x[cut], own, run, "x"),
                *layer.enter_sublayer("attn", stream[cut], pre[cut], None, own, run),
            )
            assert all(torch.equal(a, b[cut]) for a, b in zip(single, whole, strict=True))


@NUMERICS
def test_decoding_agrees_with_the_ops(
    models: dict[str, Transformer], numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, tokens, a verification of several rows, and a token beside another sequence's prefill."""
    model = models[numerics]
    ids = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(1))

    def run() -> Tensor:
        cache = new_cache(model, 96, slots=2)
        first, second = Sequence(model, cache, slot=0), Sequence(model, cache, slot=1)
        found = [first.prefill(Prompt(ids=ids[:41]), mode="full")[-1].logits]
        found += [first.append(ids[i : i + 1]).logits for i in range(41, 48)]
        found.append(first.append(ids[48:53], logits_from=0).logits)
        steps = [first.step(ids[53:54]), second.step(ids[:70])]
        for output, sequence, step in zip(forward(model, cache, steps), (first, second), steps, strict=True):
            sequence.ran(step, output)
            found.append(output.logits)
        assert all(logits is not None for logits in found)
        return torch.cat([logits for logits in found if logits is not None])

    fused = run()
    monkeypatch.setattr(Run, "regions", None)
    plain = run()
    assert fused.isfinite().all()
    tolerance = 1e-4 if numerics == "fp32" else 5e-2
    torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance * float(plain.abs().max()))


@pytest.mark.parametrize("case", ["fp32-text", "native-text"])
def test_a_watched_golden_run_has_the_logits_of_one_that_nobody_watches(case: str) -> None:
    """Goldens are compared with what a tap sees, and a tap sees the ops: so the regions must say the same."""
    numerics = case.split("-")[0]
    model = load(GOLDENS / case, page_tokens=16, kernels="fast", numerics=numerics)
    ids, found = torch.arange(3, 43), []
    for tap in (None, Everything()):
        sequence = Sequence(model, new_cache(model, 64))
        sequence.prefill(Prompt(ids=ids[:30]), tap=tap)
        found.append(torch.cat([sequence.append(ids[i : i + 1], tap=tap).logits for i in range(30, 40)]).float())
    tolerance = 1e-5 if numerics == "fp32" else 3e-2
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance * float(found[1].abs().max()))


class Everything(Tap):
    """Watches and changes nothing."""

    active = True


def test_what_native_cannot_quantise_is_named(models: dict[str, Transformer]) -> None:
    model = models["native"]
    layer, run, rows = model.backbone.encoder[1], run_of(model), rows_of(model, 2, 2)
    x = some(model, 2, model.config.hidden_size)
    x[1, 5] = torch.inf
    for region in (
        lambda: layer.ffn(x, rows, run, "x"),
        lambda: layer.attn.latents(x, rows, run),
        lambda: layer.attn.project(torch.full((2, layer.attn.heads, layer.attn.head_dim), torch.nan), rows, run),
    ):
        with pytest.raises(FormatError, match="every value must be finite"):
            region()


@pytest.mark.parametrize("weights", [WeightFormats(dense="bf16", experts="bf16", engram="bf16"), None])
def test_formats_without_regions_go_by_op(tmp_path: Path, weights: WeightFormats | None) -> None:
    config = presets.load("tiny").without("vision")
    config = config.replace(weights=weights) if weights else config.without("shared_expert")
    write_random(config, tmp_path / "m", 3, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    model = load(tmp_path / "m", page_tokens=16, kernels="fast")
    sequence = Sequence(model, new_cache(model, 32))
    sequence.prefill(Prompt(ids=torch.arange(3, 13)))
    assert sequence.append(torch.tensor([7])).logits is not None
    assert all(layer.ffn._packed is None for layer in layers(model))
    assert all((layer.attn._packed is None) == (weights is not None) for layer in layers(model))


def test_other_paths_have_no_regions() -> None:
    assert fast_ops("plain").regions is None and reference_ops().regions is None
