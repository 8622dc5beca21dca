"""A request trace replayed against an engine on the clock: what users wait for, with shared prefixes and without.

A trace says how long prompts and answers are and which blocks prompts have in common, not what is in them: each block
becomes random ids that are the same wherever the block is. Everything is scaled to what the model can hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from rorqual.bench.checkpoints import random_ids
from rorqual.bench.latency import Latency, first_token, per_token
from rorqual.bench.report import JsonRow
from rorqual.bench.timing import Sample, undisturbed
from rorqual.config import ModelConfig
from rorqual.engine.engine import Engine
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.model.transformer import Transformer
from rorqual.planner.traces import formats, mooncake, synthetic
from rorqual.planner.traces.request import MICROSECONDS, Request

PREFIXES = ("shared", "apart")
SEEDS = 1 << 62
"""Ids of blocks that a trace does not name begin here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """requests: the trace's first so many. tokens: of the longest one, prompt and answer, unless the model has fewer.
    time_scale: seconds of the replay for a second of the synthetic trace; other traces keep their time."""

    requests: int = 32
    tokens: int = 4096
    slots: int = 16
    time_scale: float = 50.0
    seed: int = 0


FULL = Replay()
QUICK = Replay(requests=4, tokens=512, slots=2, time_scale=0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """due: seconds after the first one. new: tokens of the answer."""

    due: float
    prompt: list[int]
    new: int


def trace_rows(
    model: Transformer, replay: Replay, trace: Path | None, time_scale: float | None, stepped: Callable[[], None]
) -> list[JsonRow]:
    """A row with the trace's shared prefixes, and one in which every request is a tenant of its own.

    Args:
        trace: a file in one of the planner's formats; None for the synthetic one.
        time_scale: instead of the default.
        stepped: called after each replay.

    Raises:
        InputError: a trace that cannot be read.
    """
    requests, block_tokens = _requests(replay, trace)
    scale = time_scale if time_scale is not None else 1.0 if trace is not None else replay.time_scale
    tokens = min(replay.tokens, model.config.max_position_embeddings)
    arrivals = scaled(requests, block_tokens, model.config, tokens, scale)
    rows: list[JsonRow] = []
    for prefix in PREFIXES:
        engine = Engine(model, slots=replay.slots, pages=replay.slots * model.layout.pages(tokens))
        # Compiled, read and settled before the clock starts; too short for a page that somebody could find again.
        engine.submit(arrivals[0].prompt[: model.layout.page_tokens // 2], SamplingParams(max_tokens=2))
        while engine.has_work:
            engine.step()
        with undisturbed():
            found, seconds = replayed(engine, arrivals, apart=prefix == "apart")
        rows.append(_row(engine, arrivals, prefix, scale, found, seconds))
        stepped()
    return rows


def _requests(replay: Replay, trace: Path | None) -> tuple[list[Request], int]:
    """The first requests, and the tokens of a block; 0 where the trace names none."""
    if trace is None:
        made = synthetic.generate(replay.requests, replay.seed)
        return [Request(1000 * ms, tokens, new, ids) for ms, tokens, new, ids in made], mooncake.BLOCK_TOKENS
    found = formats.detect(str(trace))
    return list(islice(formats.requests(str(trace), found), replay.requests)), found.block_tokens


def scaled(
    requests: Sequence[Request], block_tokens: int, config: ModelConfig, tokens: int, time_scale: float
) -> list[Arrival]:
    """Requests as an engine takes them, the longest of at most `tokens`; each has at least 1 token and 2 new ones.

    block_tokens: of the trace's blocks, 0 where it has none: then no two prompts have anything in common.
    """
    longest = max(request.input_tokens + request.output_tokens for request in requests)
    scale = min(1.0, (tokens - 3) / max(1, longest))
    block = max(1, int((block_tokens or mooncake.BLOCK_TOKENS) * scale))
    made: list[Arrival] = []
    now = first = requests[0].time_us
    for number, request in enumerate(requests):
        now = max(now, request.time_us)  # a trace's clock may run backwards, ours does not
        length = max(1, int(request.input_tokens * scale))
        names = [name % SEEDS for name in request.ids]
        while block * len(names) < length:
            names.append(SEEDS + (number << 24) + len(names))
        prompt = [token for name in names for token in random_ids(config, block, seed=name).tolist()]
        made.append(
            Arrival(
                due=time_scale * (now - first) / MICROSECONDS,
                prompt=prompt[:length],
                new=max(2, int(request.output_tokens * scale)),
            )
        )
    return made


def replayed(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    apart: bool,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[tuple[float, RequestOutput]], float]:
    """([when each was due on the clock, its output], seconds from the first arrival to the last token).

    One thread submits and steps, so a request may reach the engine a step after it was due; waits are counted from when
    it was due. clock: the engine's.
    """
    start, found = clock(), []
    waiting = list(reversed(arrivals))
    while waiting or engine.has_work:
        while waiting and start + waiting[-1].due <= clock():
            arrival = waiting.pop()
            name = engine.submit(
                arrival.prompt,
                SamplingParams(max_tokens=arrival.new, ignore_eos=True),
                salt=str(len(waiting)) if apart else "",
            )
            found.append((start + arrival.due, engine.output(name)))
        if engine.has_work:
            engine.step()
        elif waiting:
            sleep(max(0.0, start + waiting[-1].due - clock()))
    return found, clock() - start


def _row(
    engine: Engine,
    arrivals: Sequence[Arrival],
    prefix: str,
    time_scale: float,
    found: Sequence[tuple[float, RequestOutput]],
    seconds: float,
) -> JsonRow:
    outputs = [output for _, output in found]
    prompt, new = (sum(getattr(output.counts, name) for output in outputs) for name in ("prompt", "new"))
    stats = engine.stats()
    return {
        "name": "trace",
        "shape": f"{len(outputs)} requests in {arrivals[-1].due:.3g} s, {prompt:,} + {new:,} tokens",
        "prefix": prefix,
        "numerics": engine.model.numerics.name,
        "drafts": engine.speculative,
        "time_scale": time_scale,
        "first_token_s": asdict(Latency.of([first_token(output, due) for due, output in found])),
        "per_token_s": asdict(Latency.of([per_token(output) for output in outputs])),
        "tokens_per_s": asdict(Sample.of([new / seconds])),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "hit_tokens": sum(output.counts.hit for output in outputs),
        "replayed_tokens": sum(output.counts.replayed for output in outputs),
        "evictions": stats.evictions,
        "preemptions": stats.preemptions,
    }
