"""The learner against the readable forward pass, and what must not depend on how a step is cut."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from rorqual.model.dense import Document, dense_forward
from rorqual.training.batch import IGNORE, Packed, micro_batches
from rorqual.training.learner import Phase, Totals
from rorqual.training.learner_v41 import V41Learner
from rorqual.training.objective import expert_loads
from tests.training.models import gradients, learner, packed

PHASES = [Phase(), Phase(quantise_caches=False), Phase(quantise_weights=True)]


def reference_losses(made: V41Learner, sequence: Packed, phase: Phase) -> torch.Tensor:
    """Through `dense_forward`: tiles of the inference indexer, no masks, no packing."""
    made.rounding.turn(phase.quantise_weights)
    documents = [Document(ids=sequence.ids[a:b]) for a, b in sequence.pieces()]
    with torch.no_grad():
        logits = torch.cat(dense_forward(made.model, documents, quantise=phase.quantise_caches))
    return F.cross_entropy(logits, sequence.targets, ignore_index=IGNORE, reduction="none")


@pytest.mark.parametrize("phase", PHASES, ids=["caches", "plain", "weights"])
@pytest.mark.parametrize("fast", [False, True])
def test_losses_are_those_of_the_readable_forward(phase: Phase, fast: bool) -> None:
    made = learner(3, fast=fast)
    shapes = [[70], [33, 40], [1, 2, 64, 3]]
    batch = [packed(shape, number) for number, shape in enumerate(shapes)]
    for sequence, ours in zip(batch, made.token_losses(batch, phase), strict=True):
        theirs = reference_losses(made, sequence, phase)
        # A rounding of an entry, or a selection, that hangs on the last bit moves a few rows.
        close = (ours - theirs).abs() < 1e-3
        assert close.float().mean() > 0.9, (ours - theirs).abs().max()
        assert (ours - theirs).abs().mean() < 2e-3


def test_without_caches_every_loss_agrees() -> None:
    made, phase = learner(5), Phase(quantise_caches=False)
    sequence = packed([90])
    torch.testing.assert_close(
        made.token_losses([sequence], phase)[0], reference_losses(made, sequence, phase), atol=2e-4, rtol=0
    )


def test_documents_do_not_see_each_other() -> None:
    made, phase = learner(1), Phase(quantise_caches=False)
    together = packed([17, 30, 21])
    alone = [
        Packed(ids=together.ids[a:b], targets=together.targets[a:b], starts=(0,), number=9)
        for a, b in together.pieces()
    ]
    joined = torch.cat(made.token_losses(alone, phase))
    torch.testing.assert_close(made.token_losses([together], phase)[0], joined, atol=2e-4, rtol=0)
    changed = together.ids.clone()
    changed[:17] = (changed[:17] + 7) % 400 + 3
    other = made.token_losses([replace(together, ids=changed)], phase)[0]
    torch.testing.assert_close(other[17:], joined[17:], atol=2e-4, rtol=0)
    assert (other[:16] - joined[:16]).abs().max() > 1e-3


@pytest.mark.parametrize("fast", [False, True])
def test_pieces_of_length_0_to_3_have_finite_gradients(fast: bool) -> None:
    """Field case 58."""
    made = learner(fast=fast)
    batch = [packed([0, 1, 2, 3, 0, 5]), packed([1], 1), packed([2], 2), packed([3], 3), packed([40], 4)]
    phase = Phase(replay=1.0, quantise_weights=True)
    loss = made.loss(batch, phase, Totals(tokens=sum(p.trained for p in batch), sequences=len(batch)))
    loss.total.backward()
    assert torch.isfinite(loss.total) and all(torch.isfinite(torch.tensor(v)) for v in loss.parts.values())
    assert all(torch.isfinite(g).all() for g in gradients(made).values())


def test_every_parameter_learns() -> None:
    made = learner()
    batch = [packed([120], n) for n in range(4)]
    made.loss(batch, Phase(), Totals(tokens=480, sequences=4)).total.backward()
    still = [n for n, g in gradients(made).items() if made.parameters[n].requires_grad and not g.any()]
    experts = [n for n in still if ".experts." in n]
    assert still == experts and len(experts) < 40, [n for n in still if n not in experts]


def test_the_indexer_learns_apart() -> None:
    """Its loss moves its own tensors only, and nothing else moves them (SPEC 5: a selection has no gradient)."""
    batch, totals, phase = [packed([80])], Totals(tokens=79, sequences=1), Phase(draft=False)
    found = []
    for weight in (0.0, 5.0):
        made = learner(balance=0.0, indexer=weight)
        made.loss(batch, phase, totals).total.backward()
        found.append(gradients(made))
    for name, grad in found[0].items():
        if ".indexer." in name:
            assert not grad.any() and found[1][name].any(), name
        else:
            torch.testing.assert_close(grad, found[1][name], atol=1e-6, rtol=1e-5, msg=name)


def test_cutting_a_step_changes_nothing() -> None:
    """Field case 59: accumulation 1 x 4 and 4 x 1 give the same loss and the same gradients."""
    batch = [packed([48, 20], n) for n in range(4)]
    totals, phase = Totals(tokens=sum(p.trained for p in batch), sequences=4), Phase(replay=0.5)
    found = []
    for tokens in (10_000, 68):
        made = learner(2)
        parts: dict[str, float] = {}
        cuts = micro_batches(batch, tokens)
        assert len(cuts) == (1 if tokens > 1000 else 4)
        loads: dict[str, torch.Tensor] = {}
        for cut in cuts:
            loss = made.loss(cut, phase, totals)
            loss.total.backward()
            for name, value in loss.parts.items():
                parts[name] = parts.get(name, 0.0) + value
            for name, load in loss.loads.items():
                loads[name] = loads.get(name, torch.zeros_like(load)) + load
        found.append((parts, gradients(made), loads))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][name], atol=3e-6, rtol=1e-3, msg=name)
    assert {n: v.tolist() for n, v in found[0][2].items()} == {n: v.tolist() for n, v in found[1][2].items()}


def test_fast_and_plain_learners_agree() -> None:
    batch, totals = [packed([50, 14], n) for n in range(2)], Totals(tokens=124, sequences=2)
    phase = Phase(quantise_caches=False, replay=1.0)
    found = []
    for fast in (False, True):
        made = learner(4, fast=fast)
        loss = made.loss(batch, phase, totals)
        loss.total.backward()
        found.append((loss.parts, gradients(made)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for name, grad in found[0][1].items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(found[1][1][name], grad, atol=2e-3 * scale + 1e-7, rtol=2e-3, msg=name)


def test_router_bias_follows_the_load() -> None:
    made = learner(bias_rate=0.01)
    made.after_step({"layers.2": torch.tensor([10, 0, 5, 5, 5, 5])})
    assert made.parameters["layers.2.ffn.gate.bias"].tolist() == pytest.approx([-0.01, 0.01, 0, 0, 0, 0])
    batch = [packed([30])]
    loss = made.loss(batch, Phase(draft=False), Totals(tokens=29, sequences=1))
    assert loss.loads["layers.2"].sum() == 30 * made.config.num_experts_per_tok
    assert set(loss.loads) == {f"layers.{i}" for i in range(made.config.num_hidden_layers)}
    assert expert_loads([]) == {}


def test_dense_phase_reads_every_visible_group() -> None:
    """Before `sparse_from` the Top-K does not act: with more groups than it holds, losses differ from the sparse ones,
    and a Top-K and a pool wide enough for all give the dense ones."""
    made = learner(6)
    sequence = packed([100])
    dense, sparse = (made.token_losses([sequence], Phase(quantise_caches=False, sparse=on))[0] for on in (False, True))
    assert (dense - sparse).abs().max() > 1e-4
    made.config = made.config.replace(index_topk=1000, candidate_topk_blocks=1000)
    wide = made.token_losses([sequence], Phase(quantise_caches=False, sparse=True))[0]
    torch.testing.assert_close(wide, dense, atol=1e-6, rtol=0)
