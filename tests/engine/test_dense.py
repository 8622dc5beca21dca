"""The path without a cache: the same bits as the packed cache, gradients through, documents kept apart."""

import pytest
import torch
from models import golden, random_ids, tiny

from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.dense import Document, dense_forward


@pytest.mark.parametrize("case", ["fp32-text", "fp32-edges", "native-text"])
@pytest.mark.parametrize("tokens", [1, 7, 32, 75])
def test_packed_and_fake_quantised_caches_give_the_same_bits(case: str, tokens: int) -> None:
    model, ids = golden(case), random_ids(tokens, seed=tokens)
    sequence = Sequence(model, new_cache(model, tokens))
    packed = sequence.prefill(Prompt(ids=ids), mode="full", logits_from=0)[-1].logits
    with torch.no_grad():
        (dense,) = dense_forward(model, [Document(ids=ids)])
    assert torch.equal(dense, packed)


def test_documents_of_any_length_do_not_see_each_other() -> None:
    model = golden()
    documents = [Document(ids=random_ids(n, seed=n)) for n in (1, 40, 2, 3, 33)]
    with torch.no_grad():
        together = dense_forward(model, documents)
        for document, logits in zip(documents, together, strict=True):
            (alone,) = dense_forward(model, [document])
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_part_through_the_quantisers() -> None:
    model = tiny()
    with torch.enable_grad():
        model.backbone.norm.requires_grad_(True)
        norms = [layer.attn.kv_norm for layer in (*model.backbone.encoder, *model.backbone.decoder)]
        sources = [
            layer.attn.compressor.norm
            for layer in (*model.backbone.encoder, *model.backbone.decoder)
            if layer.attn.compressor is not None
        ]
        leaves = [*norms, *sources]
        for leaf in leaves:
            leaf.requires_grad_(True)
        try:
            (logits,) = dense_forward(model, [Document(ids=random_ids(48, seed=2))])
            grads = torch.autograd.grad(logits.logsumexp(-1).sum(), leaves)
        finally:
            for leaf in (*leaves, model.backbone.norm):
                leaf.requires_grad_(False)
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in grads)
