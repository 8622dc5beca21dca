"""`rorqual cluster` where nothing runs: what is wrong is one line. tests/disagg/test_cluster_kills.py has the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.cli.app import main
from rorqual.disagg.cluster.presence import announced, find, presence_file
from rorqual.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def config(folder: Path, text: str = 'name = "none"') -> str:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("verb", ["up", "status", "down"])
@pytest.mark.parametrize(
    ("text", "told"), [("[decode]\nworkers = 0", "decode.workers: 0 is not legal"), ("worker = 1", "worker: unknown")]
)
def test_a_config_that_is_not_legal(
    verb: str, text: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", verb, config(folder, text)]) == 2
    assert f"cluster config: {told}" in capsys.readouterr().err


def test_nothing_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "down", config(folder)]) == 2
    assert "none called 'none' runs here" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--cluster", config(folder)]) == 2
    assert "none called 'none' runs here; start it with `rorqual cluster up`" in capsys.readouterr().err


def test_ray_is_named_where_it_is_missing(folder: Path) -> None:
    """In a process of its own, so that it is found missing whatever was imported here."""
    hidden = "import sys; sys.modules['ray'] = None; import importlib.util as u; u.find_spec = lambda *a: None; "
    code = hidden + "from rorqual.cli import main; sys.exit(main(['cluster', 'status', sys.argv[1]]))"
    found = subprocess.run(
        [sys.executable, "-c", code, config(folder)], capture_output=True, text=True, env=os.environ, timeout=300
    )
    assert found.returncode == 2
    assert "ray is missing; install with pip install 'rorqual[cluster]'" in found.stderr


def test_a_cluster_is_found_while_it_is_there(folder: Path) -> None:
    with announced("whale", address="127.0.0.1:1", token="secret", master="") as own:
        assert find("whale") == own and own.pid == os.getpid()
        file = presence_file("whale")
        assert file.stat().st_mode & 0o777 == 0o600
        second = announced("whale", address="", token="", master="")
        with pytest.raises(InputError, match=f"runs already, as process {os.getpid()}"), second:
            pass
    assert find("whale") is None and not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"version": 2}),
        json.dumps({"version": 1, "pid": 1}),
        json.dumps({"version": 1, "pid": 2**22 + 1, "started": 1, "address": "", "token": "", "master": ""}),
        json.dumps({"version": 1, "pid": os.getpid(), "started": 1, "address": "", "token": "", "master": ""}),
    ],
    ids=["empty", "list", "nothing", "version", "fields", "no process", "another process"],
)
def test_what_is_left_of_another_is_nothing(text: str, folder: Path) -> None:
    file = presence_file("whale")
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    assert find("whale") is None
    with announced("whale", address="127.0.0.1:1", token="", master="") as own:
        assert find("whale") == own
