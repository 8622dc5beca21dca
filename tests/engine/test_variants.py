"""Every technique off, other shapes of the layer plan, every cache format: the same equalities hold for each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import PAGE, random_ids

from rorqual.checkpoint.random import write_random
from rorqual.config import CacheFormats, ModelConfig, presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache, resume
from rorqual.formats.spec import FORMATS
from rorqual.model.dense import Document, dense_forward
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

TOKENS = 52
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def base() -> ModelConfig:
    return presets.load("tiny").without("vision", "drafts", "engram")


def plan(ratios: list[int], kv: list[int], index: list[int], candidate: int) -> dict[str, Any]:
    return {
        "compress_ratios": tuple(ratios),
        "num_hidden_layers": len(ratios),
        "kv_source_layer_ids": tuple(kv),
        "index_source_layer_ids": tuple(index),
        "candidate_source_layer_id": candidate,
    }


VARIANTS: dict[str, ModelConfig] = {
    "everything on": presets.load("tiny"),
    "no engram": presets.load("tiny").without("engram"),
    "no drafts": presets.load("tiny").without("drafts"),
    "no candidates": base().replace(candidate_source_layer_id=-1),
    "no global cache": base().replace(**plan([0, 0, 0], [], [], -1)),
    "one copy": base().replace(hc_mult=1),
    "no routed experts": base().replace(n_routed_experts=0, num_experts_per_tok=0),
    "no shared expert": base().replace(n_shared_experts=0),
    "no clamp, no yarn": base().replace(swiglu_limit=0.0, rope_scaling=None),
    "sigmoid routing": base().replace(scoring_func="sigmoid", norm_topk_prob=False),
    "softmax routing": base().replace(scoring_func="softmax", gate_temp=2.0),
    "ratio 4, one source, decoder at once": base().replace(**plan([4, 4, 4], [0], [0, 2], 0)),
    "ratios 4, 2 and 1, a source each": base().replace(**plan([0, 4, 2, 1], [1, 2, 3], [1, 2, 3], -1)),
    "candidates from before the seam": base().replace(**plan([0, 2, 2, 2, 2], [1, 3], [1, 3, 4], 1)),
    "the last layer is the decoder": base().replace(**plan([0, 1, 1], [1, 2], [1, 2], -1)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("variants")
    models: dict[str, Transformer] = {}

    def make(name: str, config: ModelConfig) -> Transformer:
        if name not in models:
            path = Path(folder / str(len(models)))
            write_random(config, path, seed=3)
            models[name] = load(path, page_tokens=PAGE, kernels="plain")
        return models[name]

    return make


def last_logits(model: Transformer, ids: torch.Tensor, mode: str, chunk: int | None) -> torch.Tensor:
    sequence = Sequence(model, new_cache(model, len(ids)))
    return sequence.prefill(Prompt(ids=ids), mode=mode, chunk=chunk)[-1].logits[-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_decode_hits_and_the_dense_path_agree(name: str, made: Any) -> None:
    model = made(name, VARIANTS[name])
    ids = random_ids(TOKENS, seed=len(name))
    whole = last_logits(model, ids, "full", None)
    assert whole.isfinite().all() and whole.std() > 0
    torch.testing.assert_close(last_logits(model, ids, "full", 9), whole, **TOLERANCE)
    ced = last_logits(model, ids, "ced", None)
    torch.testing.assert_close(last_logits(model, ids, "ced", 7), ced, **TOLERANCE)
    stepped = Sequence(model, new_cache(model, TOKENS))
    stepped.prefill(Prompt(ids=ids[:33]), mode="full")
    for t in range(33, TOKENS):
        output = stepped.append(ids[t : t + 1])
    torch.testing.assert_close(output.logits[-1], whole, **TOLERANCE)
    with torch.no_grad():
        (dense,) = dense_forward(model, [Document(ids=ids)])
    sequence = Sequence(model, new_cache(model, TOKENS))
    packed = sequence.prefill(Prompt(ids=ids), mode="full", logits_from=0)[-1].logits
    assert torch.equal(dense, packed)
    hit = Sequence(model, new_cache(model, TOKENS))
    hit.prefill(Prompt(ids=ids[:32]), mode="ced")
    resume(hit, Prompt(ids=ids), 32, mode="exact", prefill="ced")
    exact = hit.prefill(Prompt(ids=ids), mode="ced", write_floor=32)[-1].logits[-1]
    torch.testing.assert_close(exact, ced, **TOLERANCE)


FORMATS_OF_CACHES = {
    "release": CacheFormats(),
    "bf16": CacheFormats(main="bf16", index_key="bf16", window="bf16"),
    "fp8 main": CacheFormats(main="e4m3_e8m0_32"),
    "mxfp4 main": CacheFormats(main="e2m1_e8m0_32"),
    "unscaled": CacheFormats(main="e2m1_unscaled", index_key="e2m1_unscaled"),
    "fp32": CacheFormats(main="fp32", index_key="fp32", window="fp32"),
}


@pytest.mark.parametrize("name", FORMATS_OF_CACHES)
@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_layout_cache_and_model_follow_the_cache_formats(name: str, kernels: str, tmp_path: Path) -> None:
    formats = FORMATS_OF_CACHES[name]
    config = presets.load("tiny").replace(cache=formats)
    write_random(config, tmp_path / "m", seed=3)
    model = load(tmp_path / "m", page_tokens=PAGE, kernels=kernels)
    assert model.config.cache == formats
    sequence = Sequence(model, new_cache(model, TOKENS))
    cache = sequence.cache
    assert cache.pages.pool.shape[1] == model.layout.page_bytes
    width = FORMATS[formats.main].row_bytes(config.head_dim) + FORMATS[formats.index_key].row_bytes(
        config.index_head_dim
    )
    entries = sum(PAGE // s.ratio for s in config.kv_sources)
    assert model.layout.page_bytes == entries * width
    ids = random_ids(TOKENS, seed=4)
    logits = sequence.prefill(Prompt(ids=ids), mode="full", logits_from=0)[-1].logits
    with torch.no_grad():
        (dense,) = dense_forward(model, [Document(ids=ids)])
    if kernels == "plain":
        assert torch.equal(logits, dense)
    else:  # another order of summation, so now and then another rounding of a cache entry
        torch.testing.assert_close(logits, dense, rtol=1e-2, atol=1e-2)


def test_finer_caches_are_nearer_to_fp32(tmp_path: Path) -> None:
    ids, logits = random_ids(TOKENS, seed=5), {}
    for name in ("fp32", "bf16", "fp8 main", "release"):
        config = replace(presets.load("tiny"), cache=FORMATS_OF_CACHES[name])
        write_random(config, tmp_path / name, seed=3)
        model = load(tmp_path / name, page_tokens=PAGE, kernels="plain")
        sequence = Sequence(model, new_cache(model, TOKENS))
        logits[name] = sequence.prefill(Prompt(ids=ids), mode="full", logits_from=0)[-1].logits
    gap = {name: float((value - logits["fp32"]).square().mean()) for name, value in logits.items()}
    assert 0 < gap["bf16"] < gap["fp8 main"] and gap["bf16"] < gap["release"]
