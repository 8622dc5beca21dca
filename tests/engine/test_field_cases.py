"""Small inputs on which servers of this kind were reported wrong, through the engine; each test names its field cases.

Those that one part alone decides are tested where that part is. Lengths at which the released window and page of 128
tokens matter are run at these sizes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engines import Forced, all_said, asked, assert_clean, engine_of, run, said
from models import PAGE, golden, random_ids, tiny, tiny_folder
from torch import Tensor

import rorqual
from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.engine.engine import Engine
from rorqual.engine.identity import fingerprint
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

NEAR = 2e-2
"""Between log-probabilities of one text, computed in two ways."""


@cache
def released() -> Transformer:
    """Random, with the released window and page."""
    folder = Path(mkdtemp(prefix="rorqual-test-")) / "m"
    write_random(presets.load("tiny").without("vision").replace(sliding_window=128), folder, seed=5)
    return load(folder, kernels="fast")


def ask(engine: Engine, ids: Tensor | list[int], new: int = 2, **options: Any) -> RequestOutput:
    """A finished request."""
    return run(engine, [engine.output(engine.submit(ids, asked(new), **options))])[0]


def forced(model: Transformer, output: RequestOutput) -> Tensor:
    """Log-probabilities of what was said, by a `full` prefill of the whole text."""
    ids = torch.tensor([*output.prompt_token_ids, *output.token_ids])
    sequence = Sequence(model, new_cache(model, len(ids)))
    logits = sequence.prefill(Prompt(ids=ids), mode="full", logits_from=0)[-1].logits
    assert logits is not None
    rows = logits[len(output.prompt_token_ids) - 1 : -1].double().log_softmax(-1)
    return rows.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]


def assert_true(model: Transformer, output: RequestOutput) -> None:
    found = torch.tensor(said(output)[1]).double()
    assert torch.allclose(found, forced(model, output), atol=NEAR, rtol=0)


@pytest.mark.parametrize(
    ("first", "shared", "hit"),
    [*((300, n, 0) for n in (0, 1, 127, 128, 129, 255)), (300, 256, 256), (320, 320, 256), (384, 384, 384)],
)
def test_hits_at_the_released_window_and_page(first: int, shared: int, hit: int) -> None:
    """Field cases 8, 11, 12 and 13: whole pages, more than a window of them, one window replayed, bytes untouched.

    Two and a half pages shared are a hit of two; all of a prompt of three pages is found, and its last window runs.
    """
    engine = engine_of(released(), pages=8, slots=2, speculative=False)
    base = random_ids(first, seed=1)
    ask(engine, base)
    own = base if shared == first else torch.cat((base[:shared], random_ids(400 - shared, seed=2)))
    chain_pages = [page for page in range(8) if engine.kv.pages.key(page)]
    before = engine.cache.pages.pool[chain_pages].clone()
    output = ask(engine, own)
    assert (output.counts.hit, output.counts.replayed) == (hit, 128 if hit else 0)
    assert output.counts.computed == len(own) - hit + (128 if hit else 0) + 1
    assert len(output.token_ids) == 2
    assert torch.equal(engine.cache.pages.pool[chain_pages], before)
    assert_clean(engine)


def test_the_same_prompt_twice_with_another_between() -> None:
    """Field case 9: the second answer is the third, to the bit, whoever had the slot; in exact mode it is the first."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(90, seed=3)
    engine = engine_of(model, slots=1)
    ask(engine, ids)
    found = []
    for other in (50, 17):
        found.append(said(ask(engine, ids, 9)))
        ask(engine, random_ids(other, seed=other), 9)
    assert found[0] == found[1]
    exact = engine_of(model, slots=1, replay="exact", prefill="full")
    first = ask(exact, ids, 9)
    ask(exact, random_ids(50, seed=50), 9)
    again = ask(exact, ids, 9)
    assert again.counts.hit == 80 and not first.counts.hit
    assert_true(model, first)
    assert_true(model, again)


@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_what_is_left_in_freed_pages_and_slots_is_nothing(replay: str) -> None:
    """Field case 10: with poison and without, the same bits, hits and preemptions included."""
    model, found = tiny("fast"), []
    prompts = [torch.cat((random_ids(40, seed=i % 2), random_ids(5 * i, seed=9 + i))) for i in range(6)]
    for poisoned in (True, False):
        if poisoned:
            engine = engine_of(model, pages=14, slots=3, replay=replay, speculative=False)
        else:
            engine = Engine(model, pages=14, slots=3, replay=replay, speculative=False)
        found.append(all_said(engine, prompts, asked(30)))
        assert engine.stats().preemptions and engine.stats().counts.hit
    assert found[0] == found[1]


def test_regenerating_from_token_201_after_250() -> None:
    """Field case 15: tail, ring and history are rebuilt."""
    model = tiny("fast")
    engine = engine_of(model, replay="exact", prefill="full")
    output = engine.output(engine.submit(random_ids(190, seed=6), asked(70)))
    while len(output.prompt_token_ids) + len(output.token_ids) < 250:
        engine.step()
    before = output.token_ids[:11]
    engine.rewind(output.request, 11)
    run(engine, [output])
    assert output.counts.replayed and output.token_ids[:11] == before and len(output.token_ids) == 70
    assert_true(model, output)
    assert_clean(engine)


def test_what_a_page_is_found_by() -> None:
    """Field cases 16 and 52: ids, and the tenant's salt; a hit of one tenant is no other's."""
    engine, ids = engine_of(tiny("fast"), speculative=False), random_ids(70, seed=4)
    other = ids.clone()
    other[3] += 1
    found = [ask(engine, *each).counts.hit for each in ((ids,), (ids,), (other,), (other,))]
    assert found == [0, 64, 0, 64]
    salted = [ask(engine, ids, salt=salt).counts.hit for salt in ("A", "B", "A", "B", "")]
    assert salted == [0, 0, 64, 64, 64]
    last = ids.clone()
    last[40] += 1
    assert ask(engine, last).counts.hit == 2 * PAGE


def test_which_model_a_page_is_of(tmp_path: Path) -> None:
    """Field case 16: other weights of one config, and other numerics, are other models; the same file is the same."""
    write_random(presets.load("tiny"), tmp_path / "other", seed=8)
    same, native = load(tiny_folder(), page_tokens=PAGE), tiny("plain", "native")
    found = [fingerprint(model) for model in (tiny(), same, native, load(tmp_path / "other", page_tokens=PAGE))]
    assert found[0] == found[1] and len(set(found)) == 3


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
def test_a_second_turn_goes_on_from_the_first(speculative: bool) -> None:
    """Field case 17: a reply that a stop token ended is found with it, and the token is fed once: as a cold run."""
    model, ids = golden("fp32-dspark", "fast"), random_ids(45, seed=7)
    engine = engine_of(model, replay="exact", prefill="full", speculative=speculative)
    plain = ask(engine, ids, 30, salt="look")
    at = next(i for i in range(12, 30) if plain.token_ids.index(plain.token_ids[i]) == i)
    end = plain.token_ids[at]
    params = SamplingParams(max_tokens=30, stop_ids=[end], ignore_eos=True, logprobs=0)
    (first,) = run(engine, [engine.output(engine.submit(ids, params))])
    assert (first.finish_reason, first.token_ids) == ("stop", plain.token_ids[: at + 1])
    second = [*ids.tolist(), *first.token_ids, *random_ids(9, seed=8).tolist()]
    output = ask(engine, second, 10)
    # The stop token itself was never computed, so the page that it lies in is there only if it does not end there.
    assert output.counts.hit == (45 + at) // PAGE * PAGE and output.counts.prompt == 45 + at + 1 + 9
    assert_true(model, output)
    (cold,) = run(engine, [engine.output(engine.submit(second, asked(10), salt="cold"))])
    assert cold.counts.hit == 0 and cold.token_ids == output.token_ids


@pytest.mark.parametrize("chunk", [1, 3, 127, 128, 129, 300])
def test_chunks_at_the_released_window_through_the_engine(chunk: int) -> None:
    """Field case 18."""
    model, ids = released(), random_ids(270, seed=6)
    engine = engine_of(model, slots=2, pages=6, chunk_tokens=chunk, prefill="full", speculative=False)
    output = ask(engine, ids, 3)
    assert output.counts.computed == 270 + 2
    assert_true(model, output)
    longest = max(end - start for step in engine.stats().recent for _, start, end, _ in step.sequences)
    assert longest == min(chunk, 270)


def test_token_by_token_is_a_prefill_at_every_length() -> None:
    """Field case 19: lengths 1 to 300, with drafts beside it."""
    model = tiny("fast")
    engine = engine_of(model, slots=1)
    output = ask(engine, [7], 300)
    assert_true(model, output)


def test_a_row_that_changes_hands() -> None:
    """Field case 20: odd and even lengths side by side; A ends, C takes its row and its slot, and B does not notice."""
    model = golden("fp32-dspark", "fast")
    prompts = [random_ids(length, seed=length) for length in (33, 46, 21)]
    lengths = [3, 20, 9]
    wanted = [
        all_said(engine_of(model, slots=1, speculative=False), [ids], asked(new))[0]
        for ids, new in zip(prompts, lengths, strict=True)
    ]
    engine = engine_of(model, slots=2)
    names = [engine.submit(ids, asked(new)) for ids, new in zip(prompts, lengths, strict=True)]
    outputs = [engine.output(name) for name in names]
    engine.step()
    slot = engine.kv.slot(f"{names[0]}/0")
    while not outputs[2].token_ids:
        engine.step()
    assert outputs[0].finished and not outputs[1].finished and engine.kv.slot(f"{names[2]}/0") == slot
    run(engine, outputs)
    assert [said(output) for output in outputs] == wanted
    assert_clean(engine)


def test_a_page_that_ends_where_the_model_does() -> None:
    """Field cases 29 and 51: drafts in front of the last position; the text ends there, and is that without drafts."""
    model = golden("fp32-dspark", "fast")
    positions, ids = model.config.max_position_embeddings, random_ids(230, seed=5)
    wanted = all_said(engine_of(model, speculative=False), [ids], asked(100))[0]
    engine = engine_of(model)
    assert all_said(engine, [ids], asked(100))[0] == wanted
    assert len(wanted[0]) == positions - 230
    assert_clean(engine)


def test_counters_of_drafts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 32: proposed, accepted by position, and verifications tell how many tokens there are."""
    engine = engine_of(rorqual.load(kernels="fast"), pages=8, slots=3)
    names = [engine.submit(text, SamplingParams(max_tokens=24, ignore_eos=True)) for text in ("The king", "My lord, ")]
    outputs = run(engine, [engine.output(name) for name in names])
    for output in outputs:
        counts = output.counts
        assert counts.accepted == sorted(counts.accepted, reverse=True) and counts.verifications
        assert sum(counts.accepted) <= counts.proposed and counts.accepted[0] <= counts.verifications
        plain = counts.new - counts.verifications - sum(counts.accepted)
        # What no verification gave, a prefill or a plain step did, one token each.
        assert plain >= 1 and counts.computed == counts.prompt + counts.verifications + counts.proposed + plain - 1
    total, stats = engine.stats().counts, engine.stats()
    assert sum(total.accepted) == sum(sum(output.counts.accepted) for output in outputs) > 0
    assert sum(step.accepted for step in stats.recent) == sum(total.accepted)
    assert sum(step.tokens for step in stats.recent) == total.new == 48


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
def test_a_stop_text_over_tokens_never_shows(speculative: bool) -> None:
    """Field case 47: whatever piece of the text is the stop, deltas are what is in front of it; a near miss comes."""
    engine = engine_of(rorqual.load(kernels="fast"), pages=8, slots=3, speculative=speculative)
    prompt = "Who goes there?"
    (whole,) = run(engine, [engine.output(engine.submit(prompt, SamplingParams(max_tokens=24, ignore_eos=True)))])
    text = whole.text
    for start in range(2, len(text) - 9, 5):
        stop = text[start : start + 9]
        params = SamplingParams(max_tokens=24, ignore_eos=True, stop=[stop, stop + "~", stop[1:4] + "~"])
        name = engine.submit(prompt, params)
        output, shown = engine.output(name), ""
        for delta in engine.stream(name):
            shown += delta.text
            assert text.startswith(shown) and len(shown) <= text.index(stop)
        assert shown == output.text == text[: text.index(stop)]
        assert (output.finish_reason, output.completions[0].stopped_by) == ("stop", stop)
    near = SamplingParams(max_tokens=24, ignore_eos=True, stop=[text[-3:] + "~"])
    (output,) = run(engine, [engine.output(engine.submit(prompt, near))])
    assert (output.text, output.finish_reason) == (text, "length")
    assert_clean(engine)


def test_no_delta_has_half_a_character() -> None:
    """Field case 48: characters of three and four bytes, that several tokens hold."""
    model = rorqual.load(kernels="fast")
    assert model.tokenizer is not None
    text = "a 🐳, 日本語 and é ☕!"
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text)
    engine = engine_of(model, pages=8, slots=3, speculative=False)
    name = engine.submit("Say", SamplingParams(max_tokens=len(ids), ignore_eos=True))
    engine._requests[name].lives[0].sampler = Forced(ids)
    output = engine.output(name)
    deltas = [delta.text for delta in engine.stream(name)]
    assert output.token_ids == ids and "" in deltas and len(deltas) == len(ids)
    assert "".join(deltas) == output.text == text and not any("\ufffd" in delta for delta in deltas)
