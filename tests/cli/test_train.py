"""`rorqual train`: from texts to a model that `rorqual generate` opens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rorqual.cli.app import main
from rorqual.config import presets
from rorqual.training import run as module

RECIPE = """
model = "config.json"
[data]
vocab_size = 300
seq_len = 32
batch_tokens = 64
[run]
steps = 2
eval_every = 2
eval_sequences = 1
sample_every = 0
save_every = 0
autocast = "off"  # through bf16 tiles, products depend on how rows are shared out
"""
MAIN = "import sys; from rorqual.cli.app import main; sys.exit(main())"
TEXT = "A whale surfaced, breathed, and dived again; the sea closed over it. " * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    config = presets.load("tiny").without("vision")
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()), encoding="utf-8")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_from_text_to_a_model_that_generates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out"
    arguments = ["train", str(folder / "recipe.toml"), "--data", str(folder / "text.txt"), "--out", str(out)]
    assert main(arguments) == 0
    streams = capsys.readouterr()
    assert f"model: {out / 'model'}" in streams.out
    assert f"curve: {out / 'loss.png'}" in streams.out
    assert "step 2 of 2  loss " in streams.err
    assert main(["generate", "--model", str(out / "model"), "A whale", "--max-tokens", "3", "--kernels", "plain"]) == 0
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err


def command(folder: Path, out: str, *more: str) -> list[str]:
    """Twelve steps of the real model, every third saved."""
    paths = ["--data", str(folder / "text.txt"), "--out", str(folder / out), "--cache", str(folder / "cache")]
    return ["train", str(folder / "recipe.toml"), *paths, "--steps", "12", "--save-every", "3", "--no-export", *more]


def last_state(out: Path) -> bytes:
    return (out / "checkpoints" / "step-00000012" / "state.safetensors").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_real_model_stopped_and_resumed_ends_in_the_same_bits(number: int, folder: Path) -> None:
    assert main(command(folder, "whole")) == 0
    process = subprocess.Popen([sys.executable, "-c", MAIN, *command(folder, "broken")], stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()  # as where the signal reaches `tee` too
    metrics = folder / "broken" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count('"step"') < 2 * 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert not (folder / "broken" / "checkpoints" / "step-00000012").exists(), "it ended before the signal"
    assert main(command(folder, "broken", "--resume")) == 0
    assert last_state(folder / "broken") == last_state(folder / "whole")
    steps = [record["step"] for record in map(json.loads, metrics.open()) if record["kind"] == "step"]
    assert steps == list(range(1, 13))


@pytest.mark.full
def test_by_torchrun(folder: Path) -> None:
    (folder / "main.py").write_text(MAIN, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(folder / "main.py")]
    done = subprocess.run([*launcher, *command(folder, "two")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("12 of 12 steps") == 1, "one process speaks"
    assert main(command(folder, "one")) == 0
    losses = [
        [record["loss"] for record in map(json.loads, (folder / out / "metrics.jsonl").open())]
        for out in ("one", "two")
    ]
    assert len(losses[0]) == len(losses[1])
    # Rounding decides a routing or a Top-K edge now and then, so that runs of the real model part slowly.
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert main(command(folder, "two", "--resume")) == 0


class Recorded:
    """Stands in for `train` and keeps what it was called with."""

    def __init__(self, ended: Any) -> None:
        self.ended = ended

    def __call__(self, *args: Any, **options: Any) -> module.Trained:
        self.args, self.options = args, options
        return module.Trained(out=Path("out"), first=True, ended=self.ended, plot=None, model=None)


def ended(number: int = 0) -> Any:
    return SimpleNamespace(step=3, steps=9, signal=number, last={}, evaluation=None)


def test_options_reach_the_recipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded(ended())
    monkeypatch.setattr(module, "train", recorded)
    line = (
        "train demo --data a --data b c d --out o --steps 5 --batch-tokens 64 --micro-tokens 32 --seed 9 --eval-every 2"
    )
    line += (
        " --sample-every 0 --save-every 4 --keep 1 --cache c --device cpu --tensorboard --no-export --plain --resume"
    )
    line += " --resume --init m"
    assert main(line.split()) == 0
    assert recorded.args == ("demo", [Path("a"), Path("b"), Path("c"), Path("d")], Path("o"))
    assert recorded.options == {
        "resume": True,
        "overrides": {
            "run.steps": 5,
            "data.batch_tokens": 64,
            "data.micro_tokens": 32,
            "run.seed": 9,
            "run.eval_every": 2,
            "run.sample_every": 0,
            "run.save_every": 4,
            "run.keep": 1,
        },
        "cache": Path("c"),
        "device": "cpu",
        "tensorboard": True,
        "export": False,
        "plain": True,
        "init": Path("m"),
    }
    assert capsys.readouterr().out.splitlines() == ["out: 3 of 9 steps", "checkpoints: out/checkpoints"]
    assert main(["train", "demo"]) == 0
    assert recorded.options["overrides"] == {}
    assert recorded.options["export"] and not recorded.options["plain"] and not recorded.options["resume"]


@pytest.mark.parametrize(("number", "code"), [(2, 130), (15, 143)])
def test_a_stopped_run_says_so(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "train", Recorded(ended(number)))
    assert main(["train", "demo"]) == code
    assert "stopped; go on with the same command and --resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["nowhere.toml"], "nowhere.toml is neither a file nor a preset"),
        (["{folder}/recipe.toml", "--steps", "0"], "run.steps is 0"),
        (["{folder}/recipe.toml", "--data", "{folder}/nowhere"], "nowhere"),
        (["{folder}/recipe.toml", "--device", "tpu"], "device: tpu is not legal"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    assert main(["train", *(option.format(folder=folder) for option in options), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("\n") == 1
