"""Where a decode step goes: every part counted once, and all of them together are the step."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.bench import kernels, profile
from rorqual.bench.clocked import Clock
from rorqual.bench.profile import REST, WARM, kernels_profile, profile_row
from rorqual.checkpoint.random import write_random
from rorqual.cli import main
from rorqual.cli.bench import show
from rorqual.config import presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.model.load import load
from rorqual.ops.dispatch import Ops, Regions, fast_ops, reference_ops

OP_NAMES = {field.name for field in fields(Ops)} - {"name", "regions"}


def test_every_op_and_region_is_clocked() -> None:
    assert set(Clock(reference_ops(), None).seconds) == OP_NAMES
    never: dict[str, Any] = {field.name: lambda *args: None for field in fields(Regions)}
    clock = Clock(replace(reference_ops(), regions=Regions(**never)), None)
    assert set(clock.seconds) == OP_NAMES | {f"region.{field.name}" for field in fields(Regions)}
    assert clock.ops.regions is not None
    clock.ops.regions.moe(1)
    assert clock.calls["region.moe"] == 1 and sum(clock.calls.values()) == 1
    clock.reset()
    assert not any(clock.calls.values()) and not any(clock.seconds.values())


def test_a_call_inside_a_call_counts_once() -> None:
    ops = reference_ops()
    clock = Clock(replace(ops, linear=lambda x: clock.ops.rotate(x), rotate=lambda x: x + 1), None)
    assert clock.ops.linear(1) == 2
    assert clock.calls["linear"] == 1 and clock.calls["rotate"] == 0
    with pytest.raises(TypeError):
        clock.ops.rotate()
    assert clock.ops.rotate(2) == 3 and clock.calls["rotate"] == 2, "a call that failed does not end the counting"


def test_parts_of_a_step_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random(presets.load("tiny"), tmp_path / "tiny", seed=2)
    model = load(tmp_path / "tiny", kernels="fast")
    sequence, backend = Sequence(model, new_cache(model, 32)), model.backend
    sequence.prefill(Prompt(ids=torch.arange(3, 20)))
    row: Any = profile_row({"fast": sequence}, torch.arange(3, 6 + WARM), "decode")
    assert model.backend is backend and sequence.length == 20 + WARM
    assert row["shape"] == "decode: 1 token at 17 tokens of context, mean of 3"
    parts = {part["part"]: part for part in row["profile"]["fast"]}
    layers = model.config.num_hidden_layers
    assert parts[REST]["calls"] == 1
    if fast_ops().regions is None:
        assert parts["sparse_attention"]["calls"] == layers
    else:
        assert parts["region.finish"]["calls"] == parts["region.begin"]["calls"] == layers
        assert "experts" not in parts and "region.pack_layer" not in parts
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    seconds = [part["seconds"] for part in row["profile"]["fast"]]
    assert seconds == sorted(seconds, reverse=True) and parts[REST]["seconds"] > 0
    show({"rows": [row], "command": "c", "machine": {}, "roofline": {}, "notes": []})
    assert REST in capsys.readouterr().out


def test_kernels_say_what_a_step_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cases", lambda sizes: [])
    (row,) = kernels.run_kernels(quick=True, profile=True)
    assert isinstance(row, dict) and row["shape"] == f"tiny: 1 token at 24 tokens of context, mean of {profile.STEPS}"
    found: Any = kernels_profile(quick=True)["profile"]
    assert set(found) == {"plain", "fast"}
    plain = {part["part"] for part in found["plain"]}
    assert {"linear", "experts", "sparse_attention", REST} <= plain and not any("region" in name for name in plain)


def test_who_has_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "memory", "--profile"]) == 2
    assert "profile: memory has none; legal: with kernels, model and engine" in capsys.readouterr().err
