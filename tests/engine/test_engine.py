"""Equivalences of the engine: whoever runs beside a request, and however it is cut, it says the same, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import all_said, asked, assert_clean, engine_of, run, said
from models import demo, golden, random_ids, tiny

from rorqual.checkpoint.table import EngramTable
from rorqual.engine.params import SamplingParams
from rorqual.errors import CapacityError, InputError
from rorqual.model.step import SequenceOutput
from rorqual.model.transformer import Transformer

MODELS: dict[str, Callable[[], Transformer]] = {
    "golden": lambda: golden("fp32-dspark"),
    "golden-fast": lambda: golden("fp32-dspark", "fast"),
    "tiny-fast": lambda: tiny("fast"),
    "tiny-native": lambda: tiny("fast", "native"),
    "demo": demo,
}
LENGTHS = 1, 90, 2, 33, 17, 140, 32, 64


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return MODELS[request.param]()


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 40) -> list[torch.Tensor]:
    return [random_ids(length, seed=seed + i) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
def test_batched_is_alone(model: Transformer, speculative: bool) -> None:
    """Long prompts and short, chunks beside decode rows and verification rows: the bits of logits."""
    wanted = [
        all_said(engine_of(model, slots=1, chunk_tokens=48), [ids], asked(), speculative=False)[0] for ids in prompts()
    ]
    engine = engine_of(model, slots=5, chunk_tokens=48, speculative=speculative)
    assert all_said(engine, prompts(), asked()) == wanted
    assert_clean(engine)


@pytest.mark.parametrize("chunk", [8, 32])
def test_a_short_chunk_is_one_in_every_engine(chunk: int) -> None:
    """However many rows a step has room for: rows that share products with others are never more than a chunk."""
    model = golden("fp32-dspark", "fast")
    wanted = [all_said(engine_of(model, slots=1, chunk_tokens=chunk), [ids], asked(4))[0] for ids in prompts()]
    engine = engine_of(model, slots=16, chunk_tokens=chunk)
    assert all_said(engine, prompts(), asked(4)) == wanted
    rows = [end - start for step in engine.stats().recent for _, start, end, _ in step.sequences]
    assert max(rows) == chunk


def test_seeded_samples_are_the_same_alone_and_beside_others(model: Transformer) -> None:
    """Field case 50; with drafts and without, since the seed's draws decide."""
    params = [asked(temperature=0.9, seed=i, top_k=40 * (i % 2), top_p=1 - 0.1 * (i % 3)) for i in range(len(LENGTHS))]
    engine = engine_of(model, slots=1, chunk_tokens=48, speculative=False)
    wanted = [all_said(engine, [ids], own)[0] for ids, own in zip(prompts(), params, strict=True)]
    together = all_said(engine_of(model, slots=6, chunk_tokens=48, speculative=True), prompts(), params)
    assert together == wanted


def test_no_seed_is_another_text_each_time() -> None:
    engine, ids = engine_of(tiny("fast")), random_ids(9)
    found = all_said(engine, [ids] * 3, asked(temperature=1.5))
    assert len({tuple(ids) for ids, _ in found}) == 3


def test_n_completions_share_their_prompt() -> None:
    """Three texts with one seed, repeatable, the pages of the prompt held once; the first is that of n = 1."""
    model, ids = tiny("fast"), random_ids(100, seed=5)
    engine = engine_of(model, slots=4)
    name = engine.submit(ids, asked(12, n=3, temperature=1.2, seed=4))
    output = engine.output(name)
    while len(output.completions[0].token_ids) < 2:
        engine.step()
        engine.check_integrity()
    # 7 pages of 16 hold 100 tokens; three completions hold 6 of them together and a last one each.
    assert engine.stats().pages_used == 6 + 3
    run(engine, [output])
    found = [said(output, at) for at in range(3)]
    assert len({tuple(tokens) for tokens, _ in found}) == 3
    other = engine_of(model, slots=4)
    (again,) = run(other, [other.output(other.submit(ids, asked(12, n=3, temperature=1.2, seed=4)))])
    assert [said(again, at) for at in range(3)] == found
    assert all_said(engine_of(model), [ids], asked(12, temperature=1.2, seed=4))[0] == found[0]
    assert output.counts.prompt == 100 and output.counts.new == 36
    assert_clean(engine)


def test_greedy_completions_of_one_prompt_are_one() -> None:
    engine = engine_of(tiny("fast"), slots=3)
    (output,) = run(engine, [engine.output(engine.submit(random_ids(50), asked(9, n=3)))])
    assert said(output, 0) == said(output, 1) == said(output, 2)
    assert_clean(engine)


def test_more_completions_than_slots_are_refused() -> None:
    engine = engine_of(tiny(), slots=2)
    with pytest.raises(InputError, match="n: 3 completions at once need as many slots; there are 2"):
        engine.submit([5, 6], SamplingParams(n=3))
    assert not engine.has_work


def test_completions_have_draft_windows_though_the_first_ends_at_once() -> None:
    engine, ids = engine_of(tiny("fast"), slots=3), random_ids(40, seed=3)
    drawn = {"n": 2, "temperature": 1.5, "seed": 1}
    (free,) = run(engine, [engine.output(engine.submit(ids, asked(9, **drawn)))])
    first, second = (completion.token_ids[0] for completion in free.completions)
    assert first != second
    name = engine.submit(ids, asked(9, stop_ids=[first], **drawn), salt="cold")
    output, live = engine.output(name), engine._requests[name].lives[1]
    engine.step()
    assert output.completions[0].finish_reason == "stop" and not live.finished
    assert engine.cache.slots.states[engine.kv.slot(live.key)].draft.hi == 40
    run(engine, [output])
    assert_clean(engine)


def test_a_fork_goes_on_as_its_parent() -> None:
    model, ids = tiny("fast"), random_ids(70, seed=2)
    wanted = all_said(engine_of(model, speculative=False), [ids], asked(20))[0]
    engine = engine_of(model)
    parent = engine.submit(ids, asked(20))
    output = engine.output(parent)
    while len(output.token_ids) < 6:
        engine.step()
    had = len(output.token_ids)
    child = engine.output(engine.fork(parent, params=asked(20 - had)))
    run(engine, [output, child])
    assert said(output) == wanted
    assert said(child) == (wanted[0][had:], wanted[1][had:])
    assert child.prompt_token_ids == [*ids.tolist(), *wanted[0][:had]]
    assert_clean(engine)


def test_a_fork_of_a_request_that_waits_takes_its_pages() -> None:
    """Log-probabilities of a prompt are its own request's: the fork's prefill needs no logits, and takes the hit."""
    engine = engine_of(tiny("fast"), slots=1)
    parent = engine.submit(random_ids(70, seed=2), asked(4, prompt_logprobs=0))
    child = engine.output(engine.fork(parent, params=asked(4)))
    (output,) = run(engine, [engine.output(parent)])
    run(engine, [child])
    assert output.prompt_logprobs is not None and None not in output.prompt_logprobs[1:]
    assert (output.counts.hit, child.counts.hit) == (0, 64)
    assert_clean(engine)


def test_a_rewound_request_says_the_same_again() -> None:
    """Field case 15: tail, ring and history are rebuilt; in exact mode the logits are as before."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(40, seed=11)
    engine = engine_of(model, prefill="full", replay="exact")
    output = engine.output(engine.submit(ids, asked(50)))
    while len(output.token_ids) < 45:
        engine.step()
    before = said(output)
    engine.rewind(output.request, 7)
    assert len(output.token_ids) == 7
    run(engine, [output])
    assert output.counts.new == len(output.token_ids) == 50
    assert output.token_ids[:45] == before[0][:45]
    assert output.logprobs is not None
    assert torch.allclose(torch.tensor(said(output)[1][:45]), torch.tensor(before[1][:45]), atol=2e-2)
    assert_clean(engine)


def test_a_hit_rebuilds_the_draft_windows() -> None:
    """Field case 14: over the last window before the newest token, as after a cold prefill."""
    engine, ids = engine_of(tiny("fast"), slots=1), random_ids(90, seed=8)
    for hit in (0, 80):
        output = engine.output(engine.submit(ids, asked(9)))
        engine.step()
        span = engine.cache.slots.states[0].draft
        assert (output.counts.hit, span.held_from(16), span.hi) == (hit, 74, 90)
        run(engine, [output])


def test_a_rewound_request_draws_the_same_again() -> None:
    """A seed's draws are found by their place, and penalties by what was kept."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(40, seed=12)
    engine = engine_of(model, prefill="full", replay="exact")
    params = asked(30, temperature=0.9, seed=5, presence_penalty=1.5)
    output = engine.output(engine.submit(ids, params))
    while len(output.token_ids) < 25:
        engine.step()
    before = output.token_ids[:25]
    engine.rewind(output.request, 9)
    run(engine, [output])
    assert output.token_ids[:25] == before and len(output.token_ids) == 30
    assert_clean(engine)


def test_a_preempted_request_goes_on() -> None:
    model, ids = golden("fp32-dspark", "fast"), random_ids(40, seed=11)
    engine = engine_of(model, prefill="full", replay="exact")
    wanted = all_said(engine, [ids], asked(30), speculative=False)[0]
    output = engine.output(engine.submit(ids, asked(30)))
    for _ in range(40):
        engine.step()
        if not output.finished and engine.stats().steps % 4 == 0:
            engine.preempt(output.request)
    run(engine, [output])
    assert output.counts.preempted > 2
    assert output.token_ids == wanted[0]
    assert torch.allclose(torch.tensor(said(output)[1]), torch.tensor(wanted[1]), atol=2e-2)
    assert_clean(engine)


def test_an_id_of_ours_is_nobodys() -> None:
    engine = engine_of(tiny("fast"))
    engine.submit([5], asked(1), request="request-0")
    assert engine.submit([6], asked(1)) != engine.submit([7], asked(1)) != "request-0"
    with pytest.raises(InputError, match="'request-0' is live already"):
        engine.submit([8], asked(1), request="request-0")
    assert len(engine.live) == 3


def test_an_id_that_is_used_again_is_a_new_request() -> None:
    """What its first bearer lost in front of a step that never came is not the second one's."""
    engine = engine_of(tiny("fast"))
    engine.submit(random_ids(10), asked(8), request="a")
    engine.step()
    engine.preempt("a")
    engine.abort("a")
    (output,) = run(engine, [engine.output(engine.submit(random_ids(10), asked(8), request="a"))])
    assert output.counts.preempted == 0


def test_too_few_pages_preempt_and_all_end() -> None:
    model = tiny("fast")
    engine = engine_of(model, pages=12, slots=4)
    outputs = [engine.output(engine.submit(random_ids(40, seed=i), asked(60))) for i in range(5)]
    run(engine, outputs)
    assert engine.stats().preemptions and all(len(output.token_ids) == 60 for output in outputs)
    assert_clean(engine)


def test_an_abort_gives_everything_back_at_once() -> None:
    """Field case 49."""
    engine = engine_of(tiny("fast"), slots=3)
    names = [engine.submit(random_ids(60, seed=i), asked(40, n=1 + i % 2)) for i in range(4)]
    for _ in range(3):
        engine.step()
    for name in names:
        output = engine.abort(name)
        assert output.finished and {c.finish_reason for c in output.completions} == {"abort"}
        engine.check_integrity()
        assert name not in engine
    assert engine.stats().aborted == 4
    assert_clean(engine)


def test_who_stops_reading_a_stream_aborts_it() -> None:
    engine = engine_of(tiny("fast"))
    name = engine.submit(random_ids(10), asked(40))
    stream = engine.stream(name)
    assert next(stream).token_ids
    stream.close()
    assert name not in engine
    assert_clean(engine)


def test_what_can_never_run_is_refused_at_once() -> None:
    """Field case 7."""
    engine = engine_of(tiny(), pages=4)
    with pytest.raises(InputError, match="never fit the cache's 64"):
        engine.submit(random_ids(60), SamplingParams(max_tokens=6))
    with pytest.raises(InputError, match="do not fit the model's 1024 positions with a new token"):
        engine.submit(random_ids(1024), SamplingParams(max_tokens=1))
    with pytest.raises(InputError, match="id 100000 is outside the vocabulary"):
        engine.submit([3, 100_000])
    assert not engine.has_work and engine.stats().requests == 0


def test_a_full_queue_refuses() -> None:
    engine = engine_of(tiny(), max_waiting=1)
    engine.submit([3, 4])
    with pytest.raises(CapacityError, match="1 requests wait already"):
        engine.submit([3, 4])


def test_damaged_logits_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny("fast"))
    outputs = [engine.output(engine.submit(random_ids(10 + i, seed=i), asked(6))) for i in range(3)]
    inner = engine.runner.run

    def damaged(*args: Any) -> list[SequenceOutput]:
        made = inner(*args)
        if len(made) == 3 and made[1].logits is not None:
            made[1] = replace(made[1], logits=made[1].logits.clone().fill_(float("nan")))
        return made

    monkeypatch.setattr(engine.runner, "run", damaged)
    run(engine, outputs)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "NaN or Inf" in str(outputs[1].completions[0].stopped_by)
    assert_clean(engine)


def test_rows_of_engram_tables_are_counted_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts in chunks, of tokens and of drafts that were rejected: what the tables were asked for."""
    model, read = golden("fp32-dspark"), 0
    rows = EngramTable.rows

    def counted(self: EngramTable, index: torch.Tensor) -> torch.Tensor:
        nonlocal read
        read += index.numel()
        return rows(self, index)

    engine = engine_of(model, chunk_tokens=32, speculative=True)
    monkeypatch.setattr(EngramTable, "rows", counted)  # the model's fingerprint has looked at some too
    all_said(engine, prompts((90, 17, 3)), asked())
    counts = engine.stats().counts
    assert counts.engram_rows == read > 0
