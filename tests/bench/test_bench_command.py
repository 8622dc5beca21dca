"""`rorqual bench` as its user meets it: refusals in one line, a table, a file that is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.bench import kernels, model, report
from rorqual.bench.checkpoints import check_positions, checkpoint, prefill_flops, random_ids
from rorqual.bench.roofline import Roofline
from rorqual.checkpoint import shipped
from rorqual.cli import main
from rorqual.cli.bench import spelled
from rorqual.config import presets
from rorqual.errors import CheckpointError, InputError
from rorqual.inventory.parameters import active_parameters

Capture = pytest.CaptureFixture[str]

ROW: dict[str, Any] = {
    "name": "op",
    "shape": "1 x 2",
    "path": "vector",
    "plain_s": {"median": 0.25, "min": 0.2, "max": 0.3, "runs": 3},
    "fast_s": {"median": 5e-5, "min": 4e-5, "max": 6e-5, "runs": 3},
    "ratio": 5000.0,
    "ratio_of": "plain_s / fast_s",
    "roofline": {"share": 0.5, "bound": "bytes", "bytes": 1, "flops": 0, "formula": "bytes = 1"},
    "bar": {"at_least": 6, "reached": True},
}
LACKING = {**ROW, "path": "vnni", "fast_s": None, "ratio": None, "unavailable": "not on this CPU: needs avx512vnni"}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No measuring: rows as given."""
    fixed = Roofline(read_bytes_per_s=1e10, read_bytes=1, gemm_flops_per_s=1e11, gemm_side=2)
    monkeypatch.setattr(Roofline, "measure", classmethod(lambda cls, quick=False: fixed))
    monkeypatch.setattr(kernels, "run_kernels", lambda **options: [ROW, LACKING])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nonsense"],
            "what: 'nonsense' cannot be measured; "
            "legal: kernels, model, memory, context, engine, plan, store, transfer",
        ),
        ([], "Missing argument"),
        (["kernels", "--repeats", "0"], "repeats: 0 is not legal; legal: at least 1"),
        (["kernels", "--model", "somewhere"], "model: kernels are measured without a checkpoint"),
        (["kernels", "--random", "tiny"], "random: kernels are measured without a checkpoint"),
        (["plan", "--random", "tiny"], "random: the planner is measured without a checkpoint"),
        (["store", "--random", "tiny"], "random: a store is measured without a checkpoint"),
        (["store", "--profile"], "profile: store has none; legal: with kernels, model and engine"),
        (["model", "--random", "tiny", "--model", "x"], "random: a model is given too"),
        (["model", "--random", "teeny", "--quick"], "preset must be one of v4.1-flash, tiny"),
        (["model", "--model", "no-such-folder", "--quick"], "model: no-such-folder is not a folder"),
        (["memory", "--model", "no-such-folder", "--quick"], "model: no-such-folder is not a folder"),
        (
            ["context", "--random", "tiny"],
            "random: context takes presets of its own; legal: with model, memory and engine",
        ),
        (["context", "--part", "encode"], "part: 'encode' is none of context's; legal: decode, memory, prefill"),
        (["model", "--part", "decode"], "part: model has no parts; legal: with context and engine"),
        (["kernels", "--out", "no-such-folder/out.json"], "out: the folder no-such-folder does not exist"),
        (["kernels", "--out", "."], "out: . is a folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if "measuring" not in line]
    assert len(lines) == 1 and message in lines[0]


def test_a_checkpoint_that_cannot_be_loaded_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(presets.load("tiny").to_hf_dict()), encoding="utf-8")
    for what in ("model", "memory"):
        assert main(["bench", what, "--quick", "--repeats", "1", "--model", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert str(tmp_path) in line and "safetensors" in line


def test_the_table_shows_range_share_and_bar(measured: None, capsys: Capture) -> None:
    assert main(["bench", "kernels"]) == 0
    out = capsys.readouterr().out
    for text in ("plain 250 ms (200 - 300)", "fast 50 us (40 - 60)", "50% (bytes)", "5e+03 >= 6: reached"):
        assert text in out
    assert "not on this CPU: needs avx512vnni" in out


def test_json_and_file_are_the_same_document(measured: None, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--json", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text(encoding="utf-8")) == printed
    assert printed["rows"] == [ROW, LACKING] and printed["command"] == "rorqual bench kernels"
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_is_replaced_whole_or_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    report.write_document({"a": 1}, out)
    with pytest.raises(ValueError):
        report.write_document({"a": float("nan")}, out)
    assert json.loads(out.read_text(encoding="utf-8")) == {"a": 1}
    report.write_document({"a": 2}, out)
    assert json.loads(out.read_text(encoding="utf-8")) == {"a": 2} and list(tmp_path.iterdir()) == [out]


def test_the_command_names_no_path_of_this_machine() -> None:
    said = spelled("model", 5, True, Path("/home/someone/a model"))
    assert said == "rorqual bench model --repeats 5 --quick --model 'a model'"
    assert spelled("memory", None, False, None, "real-pair") == "rorqual bench memory --random real-pair"
    assert spelled("model", None, False, None, profile=True) == "rorqual bench model --profile"
    said = spelled("context", 2, False, None, parts=("decode", "prefill"))
    assert said == "rorqual bench context --part decode --part prefill --repeats 2"


def test_without_a_name_the_shipped_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with (
        pytest.raises(CheckpointError, match=r"lacks config\.json, tokenizer\.json, model\.safetensors"),
        checkpoint(None, None),
    ):
        pass
    for name in shipped.FILES:
        (tmp_path / name).touch()
    with checkpoint(None, None) as folder:
        assert folder == tmp_path


def test_a_long_prompt_is_cut_to_the_model() -> None:
    assert model.FULL.within(4096) == model.Lengths(long=4096)
    assert model.FULL.within(1 << 20) == model.FULL


def test_too_few_positions_are_named() -> None:
    config = presets.load("tiny")
    check_positions(config, config.max_position_embeddings)
    with pytest.raises(InputError, match=f"{config.max_position_embeddings} positions; the benchmark needs"):
        check_positions(config, config.max_position_embeddings + 1)


def test_ids_are_ordinary_and_repeatable() -> None:
    config = presets.load("mid")
    ids = random_ids(config, 9000, seed=1)
    assert ids.equal(random_ids(config, 9000, seed=1)) and not ids.equal(random_ids(config, 9000, seed=2))
    special = {config.bos_token_id, config.eos_token_id, config.pad_token_id, config.image_token_id}
    assert not special & set(ids.tolist()) and 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size


def test_prefill_work_is_the_layers_that_run() -> None:
    config = presets.load("mid")
    active = active_parameters(config)
    assert prefill_flops(config, 1, "full") == 2 * active.decode_with_head
    assert prefill_flops(config, config.sliding_window, "ced") == prefill_flops(config, config.sliding_window, "full")
    share = prefill_flops(config, model.FULL.long, "ced") / prefill_flops(config, model.FULL.long, "full")
    assert 0.4 < share < 0.58
