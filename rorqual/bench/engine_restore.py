"""The first token behind a long prefix that an earlier process has stored, against one that nobody has had.

    python -m rorqual.bench.engine_restore FOLDER STORE PREFIX SUFFIX CHUNK TURN

is one process: it loads the checkpoint, opens the store, asks for one token, and prints one line of JSON. So every
sample is after a restart, with an empty cache; the store is on disk and has no memory tier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rorqual.bench.checkpoints import random_ids
from rorqual.bench.fresh import answer, fresh_process
from rorqual.bench.latency import first_token
from rorqual.bench.report import Bar, JsonRow, TimeRow
from rorqual.bench.timing import Sample, undisturbed
from rorqual.config import ModelConfig
from rorqual.engine.engine import Engine
from rorqual.engine.identity import store_identity
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.model.load import load
from rorqual.model.numerics import MODES
from rorqual.model.transformer import Transformer
from rorqual.store.interface import PageStore
from rorqual.store.opener import open_store

MODULE = "rorqual.bench.engine_restore"
NUMERICS = MODES[0]
WARM_TOKENS = 300
"""Of a prompt that settles threads, kernels and allocators before the one that is measured, in an engine of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """Tokens of the stored prefix, in whole pages, and of what each request has behind it."""

    prefix: int = 4096
    suffix: int = 32
    chunk: int = 512

    def within(self, positions: int, page_tokens: int) -> Restore:
        """Cut to what a model has positions for."""
        most = min(self.prefix, positions - self.suffix - 1)
        return replace(self, prefix=most // page_tokens * page_tokens)


FULL = Restore()
QUICK = Restore(prefix=256, suffix=8, chunk=64)


def restore_row(
    folder: Path, restore: Restore, repeats: int, bar: Bar | None, stepped: Callable[[], None] = lambda: None
) -> TimeRow:
    """Cold and restored in turn, `repeats` times each; `stepped` is called after each process: 1 + 2 x `repeats`."""
    seconds: dict[str, list[float]] = {"cold": [], "restored": []}
    found: list[JsonRow] = []
    with TemporaryDirectory(prefix="rorqual-bench-") as parent:

        def ran(store: str, turn: int) -> JsonRow:
            given = restore.prefix, restore.suffix, restore.chunk, turn
            made = fresh_process(MODULE, folder, Path(parent) / store, *given)
            stepped()
            return made

        ran("kept", 0)
        for turn in range(1, repeats + 1):
            for kind in seconds:
                row = ran("kept" if kind == "restored" else f"empty-{turn}", turn)
                seconds[kind].append(float(str(row["first_token_s"])))
                assert row["restored_tokens"] == (restore.prefix if kind == "restored" else 0), row
                found.append(row)
    return TimeRow(
        name="restore",
        shape=f"first token of {restore.prefix} stored + {restore.suffix} tokens, chunk {restore.chunk}",
        times={kind: Sample.of(taken) for kind, taken in seconds.items()},
        ratio_of=("restored", "cold"),
        bar=bar,
        extra={"numerics": NUMERICS, "restored_tokens": restore.prefix, "restored_bytes": found[-1]["restored_bytes"]},
    )


def run(folder: Path, store: Path, prefix: int, suffix: int, chunk: int, turn: int) -> JsonRow:
    """One process's measurement. The prefix is that of every process, the suffix that of the turn."""
    model = load(folder, numerics=NUMERICS, kernels="fast")
    kept = open_store(store, store_identity(model))
    prompt = torch.cat((random_ids(model.config, prefix, seed=3), random_ids(model.config, suffix, seed=100 + turn)))
    try:
        _ask(model, None, _warm(model.config), chunk)
        with undisturbed():
            output = _ask(model, kept, prompt, chunk)
    finally:
        kept.close()
    counts, layout = output.counts, model.layout
    return {
        "first_token_s": first_token(output),
        "restored_tokens": counts.restored,
        "restored_bytes": counts.restored // layout.page_tokens * layout.page_bytes,
    }


def _warm(config: ModelConfig) -> torch.Tensor:
    return random_ids(config, min(WARM_TOKENS, config.max_position_embeddings - 1), seed=1)


def _ask(model: Transformer, store: PageStore | None, prompt: torch.Tensor, chunk: int) -> RequestOutput:
    """One token, of an engine that has nothing in its cache."""
    pages = model.layout.pages(len(prompt) + 1)
    engine = Engine(model, slots=1, pages=pages, speculative=False, chunk_tokens=chunk, store=store)
    output = engine.output(engine.submit(prompt, SamplingParams(max_tokens=1)))
    while not output.finished:
        engine.step()
    return output


def _main() -> JsonRow:
    folder, store, *numbers = sys.argv[1:]
    prefix, suffix, chunk, turn = map(int, numbers)
    return run(Path(folder), Path(store), prefix, suffix, chunk, turn)


if __name__ == "__main__":
    sys.exit(answer(_main))
