"""Field case 18 at the released window and page: chunks of 1, 3, 127, 128, 129 and whole give the same logits.

Through the kernels, and with fp32 caches, so that no entry stands on a rounding boundary: what is left is the order of
summation.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import random_ids

from rorqual.checkpoint.random import write_random
from rorqual.config import CacheFormats, presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

TOKENS = 270
EXACT = CacheFormats(main="fp32", index_key="fp32", window="fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = Path(tmp_path_factory.mktemp("window")) / "m"
    config = presets.load("tiny").without("vision").replace(sliding_window=128, cache=EXACT)
    write_random(config, folder, seed=5, weights="plain")
    return load(folder, kernels="fast")


@pytest.fixture(scope="module")
def whole(model: Transformer) -> dict[str, torch.Tensor]:
    return {mode: last_rows(model, mode, None) for mode in ("full", "ced")}


def last_rows(model: Transformer, mode: str, chunk: int | None) -> torch.Tensor:
    """Logits of the last window of positions, which every mode and chunk computes."""
    ids = random_ids(TOKENS, seed=6)
    sequence = Sequence(model, new_cache(model, TOKENS))
    outputs = sequence.prefill(Prompt(ids=ids), mode=mode, chunk=chunk, logits_from=TOKENS - 128)
    rows = [o.logits for o in outputs if o.logits is not None and o.end > TOKENS - 128]
    return torch.cat(rows)[-128:]


@pytest.mark.parametrize("mode", ["full", "ced"])
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 3, 127, 128, 129])
def test_chunks_at_the_released_window(model: Transformer, whole: dict[str, Any], mode: str, chunk: int) -> None:
    torch.testing.assert_close(last_rows(model, mode, chunk), whole[mode], rtol=1e-4, atol=1e-4)
