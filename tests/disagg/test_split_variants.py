"""Configs unlike the release's cross the seam as they are run by one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import PAGE, random_ids
from splits import assert_both_clean, joint, split_of, split_said

from rorqual.checkpoint.random import write_random
from rorqual.config import CacheFormats, ModelConfig, presets
from rorqual.disagg.packing import planned
from rorqual.disagg.prefill import PrefillWorker
from rorqual.disagg.transport import InProcess
from rorqual.errors import InputError
from rorqual.model.load import load


def plan(ratios: list[int], kv: list[int], index: list[int], candidate: int) -> ModelConfig:
    return (
        presets.load("tiny")
        .without("vision", "drafts", "engram")
        .replace(
            compress_ratios=tuple(ratios),
            num_hidden_layers=len(ratios),
            kv_source_layer_ids=tuple(kv),
            index_source_layer_ids=tuple(index),
            candidate_source_layer_id=candidate,
        )
    )


VARIANTS = {
    "draft targets below the seam": presets.load("tiny").replace(dspark_target_layer_ids=(1, 2, 4)),
    "engram in the decoder": presets.load("tiny").replace(engram_layer_ids=(1, 4)),
    "engram where the decoder begins": presets.load("tiny").replace(engram_layer_ids=(0, 3)),
    "candidates from before the seam": plan([0, 2, 2, 2, 2], [1, 3], [1, 3, 4], 1),
    "no layer before the seam": plan([4, 4, 4], [0], [0, 2], 0),
    "tails of 4 and 2": plan([0, 4, 2, 1], [1, 2, 3], [1, 2, 3], -1),
    "windows in bf16": presets.load("tiny").replace(cache=CacheFormats(window="bf16", index_key="bf16")),
}
CARRIED = {"draft targets below the seam": 2 * 96 * 4, "candidates from before the seam": 3 * 4}
"""Bytes of a row, in fp32."""
LENGTHS = 3, 45, 103


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "streams") for name in VARIANTS), ("draft targets below the seam", "rings")]
)
def test_it_is_the_joint_run(name: str, mode: str, tmp_path: Path) -> None:
    write_random(VARIANTS[name], tmp_path / "model", seed=3)
    options: dict[str, Any] = {"page_tokens": PAGE, "kernels": "plain"}
    model = load(tmp_path / "model", **options)
    encoder = model if mode == "rings" else load(tmp_path / "model", part="encoder", **options)
    prompts = [random_ids(n, seed=n) for n in LENGTHS]
    wanted = [joint(model, ids, 3) for ids in prompts]
    assert planned(model, 45, "streams").carried == 16 * CARRIED.get(name, 0)
    split = split_of(model, encoder=encoder, handover=mode)
    # Sizes that are not the planner's are refused, and then nothing is handed over.
    assert split_said(split, prompts, 3) == wanted
    assert_both_clean(split)


def test_a_model_without_a_seam_is_refused_by_name(tmp_path: Path) -> None:
    write_random(plan([0, 0, 0], [], [], -1), tmp_path / "model", seed=3)
    with pytest.raises(InputError, match="part: this model has no KV source and so no decoder of its own; legal: all"):
        load(tmp_path / "model", part="encoder")
    model = load(tmp_path / "model", page_tokens=PAGE, kernels="plain")
    with pytest.raises(InputError, match="model: it has no KV source, so its layers cannot be split"):
        PrefillWorker(model, InProcess(), pages=4)
    assert planned(model, 10, "streams").streams > 0
