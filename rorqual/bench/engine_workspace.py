"""One prompt through an engine in a process of its own, which then says what it needed beside the model and the cache.

    python -m rorqual.bench.engine_workspace FOLDER TOKENS CHUNK

prints one line of JSON, as `rorqual.bench.workspace` does of a prefill without an engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from rorqual.bench.fresh import answer
from rorqual.bench.workspace import Prefilled, measured
from rorqual.engine.engine import Engine
from rorqual.engine.params import SamplingParams
from rorqual.model.transformer import Transformer


def run(folder: Path, tokens: int, chunk: int) -> dict[str, object]:
    """Submit so many random tokens and step until the first new one; sizes in bytes, times in seconds."""

    def prepared(model: Transformer, ids: Tensor) -> Prefilled:
        engine = Engine(model, slots=1, pages=model.layout.pages(tokens), speculative=False, chunk_tokens=chunk)

        def prefill() -> int:
            output = engine.output(engine.submit(ids, SamplingParams(max_tokens=1)))
            while not output.finished:
                engine.step()
            return output.counts.layer_tokens

        return Prefilled(cache=engine.cache, prefill=prefill)

    # One position more than the prompt has: the new token's.
    return measured(folder, tokens, prepared, positions=tokens + 1)


if __name__ == "__main__":
    sys.exit(answer(lambda: run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
