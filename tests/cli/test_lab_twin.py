"""`rorqual lab twin` and `rorqual lab speed` as their user calls them, and with them `rorqual lab language`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from rorqual.analysis.language import LanguagePlan
from rorqual.analysis.text_quality import SamplingPlan
from rorqual.cli.app import Verb, main
from rorqual.training.data.sources import Files
from tests.training.models import SMALL_MODEL

VERBS = tuple(Verb(name=name, target=f"rorqual.cli.lab_twin:{name}", help=name) for name in ("twin", "speed"))
PLAN = LanguagePlan(books=("held*",), windows=2, sampling=SamplingPlan(samples=2, replies=2))
WORDS = "the whale sea ship sailor harpoon breathed surfaced dived closed over under and of it again slowly"
RECIPE = f"""
{SMALL_MODEL}[data]
vocab_size = 400
seq_len = 64
batch_tokens = 128
micro_tokens = 128
heldout = ["held*", "*:3", "*:4"]
heldout_fraction = 0.0
[run]
steps = 2
eval_every = 0
sample_every = 0
save_every = 2
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(draw.choices(WORDS.split(), k=count)) + "."

    for name in ("one", "held"):
        (folder / f"{name}.txt").write_text(text(400), encoding="utf-8")
    talks = [{"messages": [{"role": role, "content": text(6)} for role in ("user", "assistant") * 2]} for _ in range(5)]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, talks)), encoding="utf-8")
    (folder.parent / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_it_describes_itself(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb.name, "--help"], VERBS) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (verb.load().__doc__ or "").split("\n")[0] in text


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("speed demo --repeats 0", "repeats: 0 is not legal; legal: at least 1"),
        ("twin nowhere", "nowhere is neither a file nor a preset"),
        ("speed tiny --out FILE --data FILE", "cannot be a folder"),
    ],
)
def test_one_line_for_a_mistake(line: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.txt"
    file.write_text("text", encoding="utf-8")
    assert main(line.replace("FILE", str(file)).split(), VERBS) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_memory_is_stated_once_as_the_processs(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a high-water mark with both learners in it: no stage and no learner has one of its own."""
    spread = {"median": 0.5, "min": 0.4, "max": 0.6}
    stage = {
        "learners": {name: {"tokens_per_s": spread} for name in ("model", "twin")},
        "ratio": spread,
        "reached": True,
        "bf16_products": True,
    }
    monkeypatch.setattr("rorqual.analysis.training_speed.training_speed", lambda *_, **__: stage)
    monkeypatch.setattr("rorqual.training.metrics.peak_bytes", lambda device: 2_500_000_000)
    recipe, out = texts.parent / "recipe.toml", tmp_path / "out"
    assert main(f"speed {recipe} --data {texts} --repeats 1 --out {out}".split(), VERBS) == 0
    document = json.loads((out / "speed.json").read_text(encoding="utf-8"))
    assert document["process_peak_bytes"] == 2_500_000_000 and document["stages"]["step 0"] == stage
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "2.5 GB" in line] == [
        "peak memory of the process, with both learners and optimisers in it: 2.5 GB"
    ]
    assert any(line.split()[-2:] == ["yes", "bf16"] for line in lines)


@pytest.mark.full
def test_from_training_to_the_comparison(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run, twin, out = texts.parent / "recipe.toml", tmp_path / "run", tmp_path / "twin", tmp_path / "out"
    shared = f"--data {texts} --cache {run / 'data'}"
    assert main(f"train {recipe} --data {texts} --out {run}".split()) == 0
    assert main(f"twin {recipe} {shared} --out {twin}".split(), VERBS) == 0
    monkeypatch.setattr("rorqual.analysis.language.LanguagePlan", lambda: PLAN)
    assert main(f"lab language {run} --twin {twin}".split()) == 0
    report = json.loads((run / "language.json").read_text(encoding="utf-8"))
    assert report["command"].startswith("rorqual lab language")
    assert [row["name"] for row in report["documents"] if row["judged"]] == ["held.txt"]
    assert set(report["heldout"]["books"]["bits_a_character"]) == {"model", "twin", "kneser_ney", "kneser_ney_text"}
    assert report["replies"]["count"] == 2
    against = report["against_twin"]
    assert (against["step"], against["tokens"], against["lr"], against["lr_table"]) == (2, 256, 2e-3, 1e-2)

    # The same without the run's folder, as the shipped model is measured: the recipe's own corpus.
    corpus = texts.parent / "corpus.toml"
    corpus.write_text(RECIPE.replace("[data]", '[data]\ncorpus = "english"'), encoding="utf-8")
    monkeypatch.setattr("rorqual.training.data.prepare.English", lambda: Files([texts]))
    monkeypatch.setattr("rorqual.cli.lab.RECIPE", str(corpus))
    assert main(f"lab language --model {run / 'model'} --twin {twin} --out {tmp_path / 'again.json'}".split()) == 0
    again = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert (
        again["documents"] == report["documents"]
        and again["command"] == "rorqual lab language --model model --twin twin"
    )

    capsys.readouterr()
    assert main(f"speed {recipe} {shared} --repeats 1 --out {out}".split(), VERBS) == 0
    stages = json.loads((out / "speed.json").read_text(encoding="utf-8"))["stages"]
    assert list(stages) == ["step 0", "step 1"]
