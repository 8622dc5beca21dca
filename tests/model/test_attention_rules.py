"""Field case 27, and the other rules of SPEC 5 that an implementation of another model would get wrong."""

from pathlib import Path

import pytest
import torch

from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.formats.weights import DenseWeight
from rorqual.model.compressor import Compressor
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.ops.reference.rope import rotate

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def model() -> Transformer:
    return load(GOLDENS / "fp32-text", page_tokens=16, kernels="plain")


def logits(model: Transformer, count: int = 40) -> torch.Tensor:
    sequence = Sequence(model, new_cache(model, count))
    return sequence.prefill(Prompt(ids=torch.arange(3, 3 + count)), mode="full")[-1].logits[-1]


def test_there_is_no_norm_on_q_after_its_up_projection(model: Transformer) -> None:
    """With a norm, the scale of Wq_b would not matter."""
    before = logits(model)
    attention = model.backbone.encoder[0].attn
    attention.wq_b = DenseWeight(attention.wq_b.expand() * 3)
    assert (logits(model) - before).abs().max() > 1e-3


def test_the_compressor_has_a_softmax_a_channel(model: Transformer) -> None:
    """Channel 0 prefers the first token of a group, channel 1 the second; one softmax a token could not do both."""
    compressor = next(layer.attn.compressor for layer in model.backbone.encoder if layer.attn.compressor is not None)
    kv = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    score = torch.tensor([[50.0, -50.0], [-50.0, 50.0]])
    assert isinstance(compressor, Compressor)
    torch.testing.assert_close(compressor._pool(kv, score, 0), torch.tensor([[1.0, 2.0]]))


def test_groups_that_a_start_falls_into_are_left_out(model: Transformer) -> None:
    compressor = next(layer.attn.compressor for layer in model.backbone.encoder if layer.attn.compressor is not None)
    kv = torch.arange(10.0).view(5, 2)
    pooled = compressor._pool(kv, torch.zeros(5, 2), 7)
    torch.testing.assert_close(pooled, torch.tensor([[3.0, 4.0], [7.0, 8.0]]))


def test_rotation_is_of_adjacent_pairs_on_the_trailing_channels() -> None:
    x = torch.tensor([[9.0, 8.0, 1.0, 0.0, 0.0, 2.0]])
    angles = torch.tensor([[torch.pi / 2, torch.pi]])
    cos_sin = angles.cos(), angles.sin()
    turned = rotate(x, cos_sin)
    torch.testing.assert_close(turned, torch.tensor([[9.0, 8.0, 0.0, 1.0, 0.0, -2.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(rotate(turned, cos_sin, inverse=True), x, atol=1e-6, rtol=0)


def test_the_sink_takes_weight_and_is_not_scaled(model: Transformer) -> None:
    before = logits(model)
    attention = model.backbone.encoder[0].attn
    attention.sink = attention.sink + 100
    silent = logits(model)
    assert (silent - before).abs().max() > 1e-3
    attention.wo_b = DenseWeight(torch.zeros_like(attention.wo_b.expand()))
    torch.testing.assert_close(logits(model), silent, rtol=1e-4, atol=1e-4)
