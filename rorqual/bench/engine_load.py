"""An engine under load: short requests, so many at once, a new one in the place of each that ends.

Every row has its own concurrency, with drafts or without. The steps of the concurrency that is judged also say where
the engine's time goes, by the records that it keeps of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from rorqual.bench.checkpoints import random_ids
from rorqual.bench.clocked import Clock, Given
from rorqual.bench.latency import Latency, first_token, per_token
from rorqual.bench.profile import REST
from rorqual.bench.report import Bar, JsonRow
from rorqual.bench.timing import Sample, undisturbed
from rorqual.engine.engine import Engine
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.stats import StepRecord
from rorqual.model.transformer import Transformer

DRAFTS = {False: "no drafts", True: "drafts"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """at_once: requests in flight, a row each; the first is what the others are compared with. judged: the one whose
    speed-up and bookkeeping have bars. waves: requests of a run, in multiples of those at once. new: tokens of
    requests, taken in turn."""

    at_once: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    judged: int = 16
    waves: int = 2
    prompt: int = 32
    new: tuple[int, ...] = (48, 32, 64, 40, 56)

    @property
    def tokens(self) -> int:
        """Of the longest request."""
        return self.prompt + max(self.new)


FULL = Load()
QUICK = Load(at_once=(1, 3), judged=3, prompt=8, new=(4, 3, 5))


@dataclass(slots=True)
class Run:
    """What one load came to."""

    seconds: float
    at_once: int
    outputs: list[RequestOutput]
    steps: tuple[StepRecord, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / self.seconds

    @property
    def full_steps(self) -> list[StepRecord]:
        """Those in which every place was taken and nobody was in its prefill."""
        return [step for step in self.steps if len(step.sequences) == self.at_once and _all_decode(step)]


@dataclass(slots=True)
class Runs:
    """Of one concurrency and setting."""

    runs: list[Run] = field(default_factory=list)

    @property
    def rates(self) -> Sample:
        return Sample.of([run.tokens_per_s for run in self.runs])

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for run in self.runs for output in run.outputs]

    @property
    def full_steps(self) -> list[StepRecord]:
        return [step for run in self.runs for step in run.full_steps]


def load_rows(
    model: Transformer,
    load: Load,
    repeats: int,
    *,
    speedup_bar: Bar | None,
    share_bar: Bar | None,
    stepped: Callable[[], None],
) -> list[JsonRow]:
    """Throughput and latency, a row a concurrency and setting; then where steps of the judged one go.

    Repeats take turns over all of them, so that a busy spell of the machine falls on all. stepped: called after each
    run.
    """
    engines = {drafts: new_engine(model, load, drafts) for drafts in settings(model)}
    for engine in engines.values():
        run_load(engine, load, load.at_once[0], seed=1)
    found = {key: Runs() for key in itertools.product(engines, load.at_once)}
    for repeat, drafts, at_once in itertools.product(range(repeats), engines, load.at_once):
        found[drafts, at_once].runs.append(run_load(engines[drafts], load, at_once, seed=2 + repeat))
        stepped()
    rows = []
    for (drafts, at_once), runs in found.items():
        alone = found[drafts, load.at_once[0]].rates.median
        bar = speedup_bar if at_once == load.judged else None
        rows.append(_throughput(model, load, at_once, drafts, runs, runs.rates.median / alone, bar))
    rows += [_bookkeeping(model, load, drafts, found[drafts, load.judged].full_steps, share_bar) for drafts in engines]
    return rows


def settings(model: Transformer) -> list[bool]:
    """Without drafts, and with them where the model has some."""
    return [False, True] if model.draft is not None else [False]


def new_engine(model: Transformer, load: Load, drafts: bool) -> Engine:
    """Slots and pages for everybody at once, so that nothing but the model's steps is waited for."""
    slots = max(load.at_once)
    return Engine(model, slots=slots, pages=slots * model.layout.pages(load.tokens), speculative=drafts)


def run_load(engine: Engine, load: Load, at_once: int, seed: int) -> Run:
    """Keep so many requests in flight until all have run; greedy, to their last token, prompts that share nothing."""
    lengths = list(itertools.islice(itertools.cycle(load.new), load.waves * at_once))
    prompts = random_ids(engine.model.config, load.prompt * len(lengths), seed=seed).split(load.prompt)
    waiting = iter(list(zip(prompts, lengths, strict=True)))
    outputs: list[RequestOutput] = []
    before = engine.stats().steps

    def submit(count: int) -> None:
        for prompt, new in itertools.islice(waiting, count):
            name = engine.submit(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
            outputs.append(engine.output(name))

    with undisturbed():
        start = time.perf_counter()
        submit(at_once)
        while engine.has_work:
            submit(sum(delta.finish_reason is not None for delta in engine.step()))
        seconds = time.perf_counter() - start
    stats = engine.stats()
    assert stats.steps - before <= len(stats.recent), "the engine keeps fewer steps than a run has"
    return Run(seconds, at_once, outputs, stats.recent[before - stats.steps :])


def profile_row(model: Transformer, load: Load) -> JsonRow:
    """Where a step of the judged concurrency goes, with drafts and without: the engine's own parts, and every op of
    the model and of its drafts, clocked."""
    profiles = {DRAFTS[drafts]: _profile(model, load, drafts) for drafts in settings(model)}
    return {
        "name": "profile",
        "shape": f"a step of {load.judged} requests at once",
        "numerics": model.numerics.name,
        "profile": profiles,
    }


def _profile(model: Transformer, load: Load, drafts: bool) -> list[JsonRow]:
    engine, backend = new_engine(model, load, drafts), model.backend
    run_load(engine, load, load.at_once[0], seed=1)
    clock = Clock(backend.ops(), None)
    model.backend = Given(clock.ops)
    try:
        run = run_load(engine, load, load.judged, seed=2)
    finally:
        model.backend = backend
    # The clock counts every step, prefills included: so do the others here.
    steps, total = len(run.steps), sum(step.seconds for step in run.steps)
    parts = [(name, clock.calls[name], seconds) for name, seconds in clock.seconds.items() if clock.calls[name]]
    parts.append(("engine: plan", steps, sum(step.plan_seconds for step in run.steps)))
    parts.append(("engine: choose and settle", steps, sum(step.other_seconds for step in run.steps)))
    parts.append((REST, steps, total - sum(seconds for _, _, seconds in parts)))
    return [
        {"part": name, "calls": calls / steps, "seconds": seconds / steps, "share": seconds / total}
        for name, calls, seconds in sorted(parts, key=lambda part: -part[2])
    ]


def _throughput(
    model: Transformer, load: Load, at_once: int, drafts: bool, runs: Runs, speedup: float, bar: Bar | None
) -> JsonRow:
    outputs = runs.outputs
    proposed = sum(output.counts.proposed for output in outputs)
    row: JsonRow = {
        "name": "load",
        "shape": f"{at_once} at once, {load.prompt} + {min(load.new)} to {max(load.new)} tokens",
        "at_once": at_once,
        "drafts": drafts,
        "numerics": model.numerics.name,
        "requests": len(outputs),
        "tokens_per_s": asdict(runs.rates),
        "first_token_s": asdict(Latency.of([first_token(output) for output in outputs])),
        "per_token_s": asdict(Latency.of([per_token(output) for output in outputs])),
        "speedup": speedup,
    }
    if proposed:
        row["accepted_share"] = sum(sum(output.counts.accepted) for output in outputs) / proposed
    return row if bar is None else {**row, "bar": bar.as_json(speedup)}


def _bookkeeping(model: Transformer, load: Load, drafts: bool, steps: Sequence[StepRecord], bar: Bar | None) -> JsonRow:
    """Seconds of all steps together, so that a long one counts for what it takes."""
    total = sum(step.seconds for step in steps)
    plan, other, ran, drafted = (
        sum(getattr(step, f"{part}_seconds") for step in steps) for part in ("plan", "other", "model", "draft")
    )
    share = (plan + other) / total
    row: JsonRow = {
        "name": "bookkeeping",
        "shape": f"{load.judged} at once, {len(steps)} steps",
        "drafts": drafts,
        "numerics": model.numerics.name,
        "step_s": asdict(Sample.of([step.seconds for step in steps])),
        "bookkeeping_s": asdict(Sample.of([step.plan_seconds + step.other_seconds for step in steps])),
        "bookkeeping_share": share,
        "plan_share": plan / total,
        "other_share": other / total,
        "model_share": ran / total,
        "draft_share": drafted / total,
    }
    return row if bar is None else {**row, "bar": bar.as_json(share)}


def _all_decode(record: StepRecord) -> bool:
    return all(end - start == 1 + drafts for _, start, end, drafts in record.sequences)
