"""A bounded hit through the engine is the truncated reference: the goldens `*-replay`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Forced, assert_clean, engine_of, run
from models import GOLDENS, golden
from torch import Tensor

from rorqual.analysis.compare import Outcome, fp32_outcome, native_outcome
from rorqual.analysis.verify import Case, open_case, unstable_rows
from rorqual.engine.engine import Engine
from rorqual.engine.params import SamplingParams
from rorqual.engine.plan import StepPlan
from rorqual.model.step import SequenceOutput

CASES = {"fp32-replay": (32, 48, 96), "native-replay": (64,)}


def forced_logits(engine: Engine, ids: Tensor, forced: list[int]) -> tuple[list[Tensor], int]:
    """Logits of the prompt's last token and of each forced one; tokens of the prompt that were found."""
    rows: list[Tensor] = []
    inner = engine.runner.run

    def tapped(plan: StepPlan, *args: Any) -> list[SequenceOutput]:
        outputs = inner(plan, *args)
        for own, output in zip(plan.sequences, outputs, strict=True):
            if own.logits:
                assert output.logits is not None
                rows.append(output.logits[-1].clone())
        return outputs

    engine.runner.run = tapped  # type: ignore[method-assign]
    name = engine.submit(ids, SamplingParams(max_tokens=len(forced) + 1, ignore_eos=True))
    engine._requests[name].lives[0].sampler = Forced([*forced, forced[-1]])
    (output,) = run(engine, [engine.output(name)])
    engine.runner.run = inner  # type: ignore[method-assign]
    assert output.token_ids[:-1] == forced
    return rows, output.counts.hit


def compared(case: Case, name: str, ours: Tensor, rows: slice = slice(None)) -> Outcome:
    theirs, unstable = case.stored[name][rows], unstable_rows(case, name)
    if not case.native:
        return fp32_outcome(name, ours, theirs, {})
    return native_outcome(name, ours, theirs, case.noise(name), None if unstable is None else unstable[rows])


@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize(("name", "hit"), [(name, hit) for name, hits in CASES.items() for hit in hits])
def test_a_bounded_hit_is_the_truncated_reference(name: str, hit: int, kernels: str) -> None:
    """Another request leaves the pages; a hit adopts them, and its logits are the golden's, decode steps included."""
    case, model = open_case(GOLDENS / name), golden(name, kernels)
    ids, forced = case.stored["input_ids"][0], case.stored["decode.ids"].tolist()
    assert tuple(case.readme["hits"]) == CASES[name]
    engine = engine_of(model, slots=2, chunk_tokens=len(ids), speculative=False)
    run(engine, [engine.output(engine.submit(ids[:hit], SamplingParams(max_tokens=1)))])
    rows, found = forced_logits(engine, ids, forced)
    assert found == hit and len(rows) == 1 + len(forced)
    for outcome in (
        compared(case, f"hit{hit}.logits", rows[0][None], slice(-1, None)),
        compared(case, f"hit{hit}.decode.logits", torch.stack(rows[1:])),
    ):
        assert outcome.ok, outcome
    assert_clean(engine)


@pytest.mark.parametrize("name", CASES)
def test_a_cold_request_is_the_ced_reference(name: str) -> None:
    case = open_case(GOLDENS / name)
    ids, forced = case.stored["input_ids"][0], case.stored["decode.ids"].tolist()
    engine = engine_of(golden(name, "fast"), slots=2, chunk_tokens=len(ids), speculative=False)
    rows, found = forced_logits(engine, ids, forced)
    assert not found
    assert compared(case, "ced.logits", rows[0][None], slice(-1, None)).ok
    assert compared(case, "ced.decode.logits", torch.stack(rows[1:])).ok
