"""`rorqual generate`, `trace`, `verify` and `golden` as their user calls them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rorqual.checkpoint.random import write_random
from rorqual.cli import main
from rorqual.cli.init import distinct_keys
from rorqual.config import presets

GOLDENS = Path(__file__).parents[1] / "goldens"
PLAIN = ["--kernels", "plain"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = presets.load("tiny")
    write_random(config, folder, 1, compressed_size=lambda path: distinct_keys(path, config.vocab_size))
    return folder


def test_generate_streams_text_and_prints_stats(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model), "the whale", "--max-tokens", "12", "--stats", *PLAIN]) == 0
    out = capsys.readouterr().out
    for name in ("prompt tokens", "new tokens a second", "global bytes a token", "layer-tokens", "share of full"):
        assert name in out
    assert main(["generate", "--model", str(model), "the whale", "--max-tokens", "12", *PLAIN]) == 0
    again = capsys.readouterr().out
    assert out.startswith(again.rstrip("\n")) and len(again) > 1


def test_a_store_saves_a_second_run_most_of_its_prefill(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "--model", str(model), "the whale " * 45, "--max-tokens", "4", "--stats", *PLAIN]
    kept = ["--store", str(tmp_path / "kept"), "--store-disk", "1GiB", "--store-memory", "1MiB", "--store-ttl", "99"]
    ran, texts = [], []
    for options in ([], kept, [*kept, "--fsync"]):
        assert main([*asked, *options]) == 0
        out = capsys.readouterr().out
        texts.append(out.partition("\n")[0])
        (row,) = [line for line in out.splitlines() if line.startswith("layer-tokens of the prefill")]
        ran.append(int(row.removeprefix("layer-tokens of the prefill, ced").split()[0].replace(",", "")))
    assert ran[0] == ran[1] > 3 * ran[2] and len(set(texts[:2])) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store-disk", "1GiB"], "disk: there is no store; legal: with a folder, or memory, to keep pages in"),
        (["--fsync"], "fsync: there is no store"),
        (["--store", "kept", "--store-ttl", "0"], "ttl: 0.0 is not legal; legal: a time above 0, in seconds"),
        (["--store", "kept", "--store-disk", "7"], "disk: 7 bytes hold no page"),
        (["--store", "kept", "--store-memory", "much"], "memory must be a number of bytes"),
    ],
)
def test_a_store_that_cannot_be_is_one_line(
    model: Path,
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--model", str(model), "the whale", *options, *PLAIN]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_seed_makes_sampling_repeatable(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--seed", seed]
        assert main(["generate", "--model", str(model), "sea", "--max-tokens", "8", *options, *PLAIN]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt: empty"),
        (["x", "--max-tokens", "0"], "max_tokens: 0 is not legal"),
        (["x", "--temperature", "-1"], "temperature: -1.0 is not legal"),
        (["x", "--top-p", "0"], "top_p: 0.0 is not legal"),
        (["x", "--prefill", "half"], "prefill: 'half' is not one of ced, full"),
        (["x", "--numerics", "int8"], "numerics: 'int8' is not one of fp32, native"),
        (["x", "--kernels", "best"], "kernels"),
        (["x" * 3000], "do not fit the model's 1024 positions"),
        (["x", "--image", "no-such.png"], "no-such.png"),
        (["x", "--chunk", "0"], "chunk: 0 is not legal"),
        (["\udcff"], "prompt: not valid UTF-8 text"),
    ],
)
def test_bad_options_are_one_line(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(model), *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "Traceback" not in err


def test_an_image_for_a_text_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    image = str(GOLDENS / "fp32-vision" / "image_0.png")
    assert main(["generate", "--model", str(GOLDENS / "fp32-text"), "x", "--image", image]) == 2
    assert "no vision tower" in capsys.readouterr().err


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "nowhere", "x"]) == 2
    assert "model: nowhere is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".json", ".npy", ".safetensors"])
def test_trace_reads_every_kind_of_ids_and_writes_the_goldens_names(tmp_path: Path, suffix: str) -> None:
    stored = load_file(GOLDENS / "fp32-text" / "expected.safetensors")
    ids, out = tmp_path / f"ids{suffix}", tmp_path / "trace.safetensors"
    values = stored["input_ids"][0]
    if suffix == ".json":
        ids.write_text(json.dumps(values.tolist()))
    elif suffix == ".npy":
        np.save(ids, values.numpy())
    else:
        save_file({"input_ids": values}, ids)
    arguments = ["trace", "--model", str(GOLDENS / "fp32-text"), "--ids", str(ids), "--out", str(out)]
    assert main([*arguments, "--select", "layers.3.*,logits", "--page-tokens", "16", *PLAIN]) == 0
    found = load_file(out)
    wanted = {n for n in stored if n.startswith("layers.3.") or n == "logits"}
    assert set(found) == wanted
    for name in wanted:
        assert found[name].shape == stored[name].shape and found[name].dtype == stored[name].dtype, name
    assert (found["logits"] - stored["logits"]).abs().max() < 1e-3


def test_trace_injects_and_refuses_what_it_never_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = load_file(GOLDENS / "fp32-text" / "expected.safetensors")
    ids, inject, out = tmp_path / "ids.json", tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    ids.write_text(json.dumps(stored["input_ids"][0].tolist()))
    save_file({"layers.5.x_in": torch.zeros_like(stored["layers.5.x_in"])}, inject)
    arguments = ["trace", "--model", str(GOLDENS / "fp32-text"), "--ids", str(ids), "--out", str(out)]
    arguments += ["--inject", str(inject), "--page-tokens", "16", *PLAIN]
    assert main([*arguments, "--select", "layers.*.attn_in"]) == 0
    found = load_file(out)
    assert (found["layers.4.attn_in"] - stored["layers.4.attn_in"]).abs().max() < 1e-3
    assert not found["layers.5.attn_in"].any()
    save_file({"layers.9.x_in": torch.zeros(97, 4, 64)}, inject)
    assert main(arguments) == 2
    assert "inject: layers.9.x_in is not a tensor of this run" in capsys.readouterr().err
    save_file({"layers.5.x_in": torch.zeros(97, 4, 63)}, inject)
    assert main(arguments) == 2
    assert "inject: layers.5.x_in has shape [97, 4, 63]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "at least 1 integer id"),
        ("[1, 2.5]", "JSON list of integers"),
        ("{}", "JSON list of integers"),
        ("[1, 512]", "512 is outside the vocabulary, legal ids are 0..511"),
        ("[-1]", "-1 is outside the vocabulary"),
        ("[" * 100_000, "cannot be read"),
        ("[" + "3," * 300 + "3]", "do not fit the model's 256 positions"),
    ],
)
def test_bad_ids_are_one_line(tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids, out = tmp_path / "ids.json", tmp_path / "out.safetensors"
    ids.write_text(content)
    arguments = ["trace", "--model", str(GOLDENS / "fp32-text"), "--ids", str(ids), "--out", str(out), *PLAIN]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not out.exists() and list(tmp_path.iterdir()) == [ids]


def test_verify_closes_with_a_count_and_fails_on_a_wrong_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(GOLDENS / "sinkhorn"), str(GOLDENS / "formats")]) == 0
    assert capsys.readouterr().out.strip().endswith("59 passed, 0 failed")
    case = tmp_path / "case"
    case.mkdir()
    for file in (GOLDENS / "fp32-replay").iterdir():
        (case / file.name).write_bytes(file.read_bytes())
    stored = load_file(case / "expected.safetensors")
    stored["hit48.layers.1.topk_idxs"][3, 0] += 1
    stored["ced.logits"][0, 0] += 0.01
    save_file(stored, case / "expected.safetensors")
    assert main(["verify", str(case), *PLAIN]) == 1
    out = capsys.readouterr().out
    assert out.strip().endswith("92 passed, 2 failed")
    assert "FAILED hit48.layers.1.topk_idxs" in out and "FAILED ced.logits" in out


def test_verify_names_a_folder_that_is_no_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "README.json does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_golden_writes_a_case_that_verifies(tmp_path: Path, numerics: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "case"
    arguments = ["golden", "tiny", str(out), "--prompt-tokens", "40", "--decode-steps", "3", "--numerics", numerics]
    assert main(arguments) == 0
    readme = json.loads((out / "README.json").read_text())
    assert readme["mode"] == numerics and all(t["meaning"] for t in readme["tensors"].values())
    assert main(["verify", str(out), *PLAIN]) == 0
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err
