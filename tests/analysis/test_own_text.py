"""`rorqual.analysis.own_text`: what is written is what plain greedy decoding says, group or no group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rorqual.analysis.drafts import plain_greedy
from rorqual.analysis.own_text import own_texts, write_own_texts
from rorqual.analysis.quality_windows import Windows
from rorqual.checkpoint.random import write_random
from rorqual.cli import main
from rorqual.cli.init import distinct_keys
from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny").without("vision")
    write_random(config, folder, 1, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load(folder, kernels="fast")


def windows(count: int, length: int = 20) -> Windows:
    ids = torch.randint(3, 250, (count, length), generator=torch.Generator().manual_seed(3))
    return Windows(ids=ids, sources=tuple(("x", i) for i in range(count)), stride=1, short=0)


def test_a_text_is_greedy_decoding_in_any_group(model: Transformer) -> None:
    asked = windows(3)
    alone = [asked.ids[i].tolist() + plain_greedy(model, asked.ids[i], 9) for i in range(3)]
    for group in (1, 2, 32):
        assert list(own_texts(model, asked, 9, group=group)) == alone


def test_nothing_is_said_after_the_end(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = windows(3)
    whole = list(own_texts(model, asked, 9))
    end = whole[1][20 + 3]
    monkeypatch.setattr(type(model.config), "eos_token_id", end, raising=False)
    ended = list(own_texts(model, asked, 9))
    for text, full in zip(ended, whole, strict=True):
        said = full[20:]
        assert text == full[:20] + (said[: said.index(end) + 1] if end in said else said)
    assert len(ended[1]) <= 20 + 4


def test_draws_are_each_texts_own(model: Transformer) -> None:
    asked = windows(4)
    one = list(own_texts(model, asked, 6, temperature=1.0, seed=5))
    assert one == list(own_texts(model, asked, 6, temperature=1.0, seed=5, group=3))
    assert one != list(own_texts(model, asked, 6, temperature=1.0, seed=50))


def test_the_verb_writes_texts_that_training_reads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sea.txt").write_text("The whale rose and breathed, and the sea closed over it. " * 40)
    words = f"lab own-text --model {folder} --data {tmp_path / 'sea.txt'} --out {tmp_path / 'own.jsonl'}"
    assert main([*words.split(), "--texts", "3", "--prompt", "8", "--new", "5", "--kernels", "fast"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(set(line) == {"text"} and line["text"] for line in lines)
    assert "3 texts, 15 tokens of the model's own" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.jsonl", "sea.txt"]


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--texts 0", "texts: 0 is not legal; legal: at least 1"),
        ("--prompt 1", "prompt: 1 is not legal; legal: at least 2"),
        ("--new 0", "new: 0 is not legal; legal: at least 1"),
        ("--temperature -1", "temperature: -1.0 is not legal"),
        ("--new 100000", "positions with the beginning do not fit the model's"),
        ("--out {folder}/nowhere/own.jsonl", "own.jsonl cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    option: str, named: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sea.txt").write_text("The whale rose and breathed. " * 40)
    words = f"lab own-text --model {folder} --data {tmp_path / 'sea.txt'} --prompt 8 --texts 2 --kernels fast"
    out = f"--out {tmp_path / 'own.jsonl'}"
    assert main([*words.split(), *out.split(), *option.format(folder=tmp_path).split()]) == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.glob("*own*"))


def test_a_model_without_a_tokenizer_is_refused(model: Transformer, tmp_path: Path) -> None:
    bare = load(Path(__file__).parents[1] / "goldens" / "fp32-dspark", page_tokens=16, kernels="fast")
    bare.tokenizer = None
    with pytest.raises(InputError, match=r"model: it has no tokenizer\.json"):
        write_own_texts(bare, windows(1), 2, tmp_path / "own.jsonl")
    assert not list(tmp_path.iterdir())
