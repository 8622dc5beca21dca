"""What a run tells: lines, metrics, event files, samples, the curve."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_training import FakeData, FakeLearner, recipe
from PIL import Image
from rich.console import Console

from rorqual.errors import InputError
from rorqual.training.learner import Phase
from rorqual.training.metrics import Log, MetricsLog, TensorBoard, imbalance, read_metrics
from rorqual.training.plot import draw, phase_marks, smoothed
from rorqual.training.progress import Reporter, duration_text
from rorqual.training.recipe import PhaseRecipe
from rorqual.training.samples import SampleParams, continuation, prompts, texts

STEP = {"kind": "step", "loss": 2.5, "lr": 0.002, "tokens_per_s": 12345.6}


def spoken(*, terminal: bool, silent: bool = False, interval_s: float = 0.0) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, quiet=silent, width=200, soft_wrap=True, highlight=False)
    reporter = Reporter(console=console, interval_s=interval_s)
    reporter.begin(0, 100)
    for step in range(1, 101):
        reporter.step(STEP | {"step": step})
    reporter.evaluation({"step": 100, "loss": 3.0, "bits_per_character": 1.5})
    reporter.note("[brackets] are text")
    reporter.close()
    return stream.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    lines = spoken(terminal=False).splitlines()
    assert len(lines) == 102
    assert lines[0].startswith("step 1 of 100  loss 2.5000  lr 0.002  12,346 tokens/s  ")
    assert lines[0].endswith(" left")
    assert lines[99].endswith("0 s left")
    assert lines[100] == "step 100: held out: loss 3.0000, 1.5000 bits a character"
    assert lines[101] == "[brackets] are text"
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_nobody_listening_is_no_reason_to_end(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        tries = 0

        def write(self, text: str) -> int:
            self.tries += 1
            raise error

    stream = Closed()
    monkeypatch.setattr(sys, "stderr", stream)
    reporter = Reporter(interval_s=0)
    reporter.begin(0, 2)
    for step in (1, 2):
        reporter.step(STEP | {"step": step})
    reporter.note("saved")
    assert stream.tries == 1, "then it is silent"


def test_plain_lines_are_rationed_but_the_first_and_the_last() -> None:
    lines = spoken(terminal=False, interval_s=3600).splitlines()
    assert [line.split(" of ")[0] for line in lines[:2]] == ["step 1", "step 100"]
    assert len(lines) == 4


def test_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # rich draws nothing live where the environment says that the terminal cannot.
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    text = spoken(terminal=True)
    assert "\x1b[" in text
    assert "loss 2.5000" in text
    assert "step 100 of 100" in text


def test_silent_is_silent() -> None:
    assert spoken(terminal=True, silent=True) == spoken(terminal=False, silent=True) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3599, "59:59"), (7325, "2:02:05")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_number_that_json_has_not_is_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl", None) as log:
        log({"kind": "step", "step": 1, "loss": float("nan"), "lr": float("inf"), "tokens": 3})
        assert read_metrics(tmp_path / "m.jsonl") == [
            {"kind": "step", "step": 1, "loss": None, "lr": None, "tokens": 3}
        ]


def test_a_log_is_cut_to_what_a_checkpoint_knew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Log(path, None) as log:
        log.write("één\n")
        size = log.size
        log.write("two\n")
    with Log(path, size) as log:
        assert log.size == size
        log.write("three\n")
    assert path.read_text(encoding="utf-8") == "één\nthree\n"
    with Log(path, 10_000) as log:
        assert log.size == path.stat().st_size > size, "a log that somebody cut is left as it is"


def test_imbalance_is_the_worst_layers() -> None:
    assert imbalance({}) == 0
    assert imbalance({"a": torch.tensor([2, 2]), "b": torch.tensor([1, 0, 5])}) == 2.5
    assert imbalance({"a": torch.zeros(3)}) == 0


def test_tensorboard_that_is_missing_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"tensorboard: not installed; pip install 'rorqual\[training\]'"):
        TensorBoard(tmp_path / "events", 0)
    assert not (tmp_path / "events").exists()


def test_tensorboard_gets_every_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = TensorBoard(tmp_path, 4)
    board({"kind": "step", "step": 5, "loss": 1.5, "seq_len": 16})
    board({"kind": "eval", "step": 5, "loss": 2.0})
    board.close()
    assert calls == [
        (str(tmp_path), 5),
        ("step/loss", 1.5, 5),
        ("step/seq_len", 16, 5),
        ("eval/loss", 2.0, 5),
        "closed",
    ]


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert smoothed([3.0] * 20, 10) == pytest.approx([3.0] * 20)
    assert smoothed([1.0, 2.0], 1) == [1.0, 2.0]
    assert smoothed([0.0, 1.0], 2) == pytest.approx([0.0, 2 / 3])


def test_phases_that_begin_within_the_run_are_marked() -> None:
    plan = recipe(steps=100).replace(
        phases=PhaseRecipe(sparse_from=0.105, quantise_from=0.0, quantise_weights_from=0.5, draft_from=1.0)
    )
    marks = phase_marks(plan)
    assert marks == [(11, "sparse"), (50, "quantised weights")]
    for step, _ in marks:
        assert plan.phase_at(step - 1) != plan.phase_at(step)


def test_the_curve_is_a_png(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"kind": "step", "step": step, "loss": 5 - step / 50} for step in range(1, 101)]
    records += [{"kind": "eval", "step": 50, "loss": 4.2}, {"kind": "step", "step": 101, "loss": None}]
    assert draw(records, recipe(steps=101), tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"
        assert image.size == (1080, 600)
        colours = {colour[:3] for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(255, 127, 14), (31, 119, 180)} <= colours, "held-out and training curves"
    assert not draw([], recipe(), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_there_is_no_curve_and_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw([{"kind": "step", "step": 1, "loss": 1.0}], recipe(), tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == []


def test_samples_begin_as_documents_do() -> None:
    data = FakeData(recipe())
    batch = data.heldout_batches(16, 4)
    found = prompts(batch, SampleParams(count=2, prompt=6))
    assert [prompt.tolist() for prompt in found] == [batch[0].ids[:6].tolist(), batch[2].ids[:6].tolist()]
    assert prompts([], SampleParams()) == []
    short = prompts(batch[:1], SampleParams(count=3, prompt=40))
    assert [prompt.tolist() for prompt in short] == [batch[0].ids.tolist()], "the whole piece where none is longer"


def test_samples_repeat_with_their_seed_and_stop() -> None:
    data, learner = FakeData(recipe()), FakeLearner()
    params = SampleParams(count=2, prompt=6, tokens=20)
    batch = data.heldout_batches(16, 3)
    one, again, other = (list(texts(learner, Phase(), data.tokenizer, batch, None, params, seed)) for seed in (1, 1, 2))
    assert one == again != other
    heads = [data.tokenizer.decode(prompt.tolist()) for prompt in prompts(batch, params)]
    assert all(text.startswith(f"{head} |> ") for text, head in zip(one, heads, strict=True))
    new = continuation(learner, Phase(), batch[0].ids, None, params, 1)
    assert len(new) == 20
    stopped = continuation(learner, Phase(), batch[0].ids, new[5], params, 1)
    assert stopped == new[: new.index(new[5])]
