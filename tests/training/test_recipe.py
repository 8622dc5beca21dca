"""A recipe: what a file may say, what is refused and how, and what the presets promise."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.config import presets
from rorqual.errors import ConfigError
from rorqual.training.data.english import English
from rorqual.training.data.prepare import TrainingData
from rorqual.training.data.split import heldout_groups
from rorqual.training.recipe import (
    PRESETS,
    SECTIONS,
    DataRecipe,
    LossRecipe,
    OptimRecipe,
    PhaseRecipe,
    Recipe,
    RunRecipe,
    Section,
)

TINY = presets.load("tiny").without("vision")


def parsed(text: str, folder: Path = Path()) -> Recipe:
    return Recipe.parse(text, "test", folder)


def test_a_recipe_may_say_nothing() -> None:
    empty = parsed("")
    assert empty == Recipe(name="test", model=presets.load("demo"))
    assert empty.data == DataRecipe() and empty.run == RunRecipe()


def test_a_recipe_says_what_differs() -> None:
    found = parsed('[data]\nheldout = ["a*", "b"]\nlong_seq_len = 0\n[optim]\nlr = 1\n[loss]\nreplay = 0.5\n')
    assert found.data == DataRecipe(heldout=("a*", "b"))
    assert found.optim == OptimRecipe(lr=1.0) and type(found.optim.lr) is float
    assert found.loss == LossRecipe(replay=0.5) and found.phases == PhaseRecipe()


BAD_TEXTS = {
    "unknown section": ("[dta]\n", "recipe test: unknown section 'dta'; legal: model, data, loss, phases, optim, run"),
    "no section": ("data = 3", "data must be a section, got 3"),
    "an array of sections": ("[[run]]\nsteps = 1", "run must be a section, got [{'steps': 1}]"),
    "unknown key": ("[run]\nstep = 3", "run.step is unknown; legal: steps, seed, "),
    "another type": ('[run]\nsteps = "many"', "run.steps must be an integer, got 'many'"),
    "a number with a point": ("[run]\nsteps = 3.0", "run.steps must be an integer, got 3.0"),
    "a truth value": ("[optim]\nlr = true", "optim.lr must be a number, got True"),
    "a date": ("[optim]\nlr = 2024-01-01", "optim.lr must be a number, got datetime.date(2024, 1, 1)"),
    "a string for a list": ('[data]\nheldout = "a*"', "data.heldout must be a list of strings, got 'a*'"),
    "a list of others": ("[data]\nheldout = [1]", "data.heldout must be a list of strings, got [1]"),
    "another corpus": ('[data]\ncorpus = "french"', "data.corpus is 'french', must be '' or 'english'"),
    "a corpus of another type": ("[data]\ncorpus = []", "data.corpus is [], must be '' or 'english'"),
    "another autocast": ('[run]\nautocast = "on"', "run.autocast is 'on', must be 'auto' or 'off'"),
    "not TOML": ("[run\n", "recipe test: not TOML ("),
    "an endless integer": ("[run]\nseed = " + "9" * 5000, "recipe test: not TOML ("),
    "nested too deep": ("x = " + "[" * 100_000, "recipe test: not TOML ("),
    "out of range": ("[optim]\nbeta2 = 1.0", "optim.beta2 is 1.0, must be in 0..0.999999"),
    "no number": ("[optim]\nlr = nan", "optim.lr is nan, must be in 0..10"),
    "endless": ("[optim]\nclip = inf", "optim.clip is inf, must be in 0..1000000000"),
    "a bound to the last digit": ("[run]\nseed = -1", "run.seed is -1, must be in 0..9223372036854775807"),
    "too few tokens": ("[data]\nvocab_size = 275", "data.vocab_size is 275, must be in 276..1048576"),
    "a sequence of one": ("[data]\nseq_len = 1", "data.seq_len is 1, must be in 2..1048576"),
    "a long sequence of one": ("[data]\nlong_seq_len = 1", "data.long_seq_len is 1, must be 0 or in 2..1048576"),
    "too long": ("[data]\nseq_len = 4097", "data.seq_len is 4097, must be at most the model's 4096 positions"),
    "too long late": ("[data]\nlong_seq_len = 4097", "data.long_seq_len is 4097, must be at most the model's 4096 pos"),
    "a model's number": ("model = 3", "model must be a preset, a path, or a section with 'base'"),
    "a model's list": ('model = ["demo"]', "model must be a preset, a path, or a section with 'base'"),
    "no base": ("[model]\nhidden_size = 96", "model must be a preset, a path, or a section with 'base'"),
    "another base": ("[model]\nbase = 3", "model must be a preset, a path, or a section with 'base'"),
    "no such model": (
        'model = "dmeo"',
        "model: dmeo does not exist and is no preset; presets: v4.1-flash, tiny, mid, demo",
    ),
    "no field": ('[model]\nbase = "demo"\nhiden_size = 96', "hiden_size is not a field of ModelConfig; legal: "),
    "no field of mine": ('[model]\nbase = "demo"\nroles = []', "roles is not a field of ModelConfig; legal: "),
    "a bad field": ('[model]\nbase = "demo"\nhidden_size = "wide"', "hidden_size must be an integer in"),
    "a bad part": ('[model]\nbase = "demo"\nvision = true', "vision must be "),
    "a table for a part": ('[model]\nbase = "demo"\n[model.rope_scaling]\nfactor = 4', "rope_scaling must be "),
    "eyes": (
        'model = "tiny"',
        "model: it has a vision tower, which is not trained; take a preset without one, as 'demo'",
    ),
    "eyes below": ('[model]\nbase = "tiny"\nhc_eps = 1e-5', "model: it has a vision tower"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_bad_recipe_is_one_line(case: str) -> None:
    text, message = BAD_TEXTS[case]
    with pytest.raises(ConfigError) as error:
        parsed(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"nowhere\.toml is neither a file nor a preset; presets: demo, drafts, tiny$"
    ):
        Recipe.load(tmp_path / "nowhere.toml")
    path = tmp_path / "mine.toml"
    path.write_bytes(b'model = "demo"  # caf\xe9')
    with pytest.raises(
        ConfigError, match=r"^recipe: .*mine\.toml cannot be read: 'utf-8' codec can't decode byte 0xe9"
    ):
        Recipe.load(path)
    path.write_text("[data]\nseq_len = 64", encoding="utf-8")
    assert (Recipe.load(path).name, Recipe.load(path).data.seq_len) == ("mine", 64)

    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ConfigError, match=r"^recipe: .*mine\.toml cannot be read: .*Permission denied"):
        Recipe.load(path)


def test_a_models_path_is_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf_dict()), encoding="utf-8")
    for text in ('model = "config.json"', '[model]\nbase = "config.json"', '[model]\nbase = "."'):
        assert parsed(text, tmp_path).model == TINY
    assert parsed('[model]\nbase = "config.json"\nhc_eps = 1e-5', tmp_path).model == TINY.replace(hc_eps=1e-5)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="model_type is missing"):
        parsed('model = "config.json"', tmp_path)


@pytest.mark.parametrize("kind", SECTIONS.values())
def test_every_field_has_its_legal_values(kind: type[Section]) -> None:
    """The defaults are among them, and one beyond either bound is refused by name, from Python as from a file."""
    kind()
    for each in dataclasses.fields(kind):
        default: Any = each.default
        name = f"{kind.NAME}.{each.name}"
        if isinstance(default, tuple):
            continue
        if isinstance(default, str):
            assert default in kind.CHOICES[each.name]
            continue
        for bound, away in zip(kind.RANGES[each.name], (-1, 1), strict=True):
            assert getattr(kind(**{each.name: bound}), each.name) == bound
            assert type(getattr(kind(**{each.name: bound}), each.name)) is type(default)
            with pytest.raises(ConfigError, match=rf"^{name} is .*, must be "):
                kind(**{each.name: bound + away})
            with pytest.raises(ConfigError, match=rf"^{name} is .*, must be "):
                dataclasses.replace(kind(), **{each.name: bound + away})
        for other in (None, "1", True, [1]):
            with pytest.raises(ConfigError, match=rf"^{name} must be a"):
                kind(**{each.name: other})


def test_python_may_say_more() -> None:
    assert DataRecipe(heldout=["a*"]).heldout == ("a*",)  # type: ignore[arg-type]  # a list, as from JSON
    assert DataRecipe(heldout=("a*", "b")).heldout == ("a*", "b")
    assert type(OptimRecipe(lr=1).lr) is float
    with pytest.raises(ConfigError, match=r"^data\.heldout must be a list of strings, got 'a\*'$"):
        DataRecipe(heldout="a*")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^run\.autocast is None, must be 'auto' or 'off'$"):
        dataclasses.replace(RunRecipe(), autocast=None)  # type: ignore[arg-type]


def test_the_whole_is_checked_however_it_is_made() -> None:
    recipe = Recipe(name="x", model=TINY)
    with pytest.raises(ConfigError, match=r"^model: it has a vision tower"):
        recipe.replace(model=presets.load("tiny"))
    short = TINY.replace(max_position_embeddings=256)
    with pytest.raises(ConfigError, match=r"^data\.seq_len is 512, must be at most the model's 256 positions$"):
        recipe.replace(model=short)
    data = DataRecipe(seq_len=256, long_seq_len=257)
    with pytest.raises(ConfigError, match=r"^data\.long_seq_len is 257, must be at most the model's 256 positions$"):
        Recipe(name="x", model=short, data=data)


def test_phases_begin_at_their_step() -> None:
    phases = PhaseRecipe(sparse_from=0.3, quantise_from=0.0, quantise_weights_from=1.0, draft_from=0.95)
    recipe = Recipe(name="x", model=TINY, phases=phases, loss=LossRecipe(replay=0.5), run=RunRecipe(steps=10))
    told = [recipe.phase_at(step) for step in range(10)]
    assert [phase.sparse for phase in told] == [False] * 3 + [True] * 7
    assert all(phase.quantise_caches for phase in told), "0 is from the first step"
    assert not any(phase.quantise_weights for phase in told), "1 is never"
    assert not any(phase.draft for phase in told), "later than the last step begins"
    assert {phase.replay for phase in told} == {0.5}
    drafting = recipe.replace(phases=dataclasses.replace(phases, draft_from=0.9))
    assert [drafting.phase_at(step).draft for step in (8, 9)] == [False, True]
    assert not drafting.replace(model=TINY.without("drafts")).phase_at(9).draft


@pytest.mark.parametrize(
    ("long_seq_len", "long_from", "first"), [(64, 0.0, 0), (64, 0.7, 7), (64, 0.71, 8), (64, 1.0, 10), (0, 0.0, 10)]
)
def test_sequences_grow_at_their_step(long_seq_len: int, long_from: float, first: int) -> None:
    data = DataRecipe(seq_len=32, long_seq_len=long_seq_len, long_from=long_from)
    recipe = Recipe(name="x", model=TINY, data=data, run=RunRecipe(steps=10))
    assert [recipe.seq_len_at(step) for step in range(10)] == [32] * first + [64] * (10 - first)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    assert recipe.data.micro_tokens >= recipe.data.seq_len
    last = recipe.phase_at(recipe.run.steps - 1)
    assert last.sparse and last.quantise_caches and last.quantise_weights and last.draft, "in the end all is on"


def test_the_demos_last_tenth_is_long() -> None:
    demo = Recipe.load("demo")
    lengths = [demo.seq_len_at(step) for step in range(demo.run.steps)]
    tenth = demo.run.steps // 10
    assert lengths == [512] * (demo.run.steps - tenth) + [4096] * tenth


def test_what_the_demo_holds_out_exists_and_is_held_out_whole() -> None:
    demo = Recipe.load("demo").data
    documents = list(English().documents())
    held = heldout_groups(documents, demo.heldout, demo.heldout_fraction)
    trained = [document.name for document in documents if document.family not in held]
    for pattern in demo.heldout:
        kinds = {d.name.split("/")[0] for d in documents if fnmatch.fnmatchcase(d.name, pattern)}
        assert kinds in ({"bbe", "web"}, {"plays", "chat"}), pattern
        assert not fnmatch.filter(trained, pattern), pattern
    assert len(held) == len(demo.heldout), "a book or a play each"
    assert {name.split("/")[0] for name in trained} == {"bbe", "web", "plays", "chat"}


def test_a_third_of_the_demos_sequences_are_chat(tmp_path: Path) -> None:
    demo = Recipe.load("demo")
    small = demo.replace(data=dataclasses.replace(demo.data, corpus="", heldout=(), vocab_size=400))
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"The whale rose, number {number}. " * 100)
    turns = [{"role": "user", "content": "What rose? " * 20}, {"role": "assistant", "content": "The whale. " * 20}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    data = TrainingData.prepare(small, [tmp_path], tmp_path / "cache", seed=0)
    markers = torch.tensor([data.tokenizer.token_to_id(text) for text in ("<｜User｜>", "<｜Assistant｜>")])
    chats = [bool(torch.isin(sequence.ids, markers).any()) for step in range(25) for sequence in data.batch(step)]
    assert len(chats) == 25 * 16
    assert sum(chats) == 132, "33 of every 100"
