"""What runs when no model is named, a prompt or a question to it, and the tables of `--stats`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import rorqual
from rorqual.checkpoint import shipped
from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.tokenizer import read_tokenizer
from rorqual.cli import main
from rorqual.cli.generate import asked
from rorqual.cli.generation import other_caches, run_rows
from rorqual.cli.init import distinct_keys
from rorqual.config import presets
from rorqual.engine.generate import Stats, generate
from rorqual.errors import CheckpointError
from rorqual.layout import KVLayout, gqa_bytes, mha_bytes, mla_bytes
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.documents import Document
from rorqual.training.data.tokens import ASSISTANT, BOS, END_THINK, USER

Capture = pytest.CaptureFixture[str]
PLAIN = ["--kernels", "plain"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer knows the chat encoding."""
    parent = tmp_path_factory.mktemp("default")
    tokenizer = parent / "tokenizer.json"
    train_tokenizer([Document(name="a", text=shipped.passage())], 400).save(str(tokenizer))
    config = presets.load("tiny").without("vision").replace(max_position_embeddings=4096)
    folder = parent / "checkpoint"
    size = config.vocab_size
    write_random(config, folder, 1, tokenizer=tokenizer, compressed_size=lambda path: distinct_keys(path, size))
    return folder


@pytest.fixture
def default(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder, with the three files in it."""
    for name in shipped.FILES:
        shutil.copy(checkpoint / name, tmp_path)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("verb", ["generate", "trace", "bench"])
def test_an_installation_without_it_says_so(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    (tmp_path / "config.json").touch()
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2]")
    arguments = {
        "generate": ["x"],
        "trace": ["--ids", str(ids), "--out", str(tmp_path / "out.safetensors")],
        "bench": ["memory", "--quick", "--repeats", "1"],
    }
    assert main([verb, *arguments[verb]]) == 2
    message = "model: none given, and the one that ships with the package lacks tokenizer.json, model.safetensors here"
    assert message in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="model: none given"):
        rorqual.load()


def test_load_takes_it(default: Path, checkpoint: Path) -> None:
    assert shipped.shipped_model() == default
    model = rorqual.load(kernels="plain", page_tokens=16)
    named = rorqual.load(checkpoint, kernels="plain", page_tokens=16)
    logits = [rorqual.trace(which, [3, 4, 5], select="logits")["logits"] for which in (model, named)]
    assert logits[0].equal(logits[1])


def test_generate_and_trace_take_it(default: Path, checkpoint: Path, capsys: Capture) -> None:
    texts = []
    for named in ([], ["--model", str(checkpoint)]):
        assert main(["generate", "Jonah", "--max-tokens", "6", *named, *PLAIN]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    ids, out = default / "ids.json", default / "out.safetensors"
    ids.write_text(json.dumps([5, 6, 7]))
    assert main(["trace", "--ids", str(ids), "--out", str(out), "--select", "logits"]) == 0
    assert out.is_file()


def test_without_a_prompt_a_passage_is_continued(default: Path, capsys: Capture) -> None:
    assert main(["generate", "--max-tokens", "3", "--stats", *PLAIN, "--"]) == 0
    out = capsys.readouterr().out
    text = shipped.passage()
    assert out.startswith(f"(after a passage of {len(text):,} characters: ... ")
    assert text.endswith(out.splitlines()[0].split(" ... ")[1].removesuffix(")"))
    tokens = len(read_tokenizer(default / "tokenizer.json").encode(text).ids) + 1
    assert tokens > 4 * presets.load("demo").sliding_window
    assert re.search(rf"^prompt tokens +{tokens:,} ", out, re.MULTILINE)
    share = KVLayout(presets.load("tiny")).prefill_layer_tokens(tokens) / (6 * tokens)
    assert share < 0.52 and re.search(rf"^share of full +{share:.4g}", out, re.MULTILINE)


def test_chat_asks_as_a_user(default: Path, capsys: Capture) -> None:
    model = rorqual.load(kernels="plain")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    question = f"Where is {USER} the ship?"
    ids = asked(model, question)
    marks = [tokenizer.token_to_id(mark) for mark in (BOS, USER, ASSISTANT, END_THINK)]
    assert ids[:2] + ids[-2:] == marks and not set(ids[2:-2]) & set(marks)
    assert tokenizer.decode(ids[2:-2]) == question
    expected = "".join(generate(model, ids, max_tokens=8))
    assert main(["generate", "--chat", question, "--max-tokens", "8", *PLAIN]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat"], "prompt: not legal with --chat; legal: what the user says"),
        (["--chat", "x", "--image", "a.png"], "image: not legal with --chat; legal: text alone"),
        (["--chat", " "], "prompt: empty; give at least one character"),
        (["--chat", "\udcff"], "prompt: not valid UTF-8 text"),
    ],
)
def test_chat_refuses_in_one_line(default: Path, arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["generate", *arguments]) == 2
    assert capsys.readouterr().err == f"rorqual: {message}\n"


def test_chat_needs_the_markers(tmp_path: Path, capsys: Capture) -> None:
    config = presets.load("tiny")
    size = config.vocab_size
    write_random(config, tmp_path / "bytes", 1, compressed_size=lambda path: distinct_keys(path, size))
    assert main(["generate", "--model", str(tmp_path / "bytes"), "--chat", "x"]) == 2
    assert f"tokenizer: has no token '{BOS}'" in capsys.readouterr().err


def test_stats_measure_what_the_layout_says(default: Path) -> None:
    """Every byte and layer-token, in both prefill modes."""
    model = rorqual.load(kernels="plain")
    for prefill in ("ced", "full"):
        result = generate(model, list(range(20, 320)), max_tokens=4, prefill=prefill)
        assert "".join(result)
        rows = {name: (measured, said) for name, measured, said in run_rows(result.stats, model.layout, prefill)}
        compared = ["global bytes a token", "bytes of its pages", "bytes fixed in a sequence"]
        for name in (*compared, f"layer-tokens of the prefill, {prefill}"):
            measured, said = rows[name]
            assert measured == said and measured, name
        assert rows["layer-tokens of a full prefill"] == (None, 300 * model.config.num_hidden_layers)
        assert rows["share of full"][0] == (1 if prefill == "full" else (3 * 300 + 3 * 16) / (6 * 300))
        assert result.stats.page_bytes == model.layout.page_bytes * 3


def test_rates_of_an_empty_run_are_finite() -> None:
    assert (Stats().prefill_rate, Stats().decode_rate, Stats().bytes_per_token) == (0, 0, 0)


def test_other_caches_are_the_textbook_formulas() -> None:
    release, demo = other_caches(presets.load("v4.1-flash")), other_caches(presets.load("demo"))
    assert list(release.values()) == [mla_bytes(40, 512, 64), gqa_bytes(40, 64, 512), mha_bytes(40, 64, 512)]
    assert list(release) == ["MLA, latent 512 + rotary 64", "GQA-8, 8 x 512", "MHA, 64 x 512"]
    heads = presets.load("demo").num_attention_heads
    assert heads < 8 and [name for name in demo if name.startswith(f"GQA-8 (has {heads} heads: as MHA)")]
    assert mla_bytes(61, 512, 64) == 70_272, "DeepSeek-V3's, as published"
    assert gqa_bytes(32, 32, 128) == 131_072 == mha_bytes(32, 8, 128)
