"""The indexer's teacher and loss, its selection and its pool: cases small enough to do by hand."""

from collections.abc import Sequence
from math import log

import pytest
import torch
from torch import Tensor

from rorqual.config import presets
from rorqual.formats.codec import fake_quantize
from rorqual.model.rope import Rotary
from rorqual.model.rows import Rows, Segment
from rorqual.model.run import Carry
from rorqual.model.tap import Tap
from rorqual.ops.dispatch import reference_ops
from rorqual.training.attend import PLAIN
from rorqual.training.indexing import as_mask, block_pool, index_kl, index_scores, select, teacher
from rorqual.training.kv import Choice, LearningKV
from rorqual.training.learner import Phase

OPS = reference_ops()
LOW = -torch.inf


def logs(numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).log()


def taught() -> Tensor:
    """Two heads, whose logits are a key's two channels: each number below is what a key weighs for a head. Three rows:
    one with a window key unseen, one with a group unseen, one without groups."""
    scale = 0.25
    q = torch.eye(2).expand(3, 2, 2) / scale
    window = logs([[[1000, 500], [4, 2]], [[4, 2], [1, 2]], [[1, 1], [1, 1]]])
    seen = torch.tensor([[False, True], [True, True], [False, True]])
    groups = logs([[1, 3], [2, 1], [3, 1]])
    visible = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
    return teacher(q, window, seen, groups, visible, logs([2, 1]), scale)


def test_the_teacher_is_the_groups_share_of_window_groups_and_sink_averaged_over_heads() -> None:
    # Row 0: head 0 has groups 1 + 2 + 3, window 4, sink 2: 12; head 1 has groups 3 + 1 + 1, window 2, sink 1: 8.
    # Row 1: head 0 has groups 1 + 2, window 4 + 1, sink 2: 10; head 1 has groups 3 + 1, window 2 + 2, sink 1: 9.
    wanted = [
        [(1 / 12 + 3 / 8) / 2, (2 / 12 + 1 / 8) / 2, (3 / 12 + 1 / 8) / 2],
        [(1 / 10 + 3 / 9) / 2, (2 / 10 + 1 / 9) / 2, 0.0],
        [0.0, 0.0, 0.0],
    ]
    torch.testing.assert_close(taught(), torch.tensor(wanted), atol=1e-6, rtol=0)


def test_the_scale_multiplies_logits_but_not_the_sink() -> None:
    q, key = torch.tensor([[[2.0]]]), torch.tensor([[log(3.0)]])
    seen = torch.tensor([[True]])
    # Scaled by 1 the logits are log 9, by 1 / 2 log 3; the sink's stays log 2.
    for scale, wanted in ((1.0, 9 / (9 + 9 + 2)), (0.5, 3 / (3 + 3 + 2))):
        found = teacher(q, key[None], seen, key, seen, torch.tensor([log(2.0)]), scale)
        assert found.item() == pytest.approx(wanted, abs=1e-6)


def test_the_teacher_has_no_gradient() -> None:
    q, key, seen = torch.ones(1, 1, 1, requires_grad=True), torch.ones(1, 1), torch.tensor([[True]])
    assert not teacher(q, key[None], seen, key, seen, torch.zeros(1), 1.0).requires_grad


def test_index_kl_is_the_hand_computed_sum_and_its_gradient_is_softmax_less_target() -> None:
    told = torch.tensor(
        [
            [3 / 8, 1 / 16, 1 / 16],  # of what it gives to groups: 3/4, 1/8, 1/8
            [1 / 8, 3 / 8, 0.0],  # 1/4, 3/4
            [0.0, 0.0, 0.0],  # sees no group
            [0.0, 0.0, 0.0],  # sees some, but its heads give them nothing
        ]
    )
    visible = torch.tensor([[True, True, True], [True, True, False], [False, False, False], [True, True, True]])
    scores = torch.tensor([[0.0, 0.0, log(2.0)], [5.0, 5.0, 50.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    scores.requires_grad_()
    # Softmax: 1/4, 1/4, 1/2 in row 0; 1/2, 1/2 in row 1, whose third score is not visible.
    first = 3 / 4 * log(3) + 1 / 8 * log(1 / 2) + 1 / 8 * log(1 / 4)
    second = 1 / 4 * log(1 / 2) + 3 / 4 * log(3 / 2)
    assert first > 0 and second > 0
    loss = index_kl(scores, told, visible)
    assert loss.item() == pytest.approx(first + second, abs=1e-6)
    (grad,) = torch.autograd.grad(loss, scores)
    wanted = [[1 / 4 - 3 / 4, 1 / 4 - 1 / 8, 1 / 2 - 1 / 8], [1 / 4, -1 / 4, 0.0], [0.0] * 3, [0.0] * 3]
    torch.testing.assert_close(grad, torch.tensor(wanted), atol=1e-6, rtol=0)


def test_index_kl_is_0_where_the_scores_say_what_the_teacher_says() -> None:
    told = taught()
    visible = told > 0
    scores = torch.where(visible, told.clamp_min(1e-9).log() + 7.0, torch.tensor(50.0))
    assert index_kl(scores, told, visible).item() == pytest.approx(0.0, abs=1e-6)
    assert index_kl(-scores, told, visible).item() > 0.05


def test_index_scores_are_weighted_sums_of_what_is_positive() -> None:
    q, w = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[-1.0, 0.0], [1.0, 1.0]]]), torch.tensor([[3.0, -1.0], [2.0, 0.5]])
    keys = torch.tensor([[1.0, 1.0], [-4.0, 5.0], [2.0, -3.0]])
    # Row 0: dots (1, 2), (-4, 10), (2, -6). Row 1: (-1, 2), (4, 1), (-2, -1).
    wanted = [[3.0 - 2.0, -10.0, 6.0], [1.0, 8.0 + 0.5, 0.0]]
    torch.testing.assert_close(index_scores(q, w, keys), torch.tensor(wanted))


def test_select_takes_the_best_finite_scores_and_ties_from_the_left() -> None:
    scores = torch.tensor([[2.0, 5.0, 5.0, LOW, 5.0], [LOW, LOW, -3.0, LOW, LOW], [LOW] * 5, [0.0, 0.0, 0.0, 0.0, 1.0]])
    wanted = [[0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0] * 5, [1, 0, 0, 0, 1]]
    assert select(scores, 2, OPS).int().tolist() == wanted
    assert select(scores, 5, OPS).equal(scores > LOW) and select(scores, 9, OPS).equal(scores > LOW)


def test_as_mask_marks_every_index_and_skips_minus_1() -> None:
    index = torch.tensor([[0, 2, -1], [-1, -1, -1], [2, 2, 0], [1, -1, -1]])
    assert as_mask(index, 3).int().tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]]
    assert as_mask(index[:, :0], 3).shape == (4, 3) and not as_mask(index[:, :0], 3).any()


def test_block_pool_keeps_the_best_blocks_and_pins_the_newest_groups() -> None:
    """Seven groups in blocks of two, the last one ragged; two blocks are kept."""
    scores = torch.tensor(
        [
            [3.0, 1.0, -9.0, 9.0, -5.0, LOW, LOW],  # 5 visible: the worst block is the newest group's
            [9.0, 8.0, 1.0, 7.0, 6.0, 2.0, -1.0],  # 7 visible: the ragged block
            [4.0, 1.0, LOW, LOW, LOW, LOW, LOW],  # 2 visible: one block, no other
            [LOW] * 7,  # none visible
            [1.0, 5.0, 5.0, 0.0, 2.0, 5.0, LOW],  # 6 visible: of two equals the first
            [9.0, 0.0, -3.0, -4.0, LOW, LOW, LOW],  # 4 visible: the newest is group 3, in block 1
        ]
    )
    visible = torch.tensor([5, 7, 2, 0, 6, 4])
    assert block_pool(scores, visible, 2, 2, OPS).int().tolist() == [
        [0, 0, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 0],
    ]
    # Where one block is kept it is the newest's, whatever the scores.
    assert block_pool(scores, visible, 2, 1, OPS)[5].int().tolist() == [0, 0, 1, 1, 0, 0, 0]
    everything = block_pool(scores, visible, 2, 4, OPS)
    assert everything[1].all() and everything[0].int().tolist() == [1, 1, 1, 1, 1, 1, 0] and not everything[3].any()


N, WINDOW, SEAM = 40, 16, 10
DRAWN = (0, 5, 9, 10, 12, 17, 39)
WEIGHT = 8.0


def index_loss(layer: int, seam: int | None, inputs: dict[str, Tensor]) -> float:
    """The loss that a Full layer of `tiny` leaves behind."""
    config = presets.load("tiny").without("vision")
    assert config.sliding_window == WINDOW and config.decoder_start == 3
    role = config.roles[layer]
    seg = Segment(row_start=0, row_end=N, start=0, end=N, slot=0, block_table=None, write_floor=0, window_floor=0)
    at = torch.arange(N)
    rows = Rows(segments=(seg,), positions_T=at, rotary=Rotary((at[:1], at[:1]), at, 0), short_rows=0)
    kv = LearningKV(
        config=config,
        ops=OPS,
        fake=fake_quantize,
        softmax=PLAIN,
        phase=Phase(quantise_caches=False, replay=1.0),
        choices=[Choice(index_rows=torch.tensor(DRAWN), row_weight=WEIGHT, seam=seam)],
    )
    window = kv.window(layer, seg, inputs["keys"], Tap())
    groups = N // role.ratio
    kv.put_groups(layer, seg, 0, inputs["main"][:groups], inputs["index_keys"][:groups], Tap())
    topk = kv.select(role, inputs["index_q"], inputs["index_w"], rows, Carry())
    kv.attend(role.kv_source, seg, inputs["q"], window, topk, inputs["sink"])
    (loss,) = kv.index_losses
    return loss.item()


def written_out(ratio: int, floor: int | None, inputs: dict[str, Tensor]) -> float:
    """Row by row and head by head: all visible groups, the window, the sink. `floor`: of the rows from there on."""
    total = 0.0
    for t in DRAWN:
        visible = (t + 1) // ratio
        if not visible:
            continue
        first = max(0, t - WINDOW + 1)
        if floor is not None and t >= floor:
            first = max(first, floor)
        told = torch.zeros(visible)
        for q, sink in zip(inputs["q"][t], inputs["sink"], strict=True):
            every = torch.cat((inputs["main"][:visible], inputs["keys"][first : t + 1]))
            weights = torch.cat((every @ q * len(q) ** -0.5, sink[None])).softmax(0)
            told += weights[:visible] / len(inputs["sink"])
        dots = (inputs["index_q"][t] @ inputs["index_keys"][:visible].T).relu()
        target, guess = told / told.sum(), (inputs["index_w"][t] @ dots).softmax(0)
        total += float((target * (target / guess).log()).sum())
    return total * WEIGHT


@pytest.mark.parametrize(
    ("layer", "ratio", "seam", "floor"),
    [(3, 1, SEAM, SEAM), (3, 1, None, None), (1, 2, SEAM, None)],
    ids=["decoder", "decoder-without-a-seam", "encoder"],
)
def test_the_teacher_sees_the_window_that_the_layer_sees(
    layer: int, ratio: int, seam: int | None, floor: int | None
) -> None:
    """Behind a decoder seam no key before it; an encoder layer knows no seam. The Top-K does not act on the teacher."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "q": (N, 4, 64),
        "keys": (N, 64),
        "main": (N, 64),
        "index_q": (N, 16, 32),
        "index_w": (N, 16),
        "index_keys": (N, 32),
        "sink": (4,),
    }
    inputs = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    inputs["index_w"] *= 0.02
    # Head 0 looks at nothing but the keys before the seam while it sees them, and has groups of its own liking. Were
    # the heads alike in what they give to their windows, it would cancel in the target.
    inputs["q"][:, 0, 0], inputs["keys"][:SEAM, 0] = 16.0, 5.0
    found = index_loss(layer, seam, inputs)
    assert found == pytest.approx(written_out(ratio, floor, inputs), rel=1e-4)
    other = written_out(ratio, None if floor else SEAM, inputs)
    assert abs(found - other) > 1e-2 * found, "the case tells the seam from none"
