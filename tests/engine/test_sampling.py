"""Sampling parameters: each does what it says, and a bad one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import asked, assert_clean, engine_of, run, said
from models import demo, random_ids, tiny
from torch import Tensor

from rorqual.engine.noise import DRAFT, TOKEN, Noise
from rorqual.engine.params import Constraint, SamplingParams
from rorqual.engine.sampler import Sampler, probabilities
from rorqual.errors import FormatError, InputError

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0, 0.0])


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("temperature", -0.1, "0 \\(greedy\\) or a positive number"),
        ("temperature", float("inf"), "0 \\(greedy\\) or a positive number"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.1, "above 0, at most 1"),
        ("top_k", -1, "0 \\(off\\) or a positive count"),
        ("min_p", 1.5, "0..1"),
        ("presence_penalty", 2.5, "-2..2"),
        ("frequency_penalty", -2.5, "-2..2"),
        ("repetition_penalty", 0.0, "a positive number"),
        ("logit_bias", {3: float("inf")}, "a finite number"),
        ("seed", -1, "0..2\\^63 - 1"),
        ("n", 0, "at least 1"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", 129, "0..max_tokens, which is 128"),
        ("stop", "", "texts of at least 1 character"),
        ("stop_ids", [-1], "token ids"),
        ("logprobs", 21, "0..20, or none"),
        ("prompt_logprobs", -1, "0..20, or none"),
    ],
)
def test_an_illegal_parameter_is_named(field: str, value: Any, legal: str) -> None:
    """Field case 51, engine side."""
    with pytest.raises(InputError, match=f"^{field}.* is not legal; legal: {legal}"):
        SamplingParams(**{field: value})


def weights(**params: Any) -> Tensor:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 1, **params}), prompt=[0], ends=[4])
    for token in params.get("took", []):
        sampler.take(token)
    return sampler.weights(LOGITS)


def softmax(logits: Any) -> Tensor:
    return torch.as_tensor(logits, dtype=torch.float64).softmax(0)


def test_each_parameter_changes_the_distribution_as_it_says() -> None:
    whole = softmax(LOGITS)
    assert torch.allclose(weights(), whole)
    assert torch.allclose(weights(temperature=2.0), softmax(LOGITS / 2))
    assert weights(top_k=2).nonzero().flatten().tolist() == [0, 4]
    assert 0.6 < float(whole[4]) < 0.7 < float(whole[4] + whole[0])
    assert weights(top_p=0.6).nonzero().flatten().tolist() == [4]
    assert weights(top_p=0.7).nonzero().flatten().tolist() == [0, 4]
    assert torch.allclose(weights(top_k=2).sum(), torch.tensor(1.0, dtype=torch.float64))
    assert weights(min_p=0.1).nonzero().flatten().tolist() == [0, 1, 4]
    assert torch.allclose(weights(logit_bias={3: 5.0}), softmax([2, 1, 0.5, 4, 3, 0]))
    assert torch.allclose(weights(repetition_penalty=2.0), softmax([1, 1, 0.5, -1, 3, 0]))
    assert float(weights(min_tokens=1)[4]) == 0
    assert weights(temperature=0.0).nonzero().flatten().tolist() == [4]
    assert weights(temperature=0.0, min_tokens=1).nonzero().flatten().tolist() == [0]


def test_penalties_count_what_was_generated() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1, presence_penalty=0.5, frequency_penalty=0.25), prompt=[0])
    for token in (1, 1, 3):
        sampler.take(token)
    assert torch.allclose(sampler.weights(LOGITS), softmax([2, 1 - 0.5 - 0.5, 0.5, -1 - 0.75, 3, 0]))
    both = Sampler(SamplingParams(temperature=1.0, seed=1, repetition_penalty=2.0), prompt=[0])
    both.take(3)
    assert torch.allclose(both.weights(LOGITS), softmax([1, 1, 0.5, -2, 3, 0]))


def test_ties_go_to_the_lowest_id() -> None:
    assert Sampler(SamplingParams())(torch.tensor([0.0, 1.0, 1.0])) == 1


def test_damaged_logits_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(FormatError, match="NaN or Inf"):
            Sampler(SamplingParams())(torch.tensor([0.0, bad]))


def test_noise_is_found_by_its_place() -> None:
    noise = Noise(5)
    assert torch.equal(noise.exponential(TOKEN, 3, 10), Noise(5).exponential(TOKEN, 3, 10))
    others = Noise(6), Noise(5, 1)
    assert not any(torch.equal(noise.exponential(TOKEN, 3, 10), o.exponential(TOKEN, 3, 10)) for o in others)
    assert not torch.equal(noise.exponential(TOKEN, 3, 10), noise.exponential(DRAFT, 3, 10))
    assert not torch.equal(noise.exponential(TOKEN, 3, 10), noise.exponential(TOKEN, 4, 10))


def test_draws_have_the_distribution() -> None:
    sampler, draws = Sampler(SamplingParams(temperature=1.0, seed=0)), 20_000
    counts = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(draws)]), minlength=6)
    expected = probabilities(LOGITS, SamplingParams(temperature=1.0)) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5  # 0.999 quantile, 5 degrees of freedom


def test_min_tokens_and_stop_ids_and_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("fast"), random_ids(9)
    engine = engine_of(model)
    (free,) = run(engine, [engine.output(engine.submit(ids, asked(12)))])
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    params = SamplingParams(max_tokens=12, stop_ids=[stop], ignore_eos=True)
    (early,) = run(engine, [engine.output(engine.submit(ids, params))])
    assert early.token_ids == free.token_ids[: first + 1] and early.finish_reason == "stop"
    params = SamplingParams(max_tokens=12, min_tokens=12, stop_ids=[stop], ignore_eos=True)
    (late,) = run(engine, [engine.output(engine.submit(ids, params))])
    assert len(late.token_ids) == 12 and stop not in late.token_ids and late.finish_reason == "length"
    bias = SamplingParams(max_tokens=12, logit_bias={model.config.eos_token_id: 1000.0})
    (ended,) = run(engine, [engine.output(engine.submit(ids, bias))])
    assert ended.token_ids == [model.config.eos_token_id] and ended.finish_reason == "stop"
    assert_clean(engine)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    engine = engine_of(tiny())
    for name, params in (("stop_ids", {"stop_ids": [9999]}), ("logit_bias", {"logit_bias": {9999: 1.0}})):
        with pytest.raises(InputError, match=f"{name}: id 9999 is outside the vocabulary"):
            engine.submit([3, 4], SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_prompt_logprobs_are_those_of_generation(chunk: int) -> None:
    """What the model thought of its own text when it said it is what it thinks of it as a prompt."""
    model, ids = tiny("fast"), random_ids(50, seed=4)
    engine = engine_of(model, chunk_tokens=chunk, prefill="full")
    (output,) = run(engine, [engine.output(engine.submit(ids, asked(20)))])
    again = torch.cat((ids, torch.tensor(output.token_ids)))
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (seen,) = run(engine, [engine.output(engine.submit(again, params))])
    found = seen.prompt_logprobs
    assert found is not None and found[0] is None and len(found) == 70
    assert seen.counts.hit == 0, "logits of the prompt are computed, and so is the prompt"
    late = [one for one in found[50:] if one is not None]
    assert [one.token for one in late] == output.token_ids and all(len(one.top) == 2 for one in late)
    assert torch.allclose(torch.tensor([one.logprob for one in late]), torch.tensor(said(output)[1]), atol=2e-2)
    assert_clean(engine)


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, penalties and bias; the largest first; a probability of 0 is finite (field case 52)."""
    engine = engine_of(tiny("fast"))
    ids = random_ids(9)
    params = SamplingParams(max_tokens=3, logprobs=5, logit_bias={7: 1000.0}, temperature=0.5, seed=1)
    (output,) = run(engine, [engine.output(engine.submit(ids, params))])
    (plain,) = run(engine, [engine.output(engine.submit(ids, SamplingParams(max_tokens=1, logprobs=5)))])
    assert output.token_ids == [7, 7, 7] and output.logprobs is not None and plain.logprobs is not None
    assert output.logprobs[0].top == plain.logprobs[0].top
    tops = [value for _, value in output.logprobs[0].top]
    assert tops == sorted(tops, reverse=True) and output.logprobs[0].logprob < tops[-1]


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        (Constraint(kind="regex", value="[0-9]{3}-[a-f]{2}"), r"[0-9]{3}-[a-f]{2}"),
        (Constraint(kind="choice", value=["north", "north-west"]), "north(-west)?"),
        (Constraint(kind="grammar", value='start: "a" ("b" | "c")+ "."'), r"a[bc]+\."),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", [False, True])
def test_a_constraint_is_met(
    constraint: Constraint,
    matches: str,
    temperature: float,
    speculative: bool,
) -> None:
    import re

    engine = engine_of(demo(), slots=2)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=2, constraint=constraint, logit_bias={})
    (output,) = run(engine, [engine.output(engine.submit("The answer is", params, speculative=speculative))])
    assert output.finish_reason == "stop" and re.fullmatch(matches, output.text)


def test_a_schema_is_met() -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    engine = engine_of(demo(), slots=2)
    params = SamplingParams(
        max_tokens=80, temperature=1.0, seed=1, constraint=Constraint(kind="json_schema", value=schema)
    )
    (output,) = run(engine, [engine.output(engine.submit("A person:", params))])
    found = json.loads(output.text)
    assert found["name"] in ("Ann", "Bob") and 1 <= found["age"] <= 99


def test_a_bad_constraint_is_refused() -> None:
    engine = engine_of(demo(), slots=2)
    for constraint in (Constraint(kind="regex", value="("), Constraint(kind="json_schema", value="{")):
        with pytest.raises(InputError, match=r"^constraint: "):
            engine.submit("x", SamplingParams(constraint=constraint))
    with pytest.raises(InputError, match="'xml' is not one of json_schema"):
        Constraint(kind="xml", value="x")
    assert not engine.has_work
