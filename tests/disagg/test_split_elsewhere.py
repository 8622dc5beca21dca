"""Workers whose model and cache are on another device than the parcels between them (`tests.elsewhere`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engines import Said, asked, said
from models import GOLDENS, PAGE, golden, random_ids

from rorqual.disagg.pair import Split
from rorqual.model import load as loading
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.planner.traffic import HANDOVERS
from tests.elsewhere import elsewhere

CASE = "fp32-dspark"


@contextmanager
def other_device() -> Iterator[None]:
    """Another device, which `load` takes for CUDA. Its tensors are wrapped, and inference tensors cannot be."""
    with pytest.MonkeyPatch.context() as patch, elsewhere() as device:
        patch.setattr(torch, "inference_mode", torch.no_grad)
        patch.setattr(loading, "chosen_device", lambda name: device if name == "cuda" else torch.device(name))
        yield


def split_said(model: Transformer, encoder: Transformer, handover: str) -> Said:
    split = Split(model, encoder=encoder, handover=handover, pages=16, slots=1, chunk_tokens=32, speculative=False)
    name = split.submit(random_ids(19, seed=2), asked(2))
    while name in split:
        split.step()
    output = split.output(name)
    assert output.counts.handed == 19
    return said(output)


@pytest.mark.parametrize(
    "handover", [mode if mode == "streams" else pytest.param(mode, marks=pytest.mark.full) for mode in HANDOVERS]
)
def test_a_split_on_another_device_says_the_same(handover: str) -> None:
    here = golden(CASE)
    wanted = split_said(here, here, handover)
    with other_device():
        there = load(GOLDENS / CASE, page_tokens=PAGE, kernels="plain", device="cuda")
        assert there.device != here.device
        assert split_said(there, there, handover) == wanted
