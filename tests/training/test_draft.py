"""The draft's losses: the path that trains is the path that drafts, nothing reaches the backbone, sums add up."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rorqual.checkpoint.random import write_random
from rorqual.config import CacheFormats, WeightFormats, presets
from rorqual.engine.sequence import new_cache
from rorqual.formats.weights import DenseWeight
from rorqual.inventory.names import expected_tensors
from rorqual.model.load import load
from rorqual.model.rows import Segment, build_rows
from rorqual.model.run import Run
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import reference_ops
from rorqual.training.batch import IGNORE, Packed
from rorqual.training.draft import PARTS, Drafted, DraftLoss, distances, draft_losses, draw_anchors, run_drafts
from rorqual.training.learner import Totals
from rorqual.training.recipe import LossRecipe

BLOCK = 5
EVERY = LossRecipe(anchors=1.0)


@cache
def model(window: str = "e4m3_e8m0_32") -> Transformer:
    """Random `tiny` with plain weights; its window is 16."""
    folder = Path(mkdtemp(prefix="rorqual-test-")) / "tiny"
    plain = WeightFormats(dense="fp32", experts="fp32", engram="fp32")
    config = presets.load("tiny").replace(weights=plain, cache=CacheFormats(window=window), vision=None)
    write_random(config, folder, seed=7)
    net = load(folder, page_tokens=16, kernels="plain")
    # Files hold these as bf16; training has them in fp32.
    net.draft.markov_embed = net.draft.markov_embed.float()
    net.draft.markov_head = DenseWeight(net.draft.markov_head.expand())
    return net


def packed(n: int, starts: tuple[int, ...] = (0,), number: int = 0) -> Packed:
    ids = torch.randint(3, 500, (n,), generator=torch.Generator().manual_seed(number))
    targets = torch.full((n,), IGNORE)
    for a, b in zip(starts, (*starts[1:], n), strict=True):
        if b > a:
            targets[a : b - 1] = ids[a + 1 : b]
    return Packed(ids=ids, targets=targets, starts=starts, number=number)


def states(config_rows: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(config_rows, width, generator=torch.Generator().manual_seed(seed))


def plain_run(net: Transformer) -> Run:
    return Run(ops=reference_ops(), numerics=net.numerics, kv=None, tap=Tap())


def inputs(batch: list[Packed], net: Transformer) -> tuple[Tensor, Tensor]:
    """Hidden states of the target layers and normed rows, made up: the draft does not mind where they come from."""
    rows, width = sum(len(s.ids) for s in batch), net.config.hidden_size
    return states(rows, width * len(net.config.dspark_target_layer_ids)), states(rows, width, seed=2)


def losses(batch: list[Packed], net: Transformer, recipe: LossRecipe = EVERY, quantise: bool = True) -> DraftLoss:
    hidden, normed = inputs(batch, net)
    return losses_of(batch, net, hidden, normed, recipe, len(batch), quantise)


def losses_of(
    batch: list[Packed],
    net: Transformer,
    hidden: Tensor,
    normed: Tensor,
    recipe: LossRecipe,
    sequences: int,
    quantise: bool,
) -> DraftLoss:
    totals = Totals(tokens=1, sequences=sequences)
    body = net.backbone
    return draft_losses(
        net.draft,
        body.embed,
        body.head,
        hidden,
        normed,
        batch,
        run=plain_run(net),
        loss=recipe,
        totals=totals,
        seed=0,
        quantise=quantise,
    )


def draft_leaves(draft: nn.Module) -> list[Tensor]:
    """Every tensor of the draft that a gradient may change: all but the rotary constants and the routers' biases."""
    found = []
    for module in draft.modules():
        for name, value in vars(module).items():
            for item in value if isinstance(value, list) else [value]:
                tensor = item.tensor if isinstance(item, DenseWeight) else item
                if isinstance(tensor, Tensor) and name not in ("bias", "bias_vl"):
                    found.append(tensor)
    return found


@contextmanager
def trainable(*tensors: Tensor) -> Iterator[None]:
    for tensor in tensors:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)
            tensor.grad = None


def propose(net: Transformer, hidden: Tensor, ids: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Inference's logits [g, V] and confidences [g] after position p of a document, told the true tokens."""
    cache, run = new_cache(net, len(ids)), plain_run(net)
    seg = Segment(
        row_start=0, row_end=p + 1, start=0, end=p + 1, slot=0, block_table=None, write_floor=0, window_floor=0
    )
    net.draft.feed(cache, hidden[: p + 1], build_rows([seg], net.backbone.freqs), run)
    follow = torch.cat((ids[p + 2 :], torch.zeros(BLOCK, dtype=torch.int64)))
    out = net.draft.propose(
        cache,
        net.backbone.embed,
        net.backbone.head,
        [0],
        ids[p + 1 : p + 2],
        lambda _, i: follow[i : i + 1],
        run,
    )
    return out.logits_BgV[0], out.confidence_Bg[0]


# (sequence, piece, position in the piece): an empty past, a part of a window, one just full, far beyond; a second
# piece; blocks that run over their piece's end
PLACES = [(0, 0, 0), (0, 0, 5), (0, 0, 15), (0, 0, 29), (0, 1, 0), (0, 1, 7), (0, 1, 40), (1, 0, 24), (1, 0, 31)]


def errors_against_inference(net: Transformer, quantise: bool) -> list[float]:
    """Largest difference of logits and confidences at each of PLACES."""
    batch = [packed(85, (0, 40), 3), packed(34, number=4)]
    hidden, _ = inputs(batch, net)
    anchors = draw_anchors(batch, 1.0, BLOCK, 0)
    body = net.backbone
    with torch.no_grad():
        got = run_drafts(
            net.draft, body.embed, body.head, hidden, batch, anchors, run=plain_run(net), quantise=quantise
        )
        found = []
        for number, piece, p in PLACES:
            start, end = list(batch[number].pieces())[piece]
            first = number * 85 + start
            logits, sure = propose(net, hidden[first:], batch[number].ids[start:end], p)
            (anchor,) = (anchors.row_A == first + p).nonzero()[0].tolist()
            mine = got.pair_P // BLOCK == anchor
            count = min(BLOCK, end - start - p - 2)
            assert (got.pair_P[mine] % BLOCK).tolist() == list(range(count))
            assert got.source_P[mine].tolist() == list(range(first + p + 1, first + p + 1 + count))
            off = torch.stack(
                ((got.logits_PV[mine] - logits[:count]).abs().amax(1), got.confidence_P[mine] - sure[:count])
            )
            found.append(float(off.abs().max()))
    return found


def test_training_drafts_as_inference_does() -> None:
    assert max(errors_against_inference(model("fp32"), quantise=True)) < 1e-5
    assert max(errors_against_inference(model("fp32"), quantise=False)) < 1e-5


def test_training_drafts_as_inference_does_through_the_cache_format() -> None:
    errors = sorted(errors_against_inference(model(), quantise=True))
    # The products' last bits may tip a key's rounding, seldom; where none is tipped the results agree.
    assert errors[len(errors) // 2] < 1e-5
    assert errors[-1] < 0.05
    assert min(errors_against_inference(model(), quantise=False)) > 1e-4, "the format is not seen"


def test_gradients_reach_the_whole_draft_and_nothing_else() -> None:
    net = model()
    leaves = draft_leaves(net.draft)
    names = [n for n in expected_tensors(net.config) if n.startswith("mtp.") and ".gate.bias" not in n]
    # wo_a is held in parts, one a group
    assert len(leaves) == len(names) + (net.config.o_groups - 1) * len(net.draft.layers)
    batch = [packed(60, (0, 25), 1), packed(48, number=2)]
    hidden, normed = inputs(batch, net)
    backbone = [hidden, normed, net.backbone.embed, net.backbone.head.tensor, net.backbone.norm]
    with trainable(*leaves, *backbone):
        losses_of(batch, net, hidden, normed, EVERY, 2, True).total.backward()
        assert all(t.grad is not None and t.grad.isfinite().all() and t.grad.abs().sum() > 0 for t in leaves)
        assert all(t.grad is None for t in backbone)


def test_the_acceptance_is_a_target_that_the_confidence_does_not_move() -> None:
    net = model()
    of_logits, of_confidence = [net.draft.norm, net.draft.markov_head.tensor], net.draft.confidence.tensor
    with trainable(*of_logits, of_confidence):
        losses([packed(20)], net, LossRecipe(anchors=1.0, draft_ce=0, draft_tv=0)).total.backward()
        assert all(t.grad is None or not t.grad.any() for t in of_logits)
        assert of_confidence.grad is not None and of_confidence.grad.any()


def test_a_draft_weighs_less_than_the_one_before_it() -> None:
    """The total is the sum over drafts, each weighted by its place in the block; the parts do not change."""
    net, batch = model(), [packed(40), packed(25, number=1)]
    hidden, normed = inputs(batch, net)
    even = losses_of(batch, net, hidden, normed, EVERY, 2, True)
    fading = losses_of(batch, net, hidden, normed, replace(EVERY, draft_decay=0.25), 2, True)
    assert fading.parts == pytest.approx(even.parts, rel=1e-6)
    rates = (EVERY.draft_ce, EVERY.draft_tv, EVERY.draft_confidence)
    assert even.total.item() == pytest.approx(sum(even.parts[p] * w for p, w in zip(PARTS, rates, strict=True)))
    anchors = draw_anchors(batch, 1.0, BLOCK, 0)
    body = net.backbone
    with torch.no_grad():
        drafted = run_drafts(
            net.draft, body.embed, body.head, hidden, batch, anchors, run=plain_run(net), quantise=True
        )
        backbone = F.linear(normed, body.head.expand()).softmax(-1)
        targets = torch.cat([s.targets for s in batch])[drafted.source_P]
        ce, tv = distances(drafted.logits_PV, backbone, drafted.source_P, targets)
        sure = F.binary_cross_entropy_with_logits(drafted.confidence_P, 1 - tv, reduction="none")
    share = torch.tensor([0.25**i for i in range(BLOCK)])
    weight = anchors.weight_A[drafted.pair_P // BLOCK] / 2 * (share / share.mean())[drafted.pair_P % BLOCK]
    expected = float(((ce + tv + 0.1 * sure) * weight).sum())
    assert fading.total.item() == pytest.approx(expected, rel=1e-4)


def test_short_pieces() -> None:
    net = model()
    with trainable(*draft_leaves(net.draft)):
        one = losses([packed(6, (0, 0, 1, 3)), packed(0, number=1)], net)
        one.total.backward()
        grads = [t.grad for t in draft_leaves(net.draft) if t.grad is not None]
        assert one.total.isfinite() and len(grads) > 50 and all(g.isfinite().all() for g in grads)
    assert min(one.parts.values()) > 0
    # Only a piece of 3 has a token after the anchor's next one.
    anchors = draw_anchors([packed(6, (0, 0, 1, 3))], 1.0, BLOCK, 0)
    assert anchors.row_A.tolist() == anchors.start_A.tolist() == [3]
    assert anchors.valid_Ag.tolist() == [[True] + [False] * 4]
    none = losses([packed(3, (0, 0, 1)), packed(0)], net)
    assert none.total == 0 and set(none.parts.values()) == {0.0}


def test_untrained_targets_are_left_out() -> None:
    sequence = packed(30)
    sequence.targets[10:20] = IGNORE
    anchors = draw_anchors([sequence], 1.0, BLOCK, 0)
    sources = anchors.row_A[:, None] + torch.arange(1, BLOCK + 1)
    assert set(sources[anchors.valid_Ag].tolist()) == {*range(1, 10), *range(20, 29)}
    # After 9..14 all five drafts fall on untrained targets, after 28 there is none.
    assert anchors.row_A.tolist() == [*range(9), *range(15, 28)]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1e-6, 1), (0.0625, 6), (0.25, 25), (1.0, 98)])
def test_anchors_are_a_share_of_the_positions(share: float, count: int) -> None:
    assert len(draw_anchors([packed(100)], share, BLOCK, 0).row_A) == count


def test_anchors_depend_on_seed_and_number_alone() -> None:
    batch = [packed(50, (0, 20), number) for number in range(4)]

    def rows(sequences: list[Packed], seed: int = 0) -> list[int]:
        return draw_anchors(sequences, 0.2, BLOCK, seed).row_A.tolist()

    alone = [row + 50 * i for i, sequence in enumerate(batch) for row in rows([sequence])]
    assert rows(batch) == alone == sorted(set(alone))
    assert rows(batch[:1]) != rows(batch[1:2]) and rows(batch, 1) != alone


def test_micro_batches_add_up() -> None:
    net = model()
    batch = [packed(40, (0, 12), 1), packed(7, number=2), packed(2, number=3), packed(33, number=4)]
    hidden, normed = inputs(batch, net)
    leaves = draft_leaves(net.draft)
    recipe = LossRecipe(anchors=0.3)

    def step(cuts: list[list[Packed]]) -> tuple[dict[str, float], list[Tensor]]:
        parts, row = dict.fromkeys(("total", "draft_ce", "draft_tv", "draft_confidence"), 0.0), 0
        with trainable(*leaves):
            for cut in cuts:
                rows = slice(row, row + sum(len(s.ids) for s in cut))
                row = rows.stop
                got = losses_of(cut, net, hidden[rows], normed[rows], recipe, len(batch), False)
                if got.total.requires_grad:
                    got.total.backward()
                for name, value in {**got.parts, "total": got.total.item()}.items():
                    parts[name] += value
            return parts, [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in leaves]

    whole, grads = step([batch])
    for cuts in ([[s] for s in batch], [batch[:2], batch[2:]]):
        parts, other = step(cuts)
        assert parts == pytest.approx(whole, rel=1e-5)
        for a, b in zip(grads, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_distances_by_hand() -> None:
    q, p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]), torch.tensor([[0.2, 0.2, 0.6], [0.25, 0.25, 0.5]])
    ce, tv = distances(q.log(), p, torch.tensor([1, 0]), torch.tensor([0, 2]))
    torch.testing.assert_close(ce, torch.tensor([0.5, 0.6]).log().neg())
    torch.testing.assert_close(tv, torch.tensor([0.25, 0.0]), atol=1e-6, rtol=0)


def test_distances_have_the_gradient_of_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.training.draft.TILE_VALUES", 2 * 11)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    backbone = torch.randn(3, 11, generator=generator, dtype=torch.float64).softmax(-1)
    of, target = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([3, 0, 10, 10, 5])
    weights = torch.rand(2, 5, generator=generator, dtype=torch.float64)

    def weighted(ce: Tensor, tv: Tensor) -> Tensor:
        return (weights[0] * ce + weights[1] * tv).sum()

    plain = (
        F.cross_entropy(logits, target, reduction="none"),
        0.5 * (logits.softmax(-1) - backbone[of]).abs().sum(-1),
    )
    ours = distances(logits, backbone, of, target)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    (expected,) = torch.autograd.grad(weighted(*plain), logits)
    (got,) = torch.autograd.grad(weighted(*ours), logits)
    torch.testing.assert_close(got, expected)


def test_losses_are_means_over_pairs_then_sequences() -> None:
    net = model("fp32")
    batch = [packed(24, number=1), packed(9, number=2)]
    hidden, normed = inputs(batch, net)
    anchors = draw_anchors(batch, 1.0, BLOCK, 0)
    body = net.backbone
    drafted: Drafted
    with torch.no_grad():
        drafted = run_drafts(
            net.draft, body.embed, body.head, hidden, batch, anchors, run=plain_run(net), quantise=True
        )
        backbone = (normed @ body.head.tensor.float().T).softmax(-1)
    ids = torch.cat([s.ids for s in batch])
    expected = dict.fromkeys(("draft_ce", "draft_tv", "draft_confidence"), 0.0)
    for rows in (range(24), range(24, 33)):
        pairs = [i for i, row in enumerate(drafted.source_P.tolist()) if row in rows]
        source = drafted.source_P[pairs]
        q = drafted.logits_PV[pairs].softmax(-1)
        accept = torch.minimum(q, backbone[source]).sum(-1)
        sure = drafted.confidence_P[pairs].sigmoid()
        expected["draft_ce"] -= float(q.gather(1, ids[source + 1, None]).log().mean()) / 4
        expected["draft_tv"] += float((1 - accept).mean()) / 4
        expected["draft_confidence"] -= float((accept * sure.log() + (1 - accept) * (1 - sure).log()).mean()) / 4
    recipe = replace(EVERY, draft_ce=2.0, draft_tv=3.0, draft_confidence=0.5)
    got = losses_of(batch, net, hidden, normed, recipe, 4, True)
    assert got.parts == pytest.approx(expected, rel=1e-4)
    weighed = 2 * expected["draft_ce"] + 3 * expected["draft_tv"] + 0.5 * expected["draft_confidence"]
    assert float(got.total) == pytest.approx(weighed, rel=1e-4)
