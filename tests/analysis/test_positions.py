"""Loss by position on losses whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.analysis.positions import (
    PositionLosses,
    beginnings,
    bucket_losses,
    curve,
    model_bounds,
    paired_change,
    position_losses,
    position_report,
    residuals,
    step_at,
)
from rorqual.config import presets
from rorqual.errors import InputError

LENGTH, STRIDE = 512, 61
BEGIN = 99_999


def scores(
    *, jump_at: int = 0, jump: float = 0.0, drift: float = 0.0, seed: int = 0, size: int = 6000
) -> PositionLosses:
    """A token costs what it costs (exponential, mean 3), plus a smooth fall over positions, plus what is planted."""
    rng = np.random.default_rng(seed)
    cost = torch.from_numpy(rng.exponential(3.0, size + 1))
    positions = torch.arange(LENGTH)
    effect = 0.5 / (1 + positions / 40) + drift * positions / LENGTH
    effect = effect + torch.where(positions >= jump_at, jump, 0.0) if jump_at else effect

    def score(ids: torch.Tensor) -> torch.Tensor:
        return cost[ids[1:]] + effect + 0.05 * torch.from_numpy(rng.standard_normal(LENGTH))

    return position_losses(score, [torch.arange(size)], BEGIN, length=LENGTH, stride=STRIDE)


def test_windows_meet_the_tokens_they_say() -> None:
    seen = []

    def score(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return ids[1:].float()

    begin = torch.tensor([BEGIN])
    texts = [torch.arange(100, 125), torch.arange(5), torch.arange(300, 312)]
    documents = [torch.cat((begin, texts[0])), texts[1], torch.cat((begin, texts[2]))]
    found = position_losses(score, documents, BEGIN, length=10, stride=7)
    assert [ids[:2].tolist() for ids in seen] == [[BEGIN, start] for start in (100, 107, 114, 300)]
    assert all(len(ids) == 11 for ids in seen)
    # Equal numbers stand for equal tokens, and here each token's loss is its id.
    np.testing.assert_array_equal(torch.cat(texts).numpy()[found.tokens], found.losses)
    # A limit is shared out among the documents, and each gives its first windows.
    for limit, starts in ((2, [100, 300]), (3, [100, 107, 300])):
        seen.clear()
        assert len(position_losses(score, documents, BEGIN, length=10, stride=7, limit=limit).losses) == limit
        assert [int(ids[1]) for ids in seen] == starts
    assert len(position_losses(score, documents, BEGIN, length=25).losses) == 1
    with pytest.raises(InputError, match="none has 26"):
        position_losses(score, documents, BEGIN, length=26)


def test_buckets_are_plain_means() -> None:
    losses = np.arange(24.0).reshape(2, 12)
    found = bucket_losses(PositionLosses(losses=losses, tokens=losses.astype(np.int64)), (0, 4, 8, 16))
    assert [(row["start"], row["end"]) for row in found] == [(0, 4), (4, 8), (8, 12)]
    assert [row["mean"] for row in found] == [7.5, 11.5, 15.5]
    assert found[0]["standard_error"] == pytest.approx(6.0)


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_late_against_early_sees_through_the_text(drift: float) -> None:
    """The truth is a difference of means of the effect; unpaired, the text's noise would hide it."""
    found = paired_change(scores(drift=drift))
    positions = np.arange(LENGTH)
    effect = 0.5 / (1 + positions / 40) + drift * positions / LENGTH
    truth = effect[256:512].mean() - effect[64:128].mean()
    assert (found["early"], found["late"]) == ([64, 128], [256, 512])
    assert abs(found["change"] - truth) < 0.01
    assert found["standard_error"] < 0.01
    assert found["reached"] == (truth < 0)


def test_late_against_early_without_tokens_met_at_both() -> None:
    tokens = np.arange(LENGTH)[None] + np.array([[0], [10_000]])
    losses = np.tile(np.arange(LENGTH, dtype=np.float64), (2, 1))
    found = paired_change(PositionLosses(losses=losses, tokens=tokens))
    assert not found["paired"]
    assert found["change"] == (256 + 511) / 2 - (64 + 127) / 2
    assert not found["reached"]


def test_a_planted_step_is_found_where_it_is_and_only_there() -> None:
    planted = scores(jump_at=128, jump=0.05, size=12_000)
    found = step_at(planted, 128)
    assert found["content_matched"]
    assert abs(found["step"] - 0.05) < 3 * found["standard_error"] < 0.03
    assert not found["none"]
    for bound in (224, 320, 400):
        assert step_at(planted, bound)["none"], bound


@pytest.mark.parametrize("jump", [0.0, 0.05])
def test_short_windows_decide_about_bounds_near_the_start(jump: float) -> None:
    """A text that few long windows meet: what they leave undecided at 64, many short ones tell."""
    size, rng = 9000, np.random.default_rng(2)
    cost = torch.from_numpy(rng.exponential(3.0, size + 1))

    def score(ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(ids) - 1)
        effect = 0.5 / (1 + positions / 40) + torch.where(positions >= 64, jump, 0.0)
        return cost[ids[1:]] + effect + 0.05 * torch.from_numpy(rng.standard_normal(len(positions)))

    documents, length = [torch.arange(size), torch.arange(size, size + 700) % size], 1024
    # The second document is too short for long windows, and so for short ones.
    long = position_losses(score, documents, BEGIN, length=length, stride=700)
    short = beginnings(score, documents, BEGIN, length=length, limit=400)
    assert short is not None and short.length == 640
    assert int(short.tokens.min()) == 512 and int(short.tokens.max()) < size
    assert all(start % 128 == 0 for start in (short.tokens[:, 0] - 512).tolist())
    bounds = {"near": 64, "inside": 512, "far": 800}
    alone, report = position_report(long, bounds), position_report(long, bounds, short)
    assert alone["steps"]["near"]["none"] is None and alone["no_step"] is None
    near = report["steps"]["near"]
    assert near["content_matched"] and near["windows"] > 40
    assert abs(near["step"] - jump) < 3 * near["standard_error"] < 0.03
    assert near["none"] is (jump == 0) and report["steps"]["inside"]["none"] is True
    assert report["steps"]["far"] == alone["steps"]["far"], "beyond the short windows' reach"


def test_texts_with_no_room_have_no_short_windows() -> None:
    assert beginnings(lambda ids: torch.zeros(len(ids) - 1), [torch.arange(50)], BEGIN, length=64, limit=9) is None


def test_a_smooth_curve_has_no_step() -> None:
    smooth = scores(size=12_000)
    for bound in (16, 64, 128, 256, 384):
        found = step_at(smooth, bound)
        assert found["none"] is True, found
        assert found["standard_error"] < 0.05, found


def test_a_parabola_is_no_step() -> None:
    positions = np.arange(LENGTH, dtype=np.float64)
    losses = np.tile(3 - 0.01 * positions + 2e-5 * positions**2, (20, 1))
    alone = PositionLosses(losses=losses, tokens=np.arange(losses.size).reshape(losses.shape))
    found = step_at(alone, 128)
    assert abs(found["step"]) < 1e-9
    assert not found["content_matched"], "no token is met twice"


def stepped(step: float, spread: float, windows: int = 16) -> PositionLosses:
    """Windows that jump at 128 by `step` on average, half of them `spread` more and half less."""
    jumps = step + spread * np.where(np.arange(windows) % 2, 1.0, -1.0)
    losses = np.where(np.arange(LENGTH) >= 128, jumps[:, None], 0.0)
    return PositionLosses(losses=losses, tokens=np.arange(losses.size).reshape(losses.shape))


@pytest.mark.parametrize(
    ("step", "spread", "verdict"),
    [(0.0, 0.05, True), (0.05, 0.01, False), (0.0, 0.2, None), (0.1, 0.2, None), (1.0, 0.2, False)],
)
def test_what_noise_could_hide_is_undecided(step: float, spread: float, verdict: bool | None) -> None:
    """A standard error of spread / sqrt(15): three of 0.2's are 0.15 nats, of 0.05's 0.04."""
    one = stepped(step, spread)
    found = step_at(one, 128)
    assert found["step"] == pytest.approx(step) and found["standard_error"] == pytest.approx(spread / 15**0.5)
    assert found["none"] is verdict
    report = position_report(one, {"window": 128, "elsewhere": 256})
    assert report["no_step"] is verdict and report["steps"]["elsewhere"]["none"] is True


def test_a_single_window_decides_nothing() -> None:
    found = step_at(stepped(0.0, 0.0, windows=1), 128)
    assert found["standard_error"] is None and found["none"] is None


def test_residuals_leave_a_window_itself_out() -> None:
    """Token 5 costs 1, 4 and 7 at late positions of three windows."""
    losses = np.array([[9.0, 1.0], [9.0, 4.0], [9.0, 7.0], [2.0, 9.0]])
    tokens = np.array([[0, 5], [1, 5], [2, 5], [5, 6]])
    found = residuals(PositionLosses(losses=losses, tokens=tokens))
    np.testing.assert_allclose(found[:3, 1], [1 - 5.5, 4 - 4.0, 7 - 2.5])
    assert found[3, 0] == 2 - 4.0
    assert np.isnan(found[:3, 0]).all()


def test_curve_leaves_unknown_out() -> None:
    rows = np.array([[1.0, 1, 4, 4], [3.0, 3, np.nan, 4]])
    middle, mean, error = curve(rows, 2)
    np.testing.assert_array_equal(middle, [1, 3])
    np.testing.assert_allclose(mean, [2, 4])
    np.testing.assert_allclose(error, [1, np.nan])


def test_bounds_of_a_config() -> None:
    config = presets.load("mid")
    assert model_bounds(config, chunk=512, length=4096) == {
        "window": 128,
        "top-k x ratio 1": 128,
        "top-k x ratio 2": 256,
        "candidates": 2048,
        "chunk 1": 512,
        "chunk 2": 1024,
        "chunk 3": 1536,
        "chunk 4": 2048,
        "chunk 5": 2560,
        "chunk 6": 3072,
        "chunk 7": 3584,
    }
    # The last bound is that of the last whole chunk before the end.
    assert "chunk 2" not in model_bounds(config, chunk=512, length=1024)


def test_report_is_plain_numbers() -> None:
    import json

    rng = np.random.default_rng(0)
    report = position_report(
        position_losses(lambda ids: torch.from_numpy(rng.random(len(ids) - 1)), [torch.arange(12_000)], BEGIN),
        {"window": 128},
    )
    assert json.loads(json.dumps(report)) == report
    assert [row["start"] for row in report["buckets"]][-3:] == [512, 1024, 2048]
    assert report["no_step"] == report["steps"]["window"]["none"]
