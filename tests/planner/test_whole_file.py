"""A file is whole or not there: what fails half way leaves the old one, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rorqual.errors import InputError
from rorqual.planner.report import write
from rorqual.planner.traces import synthetic
from rorqual.planner.whole_file import whole_file


def test_the_new_one_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), ValueError()])
def test_what_fails_half_way_leaves_the_old_one(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), whole_file(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, there = tmp_path / "link", tmp_path / "folder" / "there"
    link.symlink_to(there)
    assert write("text", link) == 4
    assert link.is_symlink() and there.read_text() == "text"


def test_a_synthetic_trace_that_is_interrupted_is_not_there(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "trace.jsonl"
    with pytest.raises(KeyboardInterrupt):
        synthetic.write(str(path), 5000, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    # Something of that name may be a link to nowhere: it is not ours to replace.
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="File exists"):
        synthetic.write(str(path), 1)
    with pytest.raises(InputError, match="No such file or directory"):
        synthetic.write(str(tmp_path / "no" / "trace.jsonl"), 1)
