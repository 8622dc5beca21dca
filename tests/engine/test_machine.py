"""Requests submitted, run, aborted, forked, rewound, preempted and evicted in any order: never a wrong token.

Too few pages and slots, all poisoned when they are freed; mostly over a store that does not take every page, loses
some, has wrong bytes for some, and is slow. Whoever ran undisturbed has the bits of a cold run alone.
Who came through the prefix index, or lost its pages, has the tokens that a prefill of its whole text would have chosen,
but where two are as near as the last bits of such a prefill are (exact replay; `full` prefill).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engine_stores import Unreliable, in_turns
from engines import Forced, Said, asked, assert_clean, engine_of, run, said
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import random_ids
from torch import Tensor

from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.engine.engine import Engine
from rorqual.engine.noise import TOKEN, Noise
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.plan import StepPlan
from rorqual.engine.sampler import Sampler, probabilities
from rorqual.engine.sequence import Prompt, new_cache
from rorqual.engine.sequence import Sequence as Single
from rorqual.engine.speculation import Ask, Drafts
from rorqual.model.load import load
from rorqual.model.step import SequenceOutput
from rorqual.model.tap import Recorder, Tap, Tie
from rorqual.model.transformer import Transformer

EXAMPLES, RULES = 16, 40
"""Of the bounded run. `make test-all` runs `FULL_EXAMPLES` more: 100,000 rules."""
FULL_EXAMPLES = 100_000 // RULES
WINDOW = PAGE = 8
PAGES, SLOTS = 18, 4
LENGTHS = 1, 7, 16, 24, 25, 41, 64, 90
APART = 0.25
"""Between log-probabilities of one text, computed in two ways: some 1e-6, and more behind a cache entry that stood on a
rounding boundary. So of a completion the sum is bounded, and how far a choice is from the best. A wrong row in a cache
moves every one of them by more."""
TURNED = 4
"""Entries on a rounding boundary that may be turned before a larger sum is an error."""


@cache
def model() -> Transformer:
    """`tiny` with short windows and pages, so that few tokens cross many of both."""
    folder = Path(mkdtemp(prefix="rorqual-test-")) / "m"
    write_random(presets.load("tiny").without("vision").replace(sliding_window=WINDOW), folder, seed=5)
    return load(folder, kernels="fast", page_tokens=PAGE)


@cache
def prompt(base: int, length: int, tail: int) -> Tensor:
    """The beginning of one of few texts, then one of few ends."""
    return torch.cat((random_ids(length, seed=base), random_ids(tail, seed=1000 + tail)))


def params_of(kind: str, new: int, n: int, stops: bool) -> SamplingParams:
    stop_ids = range(0, 512, 20) if stops else ()
    sampled = {} if kind == "greedy" else {"temperature": 0.8, "seed": new if kind == "seeded" else None}
    return asked(new, n=n, stop_ids=stop_ids, **sampled)


@cache
def single() -> Engine:
    return engine_of(model(), pages=4 * PAGES, slots=SLOTS, chunk_tokens=40, speculative=False, replay="exact")


@cache
def cold(ids: tuple[int, ...], kind: str, new: int, n: int, stops: bool, prefill: str) -> list[Said]:
    """What each completion of a request says alone, without drafts and without a prefix."""
    engine, params = single(), params_of(kind, new, n, stops)
    (output,) = run(engine, [engine.output(engine.submit(list(ids), params, prefill=prefill))])
    assert not output.counts.hit
    engine.drop_cached()
    return [said(output, at) for at in range(n)]


def repeated(ids: Sequence[int], tokens: list[int], prefill: str) -> Said:
    """What a cold run says to a prompt when its tokens are given."""
    engine = single()
    name = engine.submit(list(ids), asked(len(tokens)), prefill=prefill)
    engine._requests[name].lives[0].sampler = Forced(tokens)
    (output,) = run(engine, [engine.output(name)])
    engine.drop_cached()
    return said(output)


def forced(ids: Sequence[int], tap: Tap | None = None) -> Tensor:
    """fp32 logits [N, V] of a `full` prefill of a text."""
    (output,) = Single(model(), new_cache(model(), len(ids))).prefill(
        Prompt(ids=torch.tensor(ids)), mode="full", logits_from=0, tap=tap
    )
    assert output.logits is not None
    return output.logits


def agreeing(prompt: Sequence[int], said: Said) -> Tensor | None:
    """Logits, one row a token, of a prefill of the text that says the same of it within `APART`.

    As it is, or with up to `TURNED` cache entries turned that stand on a rounding boundary: decode and a prefill sum in
    other orders, such an entry may round either way, and in a random model all that follows moves with it.
    """
    tokens, logprobs = said
    start, told = len(prompt), torch.tensor(logprobs).double()

    def look(tap: Tap | None) -> tuple[float, Tensor]:
        rows = forced([*prompt, *tokens], tap)[start - 1 : -1]
        truth = rows.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float((told - truth).abs().sum()), rows

    def noting(turned: list[Tie]) -> Recorder:
        tap = Recorder("nothing")
        tap.ties, tap.resolve = [], turned
        return tap

    apart, rows = look(None)
    turned: list[Tie] = []
    while apart >= APART:
        if len(turned) == TURNED:
            return None
        look(noted := noting(turned))
        places = {tie.place for tie in turned}
        ties = [tie for tie in noted.ties or () if tie.place not in places]
        if not ties:
            return None
        tried = [(*look(noting([*turned, tie])), tie) for tie in ties]
        apart, rows, tie = min(tried, key=lambda one: one[0])
        turned.append(tie)
    return rows


class Guesses:
    """Stands for a speculator's `propose`: what a cold run said next, now and then wrong, so that all that a
    verification can come to does come. Whoever draws without a seed, or is no request of ours, gets the model's own."""

    def __init__(self, engine: Engine, seed: int) -> None:
        assert engine.speculator is not None
        self._inner, self._draw, self._width = engine.speculator.propose, random.Random(seed), engine.speculator.width
        self.truth: dict[Sampler, list[int]] = {}

    def pay(self, requests: int, rows: int) -> bool:
        """Stands for a speculator's judgement: now and then rows wait for their windows."""
        return self._draw.random() < 0.7

    def __call__(self, asks: Sequence[Ask], rows: int) -> list[Drafts]:
        found = self._inner(asks, rows) if any(ask.sampler not in self.truth for ask in asks) else []
        for at, ask in enumerate(asks):
            truth = self.truth.get(ask.sampler)
            if truth is None:
                continue
            ids = truth[ask.sampler.count : ask.sampler.count + min(ask.room, self._draw.randrange(self._width + 1))]
            own = Drafts(ids=[token if self._draw.random() < 0.8 else (token + 1) % 500 for token in ids])
            found[at : at + 1] = [own]
        return found


class Asked:
    """One request as submitted. wanted: of a cold run; None for who draws without a seed, or was forked off.

    moved: forked off, or rewound. prefills: (completion, write floor), as often as a slot began anew for it.
    """

    def __init__(
        self, output: RequestOutput, params: SamplingParams, kind: str, prefill: str, wanted: list[Said] | None = None
    ) -> None:
        self.output, self.params, self.kind, self.prefill, self.wanted = output, params, kind, prefill, wanted
        self.moved = False
        self.prefills: list[tuple[str, int]] = []


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Asked] = {}
        self.count = 0

    @initialize(
        replay=st.sampled_from(["exact", "exact", "bounded"]),
        seed=st.integers(0, 99),
        stored=st.sampled_from([True, True, False]),
    )
    def begin(self, replay: str, seed: int, stored: bool) -> None:
        self.replay = replay
        # A clock that counts: how many drafts are verified must not depend on the time that a step took.
        self.engine = engine_of(
            model(),
            pages=PAGES,
            slots=SLOTS,
            chunk_tokens=40,
            replay=replay,
            store=Unreliable(model(), seed) if stored else None,
            clock=itertools.count().__next__,
        )
        if self.engine.restorer is not None:
            in_turns(self.engine, seed, held_pages=5 if seed % 2 else 50)
            self.engine.restorer.patience = seed
        self.guesses = Guesses(self.engine, seed)
        self.engine.speculator.propose = self.guesses  # type: ignore[method-assign, union-attr]
        self.engine.speculator.worth.pays = self.guesses.pay  # type: ignore[method-assign, union-attr]
        inner = self.engine.runner.run

        def watched(plan: StepPlan, *args: Any) -> list[SequenceOutput]:
            for own in plan.sequences:
                if own.reset:
                    self.asked[own.request.rpartition("/")[0]].prefills.append((own.request, own.write_floor))
            outputs = inner(plan, *args)
            assert all(output.logits is None or bool(output.logits.isfinite().all()) for output in outputs)
            return outputs

        self.engine.runner.run = watched  # type: ignore[method-assign]

    @rule(
        base=st.integers(0, 1),
        length=st.sampled_from(LENGTHS),
        tail=st.integers(0, 3),
        kind=st.sampled_from(["greedy", "greedy", "seeded", "free"]),
        new=st.sampled_from([1, 2, 9, 30]),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stops=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "priority": st.integers(0, 2),
                "salt": st.sampled_from(["", "", "", "other"]),
                "speculative": st.booleans(),
                "prefill": st.sampled_from(["full", "full", "ced"]),
            }
        ),
    )
    def submit(
        self, base: int, length: int, tail: int, kind: str, new: int, n: int, stops: bool, options: dict[str, Any]
    ) -> None:
        ids, prefill = prompt(base, length, tail), str(options["prefill"])
        wanted = None if kind == "free" else cold(tuple(ids.tolist()), kind, new, n, stops, prefill)
        name, self.count = str(self.count), self.count + 1
        params = params_of(kind, new, n, stops)
        self.engine.submit(ids, params, request=name, **options)
        self.asked[name] = Asked(self.engine.output(name), params, kind, prefill, wanted)
        self._settle_chance(name, wanted)

    def _settle_chance(self, name: str, wanted: list[Said] | None) -> None:
        """Nothing is left to it: what has no seed draws from a known one, as if it had been found by chance."""
        for at, live in enumerate(self.engine._requests[name].lives):
            if live.request.params.seed is None:
                live.sampler.noise = Noise(self.count, at)
            if wanted is not None:
                self.guesses.truth[live.sampler] = wanted[at][0]

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        self._steps(times)

    @rule(times=st.integers(4, 15))
    def step_on(self, times: int) -> None:
        self._steps(times)

    def _steps(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            self.engine.check_integrity()
            self._check_ended()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.engine.abort(name)
        assert not any(f"{name}/{at}" in self.engine.kv for at in range(3))
        self._check_ended()

    @precondition(lambda self: self._singles())
    @rule(data=st.data(), new=st.sampled_from([1, 12]))
    def fork(self, data: st.DataObject, new: int) -> None:
        parent = self.asked[data.draw(st.sampled_from(self._singles()))]
        name, self.count = str(self.count), self.count + 1
        params = params_of(parent.kind, new, 1, False)
        prompt_tokens = len(parent.output.prompt_token_ids) + len(parent.output.token_ids)
        if prompt_tokens + new - 1 > PAGES * PAGE:
            return
        self.engine.fork(parent.output.request, name, params)
        self.asked[name] = Asked(self.engine.output(name), params, parent.kind, parent.prefill)
        self.asked[name].moved = True
        self._settle_chance(name, None)

    @precondition(lambda self: self._singles())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        own = self.asked[data.draw(st.sampled_from(self._singles()))]
        own.moved = True
        self.engine.rewind(own.output.request, data.draw(st.integers(0, len(own.output.token_ids))))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(sorted(self.asked))))

    @rule()
    def evict(self) -> None:
        self.engine.drop_cached()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self._steps(1)
        assert not self.asked
        assert self.engine.restorer is None or not self.engine.restorer.fetcher.held
        assert_clean(self.engine)

    def _singles(self) -> list[str]:
        return sorted(name for name, own in self.asked.items() if len(own.output.completions) == 1)

    def _check_ended(self) -> None:
        for name in [name for name in self.asked if name not in self.engine]:
            self._check(self.asked.pop(name))

    def _check(self, own: Asked) -> None:
        output = own.output
        assert output.finished
        alone = [(f"{output.request}/0", 0)]
        for at, done in enumerate(output.completions):
            tokens, logprobs = said(output, at)
            assert done.finish_reason in ("length", "stop", "abort") and len(tokens) == len(logprobs)
            if done.finish_reason == "length":
                assert len(tokens) == own.params.max_tokens
            if not tokens:
                continue
            if not own.moved and own.prefills in ([], alone):
                wanted = own.wanted[at] if own.wanted else repeated(output.prompt_token_ids, tokens, own.prefill)
                assert (tokens, logprobs) == (wanted[0][: len(tokens)], wanted[1][: len(tokens)])
                assert done.finish_reason == "abort" or len(tokens) == len(wanted[0])
            elif self.replay == "exact" and own.prefill == "full":
                self._check_choices(own, at)

    def _check_choices(self, own: Asked, at: int) -> None:
        """Each token is one that a prefill of the text in front of it would choose, or nearly."""
        tokens, _ = says = said(own.output, at)
        params, rows = own.params, agreeing(own.output.prompt_token_ids, says)
        assert rows is not None, (own.output.request, at)
        if own.kind == "free":
            return
        noise = Noise(params.seed, at)
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            score, near = row.double(), APART
            if own.kind == "seeded":
                draws = noise.exponential(TOKEN, place, len(row))
                score, near = (probabilities(row, params) / draws).log(), APART / params.temperature
            assert float(score.max() - score[token]) < near, (own.output.request, at, place)


class LongMachine(Machine):
    """The same, for as long as `make test-all` runs it."""


OPTIONS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=RULES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestMachine = Machine.TestCase
TestMachine.settings = OPTIONS
TestLongMachine = pytest.mark.full(LongMachine.TestCase)
TestLongMachine.settings = settings(OPTIONS, max_examples=FULL_EXAMPLES)
