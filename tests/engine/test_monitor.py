"""What an engine publishes of itself, and who may read it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import asked, engine_of
from models import random_ids, tiny

from rorqual.engine.engine import Engine
from rorqual.engine.monitor import Monitor, request_json, to_json
from rorqual.engine.params import SamplingParams
from rorqual.engine.published import VERSION, find_document, process_start, read_document, user_folder
from rorqual.errors import InputError


@pytest.fixture
def engine() -> Engine:
    return engine_of(tiny("fast"), pages=16, slots=1)


def finish(engine: Engine, monitor: Monitor) -> None:
    while engine.has_work:
        engine.step()
        monitor.tick()


def test_a_document_says_what_the_engine_knows(engine: Engine, tmp_path: Path) -> None:
    with Monitor(engine, tmp_path, name="tiny", interval=0) as monitor:
        first = engine.submit(random_ids(40), asked(12))
        second = engine.submit(random_ids(3), asked(2))
        engine.step()
        monitor.tick()
        found = read_document(monitor.path)
        assert (found["version"], found["pid"], found["model"]["name"]) == (VERSION, os.getpid(), "tiny")
        assert found["runs"]["kernels"].startswith("fast") and found["started"] <= found["written"]
        assert found["stats"] == json.loads(json.dumps(to_json(engine.stats())))
        own, other = found["requests"]
        assert (own["id"], own["state"], own["prompt"], own["new"]) == (first, "decode", 40, 1)
        assert own["queue_seconds"] >= 0 and own["prefill_seconds"] > 0 and own["token_seconds"] is None
        assert (other["id"], other["state"], other["queue_seconds"]) == (second, "waiting", None)
        engine.preempt(first)
        assert [engine.state(name) for name in engine.live] == ["waiting", "waiting"]
        finish(engine, monitor)
        found = read_document(monitor.path)
        assert found["requests"] == [] and found["stats"]["finished"] == 2
        assert found["stats"]["counts"]["new"] == 14 and found["stats"]["slots_free"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_long_prompt_is_in_prefill() -> None:
    engine = engine_of(tiny("fast"), pages=32, slots=1, chunk_tokens=64)
    name = engine.submit(random_ids(200), asked(2))
    engine.step()
    assert engine.state(name) == "prefill"
    engine.abort(name)
    with pytest.raises(InputError, match="is not live"):
        engine.state(name)


def test_the_state_of_several_completions_is_of_one_that_goes_on() -> None:
    engine = engine_of(tiny("fast"), pages=32, slots=3)
    name = engine.submit(random_ids(5), SamplingParams(max_tokens=60, n=3, temperature=1.0, seed=1, stop_ids=range(30)))
    output = engine.output(name)
    states, ended = [], 0
    while engine.has_work:
        states.append(engine.state(name))
        ended += any(own.finish_reason for own in output.completions)
        assert request_json(engine, name)["completions"] == 3
        engine.step()
    assert states == ["waiting"] + ["decode"] * (len(states) - 1)
    assert 0 < ended < len(states), "some ended earlier than others"


def test_recent_steps_are_bounded(engine: Engine) -> None:
    engine.submit(random_ids(4), asked(100), speculative=False)
    while engine.has_work:
        engine.step()
    assert len(to_json(engine.stats())["recent"]) == 64
    assert [step["number"] for step in to_json(engine.stats(), recent=2)["recent"]] == [98, 99]
    assert to_json(engine.stats(), recent=0)["recent"] == ()


def test_it_is_written_at_most_so_often(engine: Engine, tmp_path: Path) -> None:
    now = [0.0]
    with Monitor(engine, tmp_path, interval=0.5, clock=lambda: now[0]) as monitor:
        stamps = []
        for at in (0.1, 0.4, 0.5, 0.9, 1.1):
            now[0] = at
            monitor.tick()
            stamps.append(read_document(monitor.path)["written"])
        assert stamps[0] == stamps[1] < stamps[2] == stamps[3] < stamps[4]


def test_two_engines_of_a_process_have_two_files(engine: Engine, tmp_path: Path) -> None:
    with Monitor(engine, tmp_path, name="a") as a:
        with Monitor(engine, tmp_path, name="b") as b:
            assert {a.path.name, b.path.name} == {f"{os.getpid()}.json", f"{os.getpid()}-2.json"}
            assert read_document(find_document(str(os.getpid()), tmp_path))["model"]["name"] == "b"
        assert find_document(None, tmp_path) == a.path


def test_a_file_that_cannot_be_written_is_told_once(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING, "rorqual"):
        monitor = Monitor(engine, folder, interval=0)
        name = engine.submit(random_ids(4), asked(3))
        output = engine.output(name)
        finish(engine, monitor)
    assert output.finished and len(caplog.records) == 1 and "cannot be written" in caplog.text
    folder.unlink()
    monitor.publish()
    assert read_document(monitor.path)["stats"]["finished"] == 1
    monitor.close()


def test_a_replacement_that_fails_leaves_no_half_file(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Monitor(engine, tmp_path, interval=0) as monitor:
        before = monitor.path.read_text()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", full)
            monitor.publish()
        assert monitor.path.read_text() == before and list(tmp_path.iterdir()) == [monitor.path]


def test_the_users_folder_is_the_users_alone(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_folder() == tmp_path / f"rorqual-{os.getuid()}"
    with Monitor(engine) as monitor:
        assert monitor.path.parent == user_folder() and user_folder().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert user_folder() == tmp_path / "run" / "rorqual"


def test_a_folder_of_somebody_else_is_not_used(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    user_folder().symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "rorqual"), Monitor(engine):
        assert "the folder is not ours" in caplog.text and not list((tmp_path / "elsewhere").iterdir())


@pytest.fixture
def stale(engine: Engine, tmp_path: Path) -> Path:
    """What a process left that was killed."""
    with Monitor(engine, tmp_path) as monitor:
        document = monitor.document()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        document |= {"pid": child.pid, "process_start": process_start(child.pid)}
        path = tmp_path / f"{child.pid}.json"
        path.write_text(json.dumps(document))
        assert read_document(path)["pid"] == child.pid
        assert find_document(None, tmp_path) == find_document(str(child.pid), tmp_path) == path
        child.kill()
    return path


def test_a_stale_file_is_refused(stale: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{stale} is stale: its process {stale.stem} is gone"):
        read_document(stale)
    assert find_document(stale.stem, tmp_path) == find_document(str(stale)) == stale
    with pytest.raises(InputError, match="top: no process publishes anything in"):
        find_document(None, tmp_path)


def test_a_number_given_to_another_process_is_no_life(stale: Path) -> None:
    document = json.loads(stale.read_text()) | {"pid": os.getpid()}
    stale.write_text(json.dumps(document))
    with pytest.raises(InputError, match="is stale"):
        read_document(stale)
    # Where starts are not known, the number alone counts.
    stale.write_text(json.dumps(document | {"process_start": None}))
    assert read_document(stale)["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a JSON document of an engine"),
        ("[1]", "is not a JSON document of an engine"),
        ('{"version": 1, "pid": 3}', "is not a JSON document of an engine"),
        ('{"version": 99}', "is of version 99; legal: 1"),
        (b"\xff", "is not a JSON document of an engine"),
    ],
)
def test_other_files_are_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "7.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message):
        read_document(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_document(tmp_path / "none.json")


def test_a_process_without_a_file_names_the_others(engine: Engine, tmp_path: Path) -> None:
    with Monitor(engine, tmp_path), pytest.raises(InputError, match=rf"process 1 publishes .* do: {os.getpid()}"):
        find_document("1", tmp_path)
    with pytest.raises(InputError, match="do: none"):
        find_document("1", tmp_path)
