"""Checkpoints: whole or not at all, and refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_training import FakeLearner, recipe
from safetensors import SafetensorError

from rorqual.errors import CheckpointError, InputError
from rorqual.training import state as module
from rorqual.training.recipe import Recipe
from rorqual.training.state import (
    State,
    check_recipe,
    checkpoints,
    copy_into,
    read,
    recipe_document,
    save,
)


def made(step: int = 3, **changes: Any) -> State:
    shared = torch.arange(12.0)
    fields = {
        "step": step,
        "tokens": 64 * step,
        "seconds": 0.1 + step,
        "processes": 1,
        "logs": {"metrics.jsonl": 17},
        "recipe": recipe_document(recipe()),
        "fingerprint": "abc",
        "parameters": {
            "a.weight": shared[:6].view(2, 3).T,
            "b": shared,
            "c": torch.tensor(2.5, dtype=torch.bfloat16),
            "same as b": shared,
        },
        "optimiser": {
            "state": {0: {"momentum": torch.full((2,), 1e-30), "step": 4}, "x": (1.5, None, [True, "word"])},
            "empty": {},
            "rate": 0.1,
        },
    }
    return State(**(fields | changes))


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    saved = made()
    found = read(save(tmp_path, saved, "{}", keep=2))
    for field in dataclasses.fields(State):
        one, other = getattr(saved, field.name), getattr(found, field.name)
        if field.name == "parameters":
            assert one.keys() == other.keys()
            assert all(
                torch.equal(value, other[name]) and value.dtype == other[name].dtype for name, value in one.items()
            )
        elif field.name == "optimiser":
            assert torch.equal(one["state"][0].pop("momentum"), other["state"][0].pop("momentum"))
            assert one == other
            assert isinstance(other["state"]["x"], tuple)
        else:
            assert one == other, field.name


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        save(tmp_path, made(step), "{}", keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000010", "step-00000011"]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, made(seconds=1.0), "{}", keep=2)
    assert read(save(tmp_path, made(seconds=2.0), "{}", keep=2)).seconds == 2.0


@pytest.mark.parametrize(("stage", "kind"), [("save_file", SafetensorError), ("sync", OSError)])
def test_a_write_that_fails_leaves_the_one_before(
    stage: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, made(1), "{}", keep=1)

    def full(*_: object) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(module, stage, full)
    with pytest.raises(CheckpointError, match=r"step-00000002: cannot be written \(No space left on device\)"):
        save(tmp_path, made(2), "{}", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read(tmp_path / "step-00000001").step == 1


def test_what_a_killed_writer_left_is_no_checkpoint(tmp_path: Path) -> None:
    left = tmp_path / ".unfinished-step-00000009"
    left.mkdir(parents=True)
    (left / "state.json").write_text("{")
    assert checkpoints(tmp_path) == []
    save(tmp_path, made(), "{}", keep=1)
    assert not left.exists()


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damage_is_named(file: str, damage: str, tmp_path: Path) -> None:
    folder = save(tmp_path, made(), "{}", keep=1)
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if damage == "cut":
        (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="step-00000003: damaged"):
        read(folder)


def test_another_format_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, made(), "{}", keep=1)
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(document | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read(folder)


BASE = recipe()


def with_(section: str, **values: Any) -> Recipe:
    return BASE.replace(**{section: dataclasses.replace(getattr(BASE, section), **values)})


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (with_("run", steps=9), r"run\.steps was 8, is 9 \(the schedule depends on the steps\)"),
        (with_("run", seed=1), r"run\.seed was 0, is 1"),
        (with_("data", seq_len=8), r"data\.seq_len was 16, is 8"),
        (with_("optim", lr=0.5), r"optim\.lr was 0\.02, is 0\.5"),
        (with_("data", heldout=("b*",)), r"data\.heldout was \[\], is \['b\*'\]"),
        (BASE.replace(model=BASE.model.replace(routed_scaling_factor=1.25)), r"model\.routed_scaling_factor"),
    ],
)
def test_a_recipe_that_differs_is_refused(asked: Recipe, named: str) -> None:
    with pytest.raises(InputError, match=f"resume: the recipe differs: {named}"):
        check_recipe(recipe_document(BASE), recipe_document(asked))


def test_what_no_parameter_depends_on_may_change() -> None:
    asked = with_("run", eval_every=1, eval_sequences=9, sample_every=3, save_every=5, keep=7)
    assert check_recipe(recipe_document(BASE), recipe_document(asked.replace(name="other"))) == []
    assert check_recipe(recipe_document(BASE), recipe_document(with_("data", micro_tokens=16))) == ["data.micro_tokens"]


def test_another_model_is_refused_before_anything_is_copied() -> None:
    parameters = FakeLearner().parameters
    saved = {name: torch.zeros_like(value) for name, value in parameters.items()}
    before = {name: value.detach().clone() for name, value in parameters.items()}
    for wrong, named in (
        ({name: saved[name] for name in saved if name != "norm.weight"}, "norm.weight is only in the model"),
        (saved | {"extra": torch.zeros(1)}, "extra is only in the checkpoint"),
        (saved | {"norm.weight": torch.zeros(4)}, r"norm.weight was float32 \[4\], is float32 \[8\]"),
        (saved | {"norm.weight": torch.zeros(8).double()}, "norm.weight was float64"),
    ):
        with pytest.raises(InputError, match=named):
            copy_into(parameters, wrong)
        assert all(torch.equal(parameters[name], value) for name, value in before.items())
    copy_into(parameters, saved)
    assert not any(value.any() for value in parameters.values())
