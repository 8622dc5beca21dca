"""`rorqual store`: what a folder holds, and looking after it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.cli import main
from rorqual.store.disk import DiskStore
from rorqual.store.folder import subfolder
from rorqual.store.interface import StoreIdentity

IDENTITY = StoreIdentity(fingerprint="0123456789abcdef0123", page_tokens=4, page_bytes=3000)
OTHER = dataclasses.replace(IDENTITY, fingerprint="other", page_bytes=1000)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models, and a subfolder of a format to come."""
    for identity, pages in ((IDENTITY, 30), (OTHER, 5)):
        store = DiskStore(tmp_path, identity, disk_bytes=None)
        for number in range(pages):
            assert store.put(bytes([number]) * 32, bytes([number]) * identity.page_bytes)
        store.close()
    future = tmp_path / ("v9-" + 32 * "a")
    future.mkdir()
    (future / "data").write_bytes(bytes(77))
    return tmp_path


def test_stat_shows_all_there_is(folder: Path, capsys: Capture) -> None:
    assert main(["store", "stat", str(folder), "--json"]) == 0
    rows = {row["subfolder"]: row for row in json.loads(capsys.readouterr().out)}
    row = rows.pop(subfolder(folder, IDENTITY).name)
    assert (row["model"], row["page_tokens"], row["page_bytes"]) == ("0123456789abcdef", 4, 3000)
    assert (row["pages"], row["tokens"], row["note"]) == (30, 120, "") and row["used"] > 90_000
    row = rows.pop(subfolder(folder, OTHER).name)
    assert (row["model"], row["pages"], row["tokens"]) == ("other", 5, 20)
    (row,) = rows.values()
    assert (row["model"], row["pages"], row["used"]) == (None, None, 77) and "format 9" in row["note"]
    assert main(["store", "stat", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("0123456789abcdef", "other", "120", "of format 9, this one reads 1: left alone"):
        assert text in shown


def test_stat_reads_beside_a_writer_and_the_others_are_refused(folder: Path, capsys: Capture) -> None:
    store = DiskStore(folder, IDENTITY, disk_bytes=None)
    store.put(b"new", bytes(3000))
    store.flush()
    assert main(["store", "stat", str(folder), "--json"]) == 0
    assert 31 in [row["pages"] for row in json.loads(capsys.readouterr().out)]
    for verb in (["verify"], ["compact"], ["clear", "--yes"]):
        assert main(["store", verb[0], str(folder), *verb[1:]]) == 2
        assert "legal: one process at a time" in capsys.readouterr().err
    assert store.get(b"new") == bytes(3000)
    store.close()
    assert len(list(folder.iterdir())) == 3


def test_verify_removes_what_is_damaged_and_says_no(folder: Path, capsys: Capture) -> None:
    assert main(["store", "verify", str(folder)]) == 0
    assert "30 pages read, 0 damaged" in capsys.readouterr().out
    segment = next(subfolder(folder, IDENTITY).glob("*.pages"))
    data = bytearray(segment.read_bytes())
    data[4567] ^= 4
    segment.write_bytes(data)
    assert main(["store", "verify", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "30 pages read, 1 damaged" in shown and "5 pages read, 0 damaged" in shown
    assert main(["store", "verify", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted((row["checked"], row["damaged"]) for row in rows) == [(0, 0), (5, 0), (29, 0)]


def test_damage_beyond_single_pages(folder: Path, capsys: Capture) -> None:
    (subfolder(folder, OTHER) / "store.json").write_text("{}", encoding="utf-8")
    (subfolder(folder, IDENTITY) / "index.sqlite").write_bytes(b"nothing" * 1000)
    assert main(["store", "stat", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "does not say whose pages these are" in shown and "its index cannot be read" in shown
    assert main(["store", "verify", str(folder)]) == 1
    assert capsys.readouterr().out.count("1 damaged") == 2
    assert main(["store", "clear", str(folder), "--yes"]) == 0
    assert list(folder.iterdir()) == []


def test_compact_gives_room_back(folder: Path, capsys: Capture) -> None:
    store = DiskStore(folder, IDENTITY, disk_bytes=None)
    for number in range(20):
        assert store.delete(bytes([number]) * 32)
    store.close()
    assert main(["store", "compact", str(folder)]) == 0
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert said[subfolder(folder, OTHER).name] == "0 B given back"
    assert float(said[subfolder(folder, IDENTITY).name].split(" KB")[0]) >= 60
    store = DiskStore(folder, IDENTITY, disk_bytes=None)
    assert store.stat().pages == 10 and store.get(bytes([25]) * 32) == bytes([25]) * 3000
    store.close()


def test_clear_asks_or_is_told(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.txt").write_text("mine", encoding="utf-8")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["store", "clear", str(folder)]) == 2
    assert "nobody can be asked; legal: --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, code in ((False, 1), (True, 0)):
        assert len(list(folder.iterdir())) == 4
        monkeypatch.setattr("typer.confirm", lambda question, answer=answer: answer)
        assert main(["store", "clear", str(folder)]) == code
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    for verb in ("stat", "clear"):
        capsys.readouterr()
        assert main(["store", verb, str(folder)]) == 0
        assert capsys.readouterr().out == "no pages\n"


@pytest.mark.parametrize("verb", ["stat", "verify", "compact", "clear"])
def test_a_folder_that_is_none_is_one_line(verb: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["store", verb, str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("nowhere is not a folder; legal: the folder of a store")


def test_looking_needs_nothing_heavy(folder: Path) -> None:
    script = (
        "import sys; from rorqual.cli import main\n"
        f"assert main(['store', 'stat', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'numba', 'numpy'} & set(sys.modules)\n"
        f"assert main(['store', 'verify', {str(folder)!r}]) == 0\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
