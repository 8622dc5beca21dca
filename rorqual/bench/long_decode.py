"""A decoded token at 4,096 and at 1,048,576 tokens of context: the part `decode` of `rorqual bench context`.

Both stand in one cache of the release's layout, filled without a prefill, and take turns, every index path in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rorqual.bench.checkpoints import random_ids
from rorqual.bench.clocked import Clock, Given
from rorqual.bench.report import Bar, TimeRow
from rorqual.bench.stack import composition, decode_work, stacked_model
from rorqual.bench.timing import Sample, elapsed, undisturbed
from rorqual.cache.kv_cache import KVCache
from rorqual.engine.sequence import Sequence, fill
from rorqual.model.transformer import Transformer
from rorqual.ops.cpu import Path as IndexPath
from rorqual.ops.cpu import missing
from rorqual.ops.dispatch import fast_ops

BARS: dict[IndexPath, Bar] = {"vnni": Bar(at_most=1.10), "vector": Bar(at_most=1.2)}
WARM, CLOCKED = 2, 1
"""Steps of each contestant before those that count, and after them, with a clock on each op."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contexts:
    """Tokens of context after the last step."""

    short: int = 4096
    long: int = 1 << 20


FULL = Contexts()
QUICK = Contexts(short=64, long=512)


def decode_rows(
    folder: Path, contexts: Contexts, repeats: int, judged: bool, stepped: Callable[[], None] = lambda: None
) -> list[TimeRow]:
    """One row an index path; one that this CPU lacks is listed as such.

    Args:
        folder: checkpoint of two layers.
        judged: whether its widths are those that the bars are set for.
        stepped: called after every turn, `repeats` + 3 times.
    """
    able = [path for path in BARS if not missing(path)]
    clocks = {path: Clock(fast_ops(path)) for path in able}
    model = stacked_model(folder, Given(fast_ops()))
    steps = len(able) * (WARM + repeats + CLOCKED)
    sequences, facts = stand(model, contexts, steps)
    seconds, parts = decode(model, sequences, clocks, repeats, stepped)
    facts |= {"numerics": "fp32", "composition": composition(model.config)}
    rows = []
    for path, bar in BARS.items():
        lacks = missing(path)
        times = {name: Sample.of(seconds[path, name]) for name in sequences} if not lacks else {}
        rows.append(
            TimeRow(
                name="decode",
                shape=f"1 token at {contexts.long:,} and {contexts.short:,} tokens (the last {steps} of them)",
                times=times,
                ratio_of=("long", "short"),
                measured="long",
                work=decode_work(model.config, contexts.long),
                bar=bar if judged else None,
                unavailable=f"not on this CPU: needs {', '.join(lacks)}" if lacks else None,
                extra={"path": path, **facts, "ops": {} if lacks else parts[path]},
            )
        )
    return rows


def stand(model: Transformer, contexts: Contexts, steps: int) -> tuple[dict[str, Sequence], dict[str, object]]:
    """Two filled sequences, `steps` tokens before their contexts end; and what the cache holds."""
    layout, wanted = model.layout, {"long": contexts.long, "short": contexts.short}
    pages = {name: layout.pages(tokens) for name, tokens in wanted.items()}
    cache = KVCache(model.config, layout, pages=sum(pages.values()), slots=len(wanted))
    tables = torch.arange(sum(pages.values())).split(list(pages.values()))
    sequences = {
        name: Sequence(model, cache, slot=slot, block_table=table)
        for slot, (name, table) in enumerate(zip(wanted, tables, strict=True))
    }

    def fill_both() -> None:
        for name, sequence in sequences.items():
            fill(sequence, wanted[name] - steps, seed=sequence.slot)

    fill_seconds = elapsed(fill_both)
    facts: dict[str, object] = {
        "cache_bytes": cache.nbytes,
        "global_bytes": layout.global_bytes_logical(contexts.long),
        "fill_seconds": fill_seconds,
    }
    return sequences, facts


def decode(
    model: Transformer,
    sequences: dict[str, Sequence],
    clocks: dict[IndexPath, Clock],
    repeats: int,
    stepped: Callable[[], None],
) -> tuple[dict[tuple[str, str], list[float]], dict[str, dict[str, dict[str, float]]]]:
    """Seconds of every counted step, by path and sequence; and of each op in one more step of each."""
    plain = {path: Given(fast_ops(path)) for path in clocks}
    tokens = random_ids(model.config, len(clocks) * (WARM + repeats + CLOCKED), seed=5).tolist()
    seconds: dict[tuple[str, str], list[float]] = {(path, name): [] for path in clocks for name in sequences}
    parts: dict[str, dict[str, dict[str, float]]] = {path: {} for path in clocks}
    with undisturbed():
        for turn in range(WARM + repeats + CLOCKED):
            clocked = turn >= WARM + repeats
            for at, (path, clock) in enumerate(clocks.items()):
                model.backend = Given(clock.ops) if clocked else plain[path]
                token = torch.tensor([tokens[turn * len(clocks) + at]])
                for name, sequence in sequences.items():
                    clock.reset()
                    taken = elapsed(partial(sequence.append, token))
                    if clocked:
                        parts[path][name] = clock.seconds | {"step": taken}
                    elif turn >= WARM:
                        seconds[path, name].append(taken)
            stepped()
    return seconds, parts
