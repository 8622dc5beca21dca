"""`rorqual init` writes a checkpoint that loads, is the same for the same seed, and is cut as asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rorqual.checkpoint.load import Checkpoint
from rorqual.cli import main
from rorqual.cli.init import layer_ids
from rorqual.cli.output import ProgressLine, bytes_text
from rorqual.config import ModelConfig, WeightFormats, presets
from rorqual.errors import InputError

Capture = pytest.CaptureFixture[str]
WEIGHTS = "model.safetensors"


def init(out: Path, *options: str, source: str = "tiny") -> ModelConfig:
    """Run the verb, and check that what it wrote is a whole checkpoint of its own config."""
    assert main(["init", source, str(out), *options]) == 0
    config = ModelConfig.from_json(out)
    Checkpoint.open(out, config)
    return config


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        init(tmp_path / name, "--seed", seed, "--layers", "3")
    a, b, c = ((tmp_path / name / WEIGHTS).read_bytes() for name in "abc")
    assert a == b
    assert len(a) == len(c)
    assert a != c


def test_default_keeps_the_config_but_for_its_vocabulary(tmp_path: Path, capsys: Capture) -> None:
    written, preset = init(tmp_path / "out"), presets.load("tiny")
    assert written.replace(engram_compressed_vocab_size=preset.engram_compressed_vocab_size) == preset
    # One token a byte: upper and lower case fold together, so there are fewer keys than tokens.
    assert 256 - 26 - 10 < written.engram_compressed_vocab_size < preset.vocab_size
    assert "6 layers" in capsys.readouterr().out


def test_folder_as_source_gives_the_same_checkpoint(tmp_path: Path) -> None:
    first = init(tmp_path / "first", "--layers", "3", "--experts", "2")
    assert init(tmp_path / "again", source=str(tmp_path / "first")) == first
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / "first" / WEIGHTS).read_bytes()


def test_depth_cut_by_count_and_by_ids(tmp_path: Path) -> None:
    tiny = presets.load("tiny")
    cut = init(tmp_path / "count", "--layers", "3")
    assert (cut.num_hidden_layers, cut.kv_source_layer_ids) == (3, (1,))
    some = init(tmp_path / "ids", "--layers", "0,1,3,4")
    assert some.num_hidden_layers == 4
    assert [role.mode for role in some.backbone_roles] == [tiny.roles[layer].mode for layer in (0, 1, 3, 4)]


def test_techniques_turned_off_before_the_cut(tmp_path: Path) -> None:
    written = init(tmp_path / "out", "--without", "drafts", "--without", "engram", "--layers", "1")
    assert (written.num_hidden_layers, written.num_nextn_predict_layers, written.engram_layer_ids) == (1, 0, ())


@pytest.mark.parametrize(
    ("flag", "weights"),
    [
        ("--plain", WeightFormats(dense="bf16", experts="bf16", engram="bf16")),
        ("--native", WeightFormats(dense="fp8", experts="fp4", engram="fp8")),
    ],
)
def test_weights_as_asked(flag: str, weights: WeightFormats, tmp_path: Path) -> None:
    written = init(tmp_path / "out", flag, "--layers", "3", "--experts", "3")
    assert written.weights == weights
    assert (written.n_routed_experts, written.dspark_n_routed_experts) == (3, 3)


def test_shards(tmp_path: Path) -> None:
    init(tmp_path / "out", "--layers", "3", "--shard-bytes", "200000")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--layers", "two"], "two"),
        (["--layers", "0,4"], "layer 3"),
        (["--layers", "99"], "0..5"),
        (["--experts", "-1"], "experts"),
        (["--tokenizer", "/nowhere/tokenizer.json"], "/nowhere/tokenizer.json"),
        (["--seed", "one"], "--seed"),
        (["--without", "magic"], "drafts"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: list[str], named: str, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["init", "tiny", str(tmp_path / "out"), *options]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("rorqual: ")
    assert streams.err.count("\n") == 1
    assert named in streams.err
    assert list(tmp_path.iterdir()) == []


def test_the_release_is_not_written_unasked(tmp_path: Path, capsys: Capture) -> None:
    assert main(["init", "v4.1-flash", str(tmp_path / "out")]) == 2
    assert "510.3 GB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert main(["init", "tiny", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_layer_ids() -> None:
    assert layer_ids("4") == 4
    assert layer_ids("0, 1,20") == [0, 1, 20]
    assert layer_ids("4,") == [4]
    for text in ("", ",", "1,,2", "-1", "0-3", "1.5"):
        with pytest.raises(InputError, match="layers"):
            layer_ids(text)


def test_progress_is_one_line_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressLine("writing", bytes_text) as progress:
        progress(1_500_000, 3_000_000)
        progress(3_000_000, 3_000_000)
    assert capsys.readouterr().err == "\rwriting: 1.5 MB of 3.0 MB\x1b[K\rwriting: 3.0 MB of 3.0 MB\x1b[K\n"


def test_progress_into_a_file_has_plain_lines(capsys: Capture) -> None:
    with ProgressLine("writing", interval_s=0) as progress:
        progress(1, 2)
    with ProgressLine("writing", interval_s=3600) as progress:
        progress(1, 2)
    assert capsys.readouterr().err == "writing: 1 of 2\n"
