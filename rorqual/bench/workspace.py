"""One prefill in a process of its own, which then says what it needed beside imports, weights and cache.

    python -m rorqual.bench.workspace FOLDER PREFILL TOKENS CHUNK

prints one line of JSON. `workspace_bytes` is the peak less four things that are there anyway:

    what the process held with the kernels loaded and no model     VmRSS, not its peak, so that nothing hides below one
    pages of mapped files read since then: the weights             RssFile
    parameters copied out of the files at load                     RssAnon
    the cache, as allocated

The peak is that of the prefill alone where the system lets a process forget the one before (Linux).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rorqual.bench.checkpoints import random_ids
from rorqual.bench.fresh import answer
from rorqual.bench.resident import resident_bytes
from rorqual.bench.timing import elapsed
from rorqual.cache.kv_cache import KVCache
from rorqual.config import ModelConfig
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import Backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """What is measured: `prefill` runs the prompt into `cache` and returns rows x layers that ran."""

    cache: KVCache
    prefill: Callable[[], int]


def run(folder: Path, prefill: str, tokens: int, chunk: int) -> dict[str, object]:
    """Prefill so many random tokens with the fast ops; sizes in bytes, times in seconds."""

    def prepared(model: Transformer, ids: Tensor) -> Prefilled:
        sequence = Sequence(model, new_cache(model, tokens))

        def run_all() -> int:
            sequence.prefill(Prompt(ids=ids), mode=prefill, chunk=chunk)
            return sequence.layer_tokens

        return Prefilled(cache=sequence.cache, prefill=run_all)

    return measured(folder, tokens, prepared)


def measured(
    folder: Path,
    tokens: int,
    prepared: Callable[[Transformer, Tensor], Prefilled],
    positions: int | None = None,
) -> dict[str, object]:
    """The readings around a prompt of so many random tokens.

    prepared: (model, ids int64 [tokens]) -> what is to run, its cache allocated. positions: that it needs, `tokens`
    unless given. A checkpoint of fewer is given as many: only angles depend on the number.
    """
    positions = positions or tokens
    Backend("fast").warm()
    gc.collect()
    imported = _sizes()
    config = ModelConfig.from_json(folder)
    if positions > config.max_position_embeddings:
        config = config.replace(max_position_embeddings=positions)
    model = load(folder, kernels="fast", config=config)
    loaded = _sizes()
    made = prepared(model, random_ids(config, tokens, seed=4))
    layer_tokens = 0

    def prefill() -> None:
        nonlocal layer_tokens
        layer_tokens = made.prefill()

    forget_peak()
    seconds = elapsed(prefill)
    ended, cache = _sizes(), made.cache.nbytes
    mapped = ended["RssFile"] - imported["RssFile"]
    copied = max(0, loaded["RssAnon"] - imported["RssAnon"])
    return {
        "peak_rss_bytes": ended["VmHWM"],
        "imported_bytes": imported["VmRSS"],
        "mapped_weight_bytes": mapped,
        "copied_weight_bytes": copied,
        "cache_bytes": cache,
        "workspace_bytes": ended["VmHWM"] - imported["VmRSS"] - mapped - copied - cache,
        "prefill_seconds": seconds,
        "layer_tokens": layer_tokens,
    }


def forget_peak() -> None:
    """VmHWM begins again at what is resident now; where that cannot be done, it stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _sizes() -> dict[str, int]:
    return {name: resident_bytes(name) or 0 for name in ("VmHWM", "VmRSS", "RssFile", "RssAnon")}


if __name__ == "__main__":
    sys.exit(answer(lambda: run(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]))))
