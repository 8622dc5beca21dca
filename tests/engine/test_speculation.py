"""Speculation loses nothing: the accept rules, every rejection position, ring wraps and pair boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import all_said, asked, assert_clean, engine_of, run, said
from models import golden, random_ids, tiny
from torch import Tensor

from rorqual.engine.draft_length import FORGET, PROBE, StepCost, Worth, draft_lengths, survivals
from rorqual.engine.engine import Engine
from rorqual.engine.noise import DRAFT
from rorqual.engine.params import SamplingParams
from rorqual.engine.sampler import Sampler, probabilities
from rorqual.engine.speculation import Ask, Drafts, Speculator, accept
from rorqual.errors import InputError

DRAWS, FULL_DRAWS = 10_000, 50_000
TALL = 26.1
"""The 0.999 quantile of chi-square at 8 degrees of freedom is 26.12; fewer degrees have a smaller one."""


class Known:
    """Stands for a speculator's `propose`: the true continuation, its draft `wrong` replaced."""

    def __init__(self, engine: Engine, truth: Sequence[int], prompt: int, width: int, wrong: int) -> None:
        self.engine, self.truth, self.prompt, self.width, self.wrong = engine, truth, prompt, width, wrong
        self.asked = 0

    def __call__(self, asks: Sequence[Ask], rows: int) -> list[Drafts]:
        found = []
        for ask in asks:
            self.asked += 1
            at = ask.sampler.count
            ids = list(self.truth[at : at + min(self.width, ask.room)])
            if self.wrong < len(ids):
                ids[self.wrong] = (ids[self.wrong] + 1) % 500
            found.append(Drafts(ids=ids))
        return found


@pytest.mark.parametrize("width", range(1, 6))
def test_greedy_text_is_that_without_drafts(width: int) -> None:
    """Field case 29: odd and even starts, across ring wraps; the drafts are the model's own."""
    model = tiny("fast")
    prompts = [random_ids(length, seed=length) for length in (1, 2, 15, 16, 17, 31)]
    wanted = all_said(engine_of(model, slots=6, speculative=False), prompts, asked(40))
    engine = engine_of(model, slots=6, draft_tokens=width)
    assert all_said(engine, prompts, asked(40)) == wanted
    counts = engine.stats().counts
    assert counts.proposed and len(counts.accepted) <= width


@pytest.mark.parametrize("wrong", range(6))
@pytest.mark.parametrize("start", [15, 16])
def test_a_rejection_at_each_position(start: int, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 29: drafts right up to one place, over pages, pairs and rings (window 16) that end within."""
    model, ids, block = golden("fp32-dspark", "fast"), random_ids(start, seed=start), 5
    wanted = all_said(engine_of(model, speculative=False), [ids], asked(60))[0]
    engine = engine_of(model, pages=10)
    known = Known(engine, wanted[0], start, block, wrong)
    monkeypatch.setattr(engine.speculator, "propose", known)
    (output,) = run(engine, [engine.output(engine.submit(ids, asked(60)))])
    assert said(output) == wanted
    kept = min(wrong, block)
    assert len(output.counts.accepted) == block and all(output.counts.accepted[:kept])
    assert not any(output.counts.accepted[kept:])
    assert output.counts.verifications <= -(-60 // (kept + 1)) + 1
    assert_clean(engine)


def test_rejected_drafts_that_filled_a_page_are_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 33a: the page that they filled is rewritten before anybody finds it."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(30, seed=1)
    wanted = all_said(engine_of(model, speculative=False), [ids], asked(30))[0]
    engine = engine_of(model, replay="exact", prefill="full")
    for wrong in range(5):
        monkeypatch.setattr(engine.speculator, "propose", Known(engine, wanted[0], 30, 5, wrong))
        (first,) = run(engine, [engine.output(engine.submit(ids, asked(30), salt=str(wrong)))])
        assert first.token_ids == wanted[0]
        longer = torch.cat((ids, torch.tensor(wanted[0])))
        (hit,) = run(engine, [engine.output(engine.submit(longer, asked(2), salt=str(wrong), speculative=False))])
        assert hit.counts.hit == 48
        (cold,) = run(engine, [engine.output(engine.submit(longer, asked(2), salt=f"cold {wrong}", speculative=False))])
        assert cold.counts.hit == 0
        assert torch.allclose(torch.tensor(said(hit)[1]), torch.tensor(said(cold)[1]), atol=2e-2)


def test_hits_are_the_same_with_drafts_and_without() -> None:
    """Field case 14."""
    found = []
    for speculative in (True, False):
        engine = engine_of(tiny("fast"), speculative=speculative)
        base = random_ids(80, seed=3)
        for turn in range(3):
            prompt = torch.cat((base, random_ids(10 * turn + 1, seed=turn)))
            run(engine, [engine.output(engine.submit(prompt, asked(20)))])
        found.append((engine.stats().counts.hit, engine.stats().counts.replayed))
    assert found[0] == found[1] and found[0][0] == 2 * 80 and found[0][1] == 2 * 16


def test_a_stop_inside_an_accepted_block_drops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 33, and its log-probabilities are those without drafts."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(12, seed=9)
    wanted = all_said(engine_of(model, speculative=False), [ids], asked(20))[0]
    at = next(i for i in range(3, 20) if wanted[0].index(wanted[0][i]) == i)
    engine = engine_of(model)
    monkeypatch.setattr(engine.speculator, "propose", Known(engine, wanted[0], 12, 5, 9))
    params = SamplingParams(max_tokens=20, stop_ids=[wanted[0][at]], logprobs=0, ignore_eos=True)
    (output,) = run(engine, [engine.output(engine.submit(ids, params))])
    assert said(output) == (wanted[0][: at + 1], wanted[1][: at + 1])
    assert (output.finish_reason, output.completions[0].stopped_by) == ("stop", wanted[0][at])
    assert_clean(engine)


def synthetic() -> tuple[Tensor, Tensor]:
    """fp32 logits of a backbone and of a draft over 8 tokens, apart enough to be rejected often."""
    generator = torch.Generator().manual_seed(6)
    return torch.randn(8, generator=generator) * 1.5, torch.randn(8, generator=generator) * 1.5


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(FULL_DRAWS, marks=pytest.mark.full)])
@pytest.mark.parametrize("proposal", ["sampled", "greedy", "seeded"])
def test_what_is_accepted_has_the_backbones_distribution(proposal: str, draws: int) -> None:
    """Field case 31: the first token, and the second after it; greedy proposals included."""
    target, draft = synthetic()
    params = SamplingParams(temperature=1.0, seed=3)
    sampler = Sampler(params)
    q = probabilities(draft, params)
    certain = torch.zeros_like(q)
    certain[int(draft.argmax())] = 1
    firsts, seconds, accepted = torch.zeros(8), torch.zeros(8), 0
    rows = torch.stack((target, target.flip(0), target))
    for _ in range(draws):
        if proposal == "seeded":
            drafts = Drafts(ids=[sampler.choose(q), sampler.choose(q, ahead=1)])
        else:
            weights = q if proposal == "sampled" else certain
            drafts = Drafts(ids=[sampler.choose(weights, DRAFT, ahead=i) for i in range(2)], weights=[weights] * 2)
        ids = accept(sampler, rows, drafts)
        firsts[ids[0]] += 1
        accepted += ids[0] == drafts.ids[0]
        if len(ids) > 1:
            seconds[ids[1]] += 1
    p, flipped = probabilities(target, params), probabilities(target.flip(0), params)
    assert chi_square(firsts, p * draws) < TALL
    assert chi_square(seconds, flipped * float(seconds.sum())) < TALL
    if proposal == "sampled":
        assert abs(accepted / draws - float(torch.minimum(p, q).sum())) < 2.5 / draws**0.5
    distance = float((p - q).abs().sum()) / 2
    if proposal == "seeded":
        assert accepted / draws > (1 - distance) / (1 + distance) - 2.5 / draws**0.5


@pytest.mark.parametrize("seeded", [False, True])
def test_sampled_speculation_has_the_distribution_of_plain_sampling(seeded: bool) -> None:
    """Whole engines: the third token after one prompt, with the model's own drafts, against its exact distribution."""
    model, ids, many = tiny("fast"), random_ids(5, seed=2), 600
    params = {"temperature": 0.7, "top_k": 3}
    engine = engine_of(model, slots=8, pages=32)
    found = []
    for batch in range(many // 8):
        own = [asked(3, seed=8 * batch + i if seeded else None, **params) for i in range(8)]
        found += [tuple(tokens) for tokens, _ in all_said(engine, [ids] * 8, own)]
    assert engine.stats().counts.verifications
    plain = engine_of(model, slots=8, pages=32, speculative=False)
    exact = exact_distribution(plain, ids, 3, SamplingParams(**params))  # type: ignore[arg-type]
    counts = torch.tensor([float(found.count(tokens)) for tokens in exact])
    assert int(counts.sum()) == many
    expected = torch.tensor(list(exact.values())) * many
    common = expected >= 5
    rest = torch.stack((counts[~common].sum(), expected[~common].sum()))
    total = chi_square(counts[common], expected[common]) + float((rest[0] - rest[1]) ** 2 / rest[1].clamp_min(1e-9))
    # 0.999 quantile of chi-square, by Wilson and Hilferty.
    free = int(common.sum())
    assert total < free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3


def exact_distribution(engine: Engine, ids: Tensor, new: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of the first `new` tokens: the product of the distributions along every path."""
    paths = {(): 1.0}
    for _ in range(new):
        longer: dict[tuple[int, ...], float] = {}
        for path, chance in paths.items():
            prompt = torch.cat((ids, torch.tensor(path, dtype=torch.int64)))
            top = SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True)
            (output,) = run(engine, [engine.output(engine.submit(prompt, top))])
            assert output.logprobs is not None
            best = output.logprobs[0].top
            weights = probabilities(torch.tensor([value for _, value in best]), params)
            for (token, _), weight in zip(best, weights.tolist(), strict=True):
                if weight:
                    longer[(*path, token)] = chance * weight
        paths = longer
    return paths


def test_a_width_above_the_block_is_refused() -> None:
    """Field case 30."""
    with pytest.raises(InputError, match=r"draft_tokens: 6 is not legal; legal: 1..5"):
        engine_of(tiny(), draft_tokens=6)


def test_a_request_may_go_without() -> None:
    engine = engine_of(tiny("fast"))
    (output,) = run(engine, [engine.output(engine.submit(random_ids(9), asked(20), speculative=False))])
    assert output.counts.verifications == 0 == engine.stats().counts.proposed
    plain = engine_of(tiny("fast"), speculative=False)
    with pytest.raises(InputError, match="speculative: this engine was made without"):
        plain.submit([5, 6], speculative=True)


def test_lengths_maximise_tokens_over_cost() -> None:
    """Against every combination of prefixes."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        draw: Any = torch.rand(7, generator=generator).tolist()
        requests = [survivals([4 * x - 1 for x in draw[:3]]), survivals([6 * x - 3 for x in draw[3:5]])]
        line = draw[5] * 5, 0.1 + draw[6]

        def value(lengths: Sequence[int], requests: Any = requests, line: Any = line) -> float:
            tokens = 2 + sum(sum(own[:n]) for own, n in zip(requests, lengths, strict=True))
            return float(tokens / (line[0] + line[1] * (2 + sum(lengths))))

        best = max(value((a, b)) for a in range(4) for b in range(3))
        assert value(draft_lengths(requests, 2, line)) == pytest.approx(best)


def test_a_length_does_not_depend_on_later_confidences() -> None:
    """What is verified up to a draft is decided by what was known before it was drawn: so nothing is lost."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        logits: Any = (torch.randn(5, generator=generator) * 2).tolist()
        other: Any = survivals((torch.randn(4, generator=generator) * 2).tolist())
        line = 5.0, 1.0
        for known in range(1, 5):
            found = {
                min(draft_lengths([survivals([*logits[:known], *later]), other], 2, line)[0], known)
                for later in ([-9.0] * (5 - known), [9.0] * (5 - known), logits[known:])
            }
            assert len(found) == 1


def test_step_cost_before_it_knows_anything_and_with_one_width() -> None:
    cost = StepCost()
    assert cost.line == (9.0, 1.0)
    for _ in range(20):
        cost.add(4, 2.0)
    assert cost.line == (9.0, 1.0)


def worth_of(promised: Sequence[float], kept: int) -> Worth:
    """After many steps of one request whose drafts promised so much, of which the first `kept` were accepted."""
    worth = Worth()
    for at in range(400):
        worth.costs(1).steps.add(1 + at % 6, 10.0 + at % 6)
        worth.costs(1).drafting.add(1, 2.0)
        worth.lengths([promised], rows=1)
        worth.trust.judge(promised, kept)
    return worth


def test_drafts_that_promise_and_do_not_keep_are_left_out() -> None:
    sure = [0.95, 0.9, 0.85, 0.8, 0.75]
    assert all(worth_of(sure, 5).pays(1, 1) for _ in range(3))
    worth = worth_of(sure, 0)
    paid = [worth.pays(1, 1) for _ in range(3 * PROBE)]
    assert sum(paid) == 3
    assert paid[PROBE - 1]
    assert worth.lengths([sure], 1) == [5]  # a trial takes them at their word


def test_costs_are_those_of_as_many_requests() -> None:
    """After a busy spell one request is not judged by steps of thirty-two."""
    sure = [0.6, 0.3]
    alone = worth_of(sure, 2)
    for at in range(200):
        alone.costs(32).steps.add(32 + at % 40, 100.0 + at % 40)
        alone.costs(32).drafting.add(32, 1.0)
    assert alone.costs(1).steps.line == pytest.approx((9.0, 1.0))
    assert alone.lengths([sure], 1) == [2]
    assert alone.costs(33) is alone.costs(63) is not alone.costs(64)


def test_drafts_that_begin_to_keep_are_taken_up_again() -> None:
    sure = [0.95, 0.9]
    worth = worth_of(sure, 0)
    trials = 0
    while not (worth.pays(1, 1) and worth.pays(1, 1)):
        worth.trust.judge(sure, 2)
        trials += 1
    assert trials < 1 / (1 - FORGET)


def test_what_is_believed_falls_and_is_known_place_by_place() -> None:
    trust = Worth().trust
    assert trust.believed([0.9, 0.5]) == [0.9, 0.5]
    for at in range(1000):
        trust.judge([0.5, 0.4, 0.4], kept=1 if at % 2 else 3)
    # The second place keeps more than it promises; it cannot be likelier than the first.
    assert trust.believed([0.5, 0.4, 0.3, 0.2]) == pytest.approx([0.93, 0.48, 0.36, 0.2], abs=0.02)
    assert trust.believed([0.1, 0.4])[1] <= 0.25


def test_a_speculator_needs_drafts() -> None:
    model = tiny()
    without = type("Without", (), {"draft": None, "config": model.config})()
    with pytest.raises(InputError, match="this model has no draft layers"):
        Speculator(without, None)  # type: ignore[arg-type]
