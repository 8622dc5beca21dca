"""Gradients that are not there: an expert without a row has none, an Engram table's is sparse.

An optimiser takes no step for a parameter whose `grad` is None. A gradient of zeros is another thing: momentum and
weight decay would go on moving experts that no token reached.
"""

from functools import cache

import pytest
import torch

from rorqual.training.learner import Phase, StepLoss, Totals
from rorqual.training.learner_v41 import V41Learner
from tests.training.models import learner, packed

IDLE = {"layers.0": (1,), "layers.2": (0, 5), "layers.5": (3,), "mtp.0": (2,), "mtp.2": (0, 1)}
"""Experts that a low router bias keeps rows from; others may go without for want of rows."""


@cache
def stepped(phase: Phase, fast: bool) -> tuple[V41Learner, StepLoss]:
    made = learner(fast=fast, anchors=1.0)
    with torch.no_grad():
        for name, experts in IDLE.items():
            made.parameters[f"{name}.ffn.gate.bias"][list(experts)] = -100.0
    sequence = packed([24])
    loss = made.loss([sequence], phase, Totals(tokens=sequence.trained, sequences=1))
    loss.total.backward()
    return made, loss


@pytest.mark.parametrize("draft", [False, True], ids=["backbone", "draft"])
@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "quantised"])
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_just_the_experts_without_a_row_have_no_gradient(fast: bool, quantised: bool, draft: bool) -> None:
    made, loss = stepped(Phase(quantise_weights=quantised, draft=draft), fast)
    layers = [f"layers.{i}" for i in range(made.config.num_hidden_layers)]
    drafts = [f"mtp.{i}" for i in range(made.config.num_nextn_predict_layers)]
    assert set(loss.loads) == {*layers, *drafts} if draft else set(loss.loads) == set(layers)
    for name, experts in IDLE.items():
        assert name not in loss.loads or not loss.loads[name][list(experts)].any(), name
    for layer in (*layers, *drafts):
        # Without the draft's losses nothing was routed in its layers, and none of their experts has a gradient.
        idle = {e for e, rows in enumerate(loss.loads[layer].tolist()) if not rows} if layer in loss.loads else None
        weights = [name for name in made.parameters if name.startswith(f"{layer}.ffn.experts.")]
        assert len(weights) % 3 == 0 and weights
        for name in weights:
            expert = int(name.removeprefix(f"{layer}.ffn.experts.").split(".")[0])
            without = idle is None or expert in idle
            assert (made.parameters[name].grad is None) == without, (name, loss.loads.get(layer))
    assert any(load.all() for load in loss.loads.values()), "in some layer every expert had rows"


@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "quantised"])
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast"])
def test_gradients_of_engram_tables_are_sparse(fast: bool, quantised: bool) -> None:
    """Dense, they would cost memory and a step of all rows; of a table most rows are not in a batch."""
    made, _ = stepped(Phase(quantise_weights=quantised, draft=False), fast)
    tables = [name for name in made.parameters if name.endswith("engram.embed.weight")]
    assert len(tables) == len(made.config.engram_layer_ids) == 2
    for name in tables:
        grad = made.parameters[name].grad
        assert grad is not None and grad.is_sparse, name
        touched = grad.coalesce()
        assert 0 < touched.indices().shape[1] < len(made.parameters[name]) and touched.values().any(), name
    others = [n for n, p in made.parameters.items() if n not in tables and p.grad is not None and p.grad.is_sparse]
    assert not others
