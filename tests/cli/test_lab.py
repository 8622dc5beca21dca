"""`rorqual lab` as its user calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rorqual.analysis.fingerprint import fingerprint
from rorqual.analysis.quality_texts import (
    heldout_documents,
    id_documents,
    run_data,
    run_documents,
    text_documents,
)
from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.tokenizer import read_tokenizer
from rorqual.cli import main
from rorqual.cli.init import distinct_keys
from rorqual.cli.lab import VERBS, minutes, spelled
from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.training.data.documents import Document as Text
from rorqual.training.data.documents import Turn
from rorqual.training.data.prepare import TrainingData
from rorqual.training.recipe import DataRecipe, Recipe
from rorqual.training.state import recipe_document

WINDOW = 16 + 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny").without("vision")
    write_random(config, folder, 1, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return folder


def small(model: Path, out: Path) -> list[str]:
    words = f"lab quality --model {model} --out {out} --lengths 16 --prompts 2 --drafts 0 --kernels fast"
    return words.split()


def rows(count: int, length: int = WINDOW) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 250, (count, length))


def test_lab_lists_its_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: rorqual lab VERB [ARGUMENTS]\n\nStudies of a trained model")
    for verb in VERBS:
        assert f"  {verb.name} " in text and verb.help in text
    assert main(["lab"]) == 2
    capsys.readouterr()
    assert main(["lab", "qualty"]) == 2
    named = ", ".join(verb.name for verb in VERBS)
    assert capsys.readouterr().err == f"rorqual: no verb 'lab qualty'; the verbs are {named}\n"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_study_describes_itself(verb, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    assert main(["lab", verb.name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"rorqual lab {verb.name}" in text and (verb.load().__doc__ or "").split("\n")[0] in text
    assert main(["lab", verb.name, "--nonsense"]) == 2
    assert f"(see rorqual lab {verb.name} --help)" in capsys.readouterr().err


def test_quality_writes_a_document_and_a_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids, out = tmp_path / "held-out.npz", tmp_path / "out"
    np.savez(ids, one=rows(1)[0], two=rows(2)[1])
    assert main([*small(model, out), "--ids", str(ids)]) == 0
    shown = capsys.readouterr().out
    document = json.loads((out / "quality.json").read_text())
    assert document["command"] == (
        "rorqual lab quality --model tiny --ids held-out.npz --prompts 2 --lengths 16 --drafts 0 --kernels fast"
    )
    assert document["windows"]["documents"] == ["one", "two"] and document["seed"] == 0
    assert document["prompts"] == {"16": 2, "all": 2} and document["kernels"] == "fast"
    assert len(document["model"]["fingerprint"]) == 64 and document["machine"]["torch"] == torch.__version__
    # A prompt of a window's length: the decoder runs on all of it, so `ced` is `full`.
    gap = next(d for d in document["differences"] if d["variant"] == "bf16 caches, ced")
    assert gap["largest"] == 0 and gap["bar"]["reached"]
    # A hit needs more than a window: no prompt has the exact replay, and its bar says so.
    replay = next(d for d in document["differences"] if d["variant"] == "exact replay")
    assert replay["bar"]["reached"] is None and "+- 0.001 + 2 se: not measured" in shown
    text = (out / "quality.md").read_text()
    assert f"`{document['command']}`" in text and "no plain export" in text
    for row in document["variants"]:
        assert row["name"] in shown and row["name"] in text
    assert str(tmp_path) not in text + json.dumps(document)


@pytest.mark.parametrize("suffix", [".json", ".npy", ".safetensors"])
def test_ids_come_in_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    ids, values = tmp_path / f"ids{suffix}", rows(3)
    if suffix == ".json":
        ids.write_text(json.dumps(values.tolist()))
    elif suffix == ".npy":
        np.save(ids, values.astype(np.uint16))
    else:
        save_file({"ids": torch.from_numpy(values)}, ids)
    found = id_documents(ids, presets.load("tiny"))
    assert [d.ids.tolist() for d in found] == values.tolist() and len({d.name for d in found}) == 3


def test_text_is_read_by_the_models_tokenizer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael.")
    (tmp_path / "b.jsonl").write_text('{"text": "Loomings"}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    config, tokenizer = presets.load("tiny"), read_tokenizer(model / "tokenizer.json")
    found = text_documents([tmp_path], tokenizer, config)
    assert [d.name for d in found] == ["a.txt", "b.jsonl:1"], "a conversation is no text"
    assert found[0].ids[0] == config.bos_token_id and found[0].ids[-1] == config.eos_token_id
    assert tokenizer.decode(found[0].ids[1:-1].tolist()) == "Call me Ishmael."
    assert main([*small(model, tmp_path / "out"), "--data", str(tmp_path)]) == 2
    assert "no document has the 144 tokens of a window, the longest of 2 has" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training run, all but the training."""
    folder = tmp_path_factory.mktemp("runs") / "sea"
    folder.mkdir()
    texts = folder / "texts"
    texts.mkdir()
    for name in "abc":
        (texts / f"{name}.txt").write_text(f"Document {name} is about whales. " * 20)
    recipe = Recipe.load("tiny")
    settings = DataRecipe(vocab_size=290, seq_len=32, batch_tokens=64, heldout=("b.*",), heldout_fraction=0.0)
    recipe = recipe.replace(data=settings)
    data = TrainingData.prepare(recipe, [texts], folder / "data", recipe.run.seed)
    stated = {"recipe": recipe_document(recipe), "data": [str(texts)], "fingerprint": data.fingerprint}
    (folder / "run.json").write_text(json.dumps(stated))
    shutil.copytree(model, folder / "model")
    data.tokenizer.save(str(folder / "model" / "tokenizer.json"))
    return folder


def test_a_run_gives_what_it_held_out(run: Path) -> None:
    tokenizer = read_tokenizer(run / "model" / "tokenizer.json")
    (held,) = run_documents(run, tokenizer)
    assert held.name == "b.txt" and held.ids.dtype == torch.int64
    assert tokenizer.decode(held.ids.tolist(), skip_special_tokens=True) == "Document b is about whales. " * 20
    assert run_data(run).recipe.data.heldout == ("b.*",)


def test_a_run_that_does_not_fit_is_refused(run: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run: the model's tokenizer is not that of"):
        run_documents(run, read_tokenizer(model / "tokenizer.json"))
    changed = tmp_path / "sea"
    shutil.copytree(run, changed)
    stated = json.loads((changed / "run.json").read_text())
    (changed / "run.json").write_text(json.dumps(stated | {"fingerprint": "x"}))
    with pytest.raises(InputError, match="have changed since it was trained"):
        run_data(changed)
    for damaged in ("{", "[]", '{"recipe": {}}'):
        (changed / "run.json").write_text(damaged)
        with pytest.raises(InputError, match="is not the folder of a finished training run"):
            run_data(changed)


def test_the_demos_corpus_gives_what_its_recipe_holds_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus's packages are not installed everywhere, so another stands in."""
    texts = [Text(name=f"{v}/{b}", text=f"{v} {b}", group=b) for v in ("bbe", "web") for b in ("Ruth", "Mark", "Job")]
    texts.append(Text(name="chat/Ruth", turns=(Turn("user", "hello"),), group="Ruth"))
    stand_in = SimpleNamespace(documents=lambda: iter(texts))
    monkeypatch.setattr("rorqual.analysis.quality_texts.English", lambda: stand_in)
    config, tokenizer = presets.load("tiny"), read_tokenizer(model / "tokenizer.json")
    recipe = DataRecipe(corpus="english", heldout=("bbe/Ruth",), heldout_fraction=0.0)
    found = heldout_documents(recipe, tokenizer, config)
    assert [d.name for d in found] == ["bbe/Ruth", "web/Ruth"]
    assert tokenizer.decode(found[1].ids[1:-1].tolist()) == "web Ruth"
    for other, message in (
        (DataRecipe(), "has no corpus of its own"),
        (DataRecipe(corpus="english", heldout_fraction=0.0), "holds nothing out"),
    ):
        with pytest.raises(InputError, match=message):
            heldout_documents(other, tokenizer, config)


def test_language_hands_the_run_to_its_report(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = {}

    def report(model, corpus, **options):  # type: ignore[no-untyped-def]
        called.update(options, model=model, corpus=corpus)
        options["note"]("counting")
        return {
            "against": {"ratio": 0.5, "reached": True},
            "positions": {"no_step": None, "steps": {"window": {"none": None}}},
            "samples": {"known_reached": False},
            "tokens": 7,
        }

    # The tokenizer of this run is not one that the model's Engram was hashed for.
    warmed = []
    backend = SimpleNamespace(warm=lambda: warmed.append(True))
    opened = {"sea": SimpleNamespace(backend=backend)}
    monkeypatch.setattr("rorqual.model.load.load", lambda path: opened[path.parent.name])
    monkeypatch.setattr("rorqual.analysis.language.language_report", report)
    out = tmp_path / "language.json"
    assert main(["lab", "language", str(run), "--out", str(out)]) == 0
    streams = capsys.readouterr()
    assert called["model"] is opened["sea"] and warmed and called["corpus"].recipe.data.vocab_size == 290
    assert called["twin"] is None and called["plot"] == tmp_path / "language.png"
    document = json.loads(out.read_text())
    assert document["tokens"] == 7 and document["command"] == "rorqual lab language sea"
    assert document["model"] == {"name": "model", "fingerprint": fingerprint(run / "model", "model")}
    assert "counting" in streams.err
    judged = ("against", "positions", "samples")
    assert [line.split() for line in streams.out.splitlines() if line.startswith(judged)] == [
        ["against", "yes"],
        ["positions.no_step", "undecided"],
        ["samples.known", "no"],
    ]
    assert main(["lab", "language", str(run), "--out", str(tmp_path / "no" / "x.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "512,a"], "lengths: '512,a' is not legal"),
        (["--lengths", "32,16"], "lengths: [32, 16] is not legal"),
        (["--prompts", "1"], "prompts: 1 is not legal; legal: at least 2"),
        (["--drafts", "-1"], "drafts: -1 is not legal"),
        (["--ids", "missing.json"], "ids: missing.json does not exist"),
        (["--data", "missing.txt"], "data: missing.txt is neither a file nor a folder"),
        (["--run", "missing"], "run: missing is not the folder of a finished training run"),
        (["--ids", "{ids}", "--data", "x"], "data: given twice; legal: one of --data, --ids and --run"),
        (["--ids", "{bad}"], "ids outside the vocabulary; legal ids are 0..511"),
        (["--ids", "{text}"], "cannot be read"),
        (["--ids", "{ids}", "--numerics", "int8"], "numerics: 'int8' is not one of fp32, native"),
        (["--ids", "{ids}", "--plain", "nowhere"], "plain: nowhere is not a folder"),
    ],
)
def test_mistakes_are_one_line(
    model: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / f"{name}.json") for name in ("ids", "bad", "text")}
    Path(files["ids"]).write_text(json.dumps(rows(1)[0].tolist()))
    Path(files["bad"]).write_text(json.dumps([512] * WINDOW))
    Path(files["text"]).write_text("[1, 2")
    given = [argument.format_map(files) for argument in arguments]
    assert main([*small(model, tmp_path / "out"), *given]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "out" / "quality.json").exists()


def test_commands_and_times_are_spelled() -> None:
    paths = {"model": None, "data": [Path("/a/b.txt"), Path("c d")], "ids": Path("x.json")}
    numbers = {"seed": (3, 0), "chunk": (512, 512)}
    assert spelled("quality", paths, numbers) == "rorqual lab quality --data b.txt --data 'c d' --ids x.json --seed 3"
    assert (minutes(41), minutes(720)) == ("41 s", "12 min")


@pytest.mark.parametrize("given", [True, False])
def test_a_runs_plain_export_is_compared_with(
    run: Path, tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another is given, or another model."""
    asked: list[Path | None] = []

    def stopped(*_: object, plain: Path | None, **__: object) -> None:
        asked.append(plain)
        raise InputError("enough")

    monkeypatch.setattr("rorqual.analysis.quality.run_quality", stopped)
    copy, other = tmp_path / "sea", tmp_path / "other"
    shutil.copytree(run, copy)
    lines = [f"lab quality --run {copy} --out {tmp_path / 'out'}"]
    lines += [f"{lines[0]} --plain {other}", f"{lines[0]} --model {copy / 'model'}"]
    if given:
        shutil.copytree(copy / "model", copy / "model-plain")
    assert [main(line.split()) for line in lines] == [2, 2, 2]
    assert asked == [copy / "model-plain" if given else None, other, None]


def test_a_runs_data_have_one_place(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "language", str(run), "--cache", str(tmp_path / "data")]) == 2
    assert "cache: a run has its own data; legal: RUN or --cache" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()) and not (run / "language.json").exists()
