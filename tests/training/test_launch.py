"""Several processes on one machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rorqual.cli.app import main
from rorqual.errors import InputError
from rorqual.training import launch
from rorqual.training.launch import inside_a_group, run_processes


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_a_count_beyond_the_cores_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=rf"^processes: {count} is not legal; legal: 1\.\."):
        run_processes(["--version"], count)


def test_the_exit_code_is_that_of_the_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert not inside_a_group()
    assert run_processes(["--version"], 2) == 0
    assert run_processes(["no-such-verb"], 2) == 2
    shown = capfd.readouterr()
    assert shown.out.count("rorqual ") == 2 and shown.err.count("no verb 'no-such-verb'") == 1, "one speaks for all"


def test_a_verb_hands_on_its_own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the interpreter's: `main` may be called with any."""
    seen: list[tuple[list[str], int]] = []

    def note(argv: list[str], count: int) -> int:
        seen.append((argv, count))
        return 3

    monkeypatch.setattr(launch, "run_processes", note)
    calls = [["train", "tiny", "--processes", "2"], ["lab", "twin", "tiny", "--steps", "1", "--processes", "2"]]
    assert [main(call) for call in calls] == [3, 3]
    assert seen == [(call, 2) for call in calls]


@pytest.mark.full
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    text = tmp_path / "texts"
    text.mkdir()
    for n in range(6):
        (text / f"{n}.txt").write_text(" ".join(f"the {w} of day {n}" for w in ("whale", "ship", "sea") * 120))
    out = tmp_path / "run"
    argv = ["train", "tiny", "--data", str(text), "--out", str(out), "--steps", "3", "--processes", "2"]
    assert run_processes(argv, 2) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["kind"] == "step"] == [1, 2, 3]
    assert (out / "model" / "model.safetensors").is_file()


@pytest.mark.full
def test_two_processes_stopped_and_resumed_end_in_the_same_bits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"the {w} of day {n}" for n in range(400) for w in ("whale", "ship", "sea")))
    start = [sys.executable, "-c", "import sys; from rorqual.cli.app import main; sys.exit(main())"]

    def command(out: str) -> list[str]:
        line = f"train tiny --data {text} --cache {tmp_path / 'cache'} --out {tmp_path / out} --steps 6 --save-every 2"
        return [*start, *line.split(), "--eval-every", "0", "--sample-every", "0", "--no-export", "--processes", "2"]

    assert subprocess.run(command("whole"), check=False).returncode == 0
    process = subprocess.Popen(command("broken"))
    metrics, deadline = tmp_path / "broken" / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or not metrics.read_text().count('"step"'):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    last = tmp_path / "broken" / "checkpoints" / "step-00000006"
    assert not last.exists(), "it ended before the signal"
    assert subprocess.run([*command("broken"), "--resume"], check=False).returncode == 0
    whole = tmp_path / "whole" / "checkpoints" / "step-00000006" / "state.safetensors"
    assert (last / "state.safetensors").read_bytes() == whole.read_bytes()
