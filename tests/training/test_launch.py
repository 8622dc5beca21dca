"""Several processes on one machine."""

import json
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
    assert shown.out.count("rorqual ") == 2 and shown.err.count("no verb 'no-such-verb'") == 2


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
