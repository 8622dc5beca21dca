"""Files of the user: what is a document, what is left out, what is refused and how."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rorqual.errors import InputError
from rorqual.training.data.documents import Document, Turn
from rorqual.training.data.sources import Files


def read(*paths: Path) -> list[Document]:
    return list(Files(paths).documents())


def test_a_folder_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "deep" / "two.txt").write_bytes("\ufeffzwei\r\nZeilen\r".encode())
    (tmp_path / "a.TXT").write_text("one")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\0\1")
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    assert [(d.name, d.text, d.kind) for d in read(tmp_path)] == [
        ("a.TXT", "one", "text"),
        ("b/deep/two.txt", "zwei\nZeilen\n", "text"),
    ]


def test_jsonl_holds_texts_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    turns = (
        '[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]'
    )
    path.write_text('{"text": "a\u2028b", "id": 7}\n\n{"text": ""}\n{"messages": ' + turns + '}\n{"text": " "}')
    text, chat, blank = read(path)
    assert (text.name, text.text, text.kind) == ("mixed.jsonl:1", "a\u2028b", "text")
    assert (chat.name, chat.kind, chat.characters) == ("mixed.jsonl:4", "chat", 2)
    assert (blank.name, blank.text) == ("mixed.jsonl:5", " ")
    assert chat.turns == (Turn("system", "s"), Turn("user", "q"), Turn("assistant", ""))


def test_a_name_met_again_stays_in_its_group(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(folder)
    documents = read(tmp_path / "x", tmp_path / "y")
    assert [d.name for d in documents] == ["same.txt", "same.txt#2"]
    assert {d.family for d in documents} == {"same.txt"}


def test_a_file_met_again_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "books" / "sub").mkdir(parents=True)
    (tmp_path / "books" / "one.txt").write_text("one")
    (tmp_path / "books" / "sub" / "two.txt").write_text("two")
    (tmp_path / "link.txt").symlink_to(tmp_path / "books" / "one.txt")
    (tmp_path / "way").symlink_to(tmp_path / "books")
    books, sub = tmp_path / "books", tmp_path / "books" / "sub"
    assert [d.name for d in read(books, sub, sub / "two.txt", tmp_path / "link.txt")] == ["one.txt", "sub/two.txt"]
    assert [d.name for d in read(sub, books, tmp_path / "way")] == ["two.txt", "one.txt"]
    assert Files([books, sub]).fingerprint() == Files([books]).fingerprint()


def test_links_to_files_are_read_and_links_to_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    given = tmp_path / "given"
    given.mkdir()
    (given / "folder").symlink_to(tmp_path / "elsewhere")
    (given / "folder.txt").symlink_to(tmp_path / "elsewhere")
    (given / "nowhere.txt").symlink_to(tmp_path / "missing")
    (given / "file.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    assert [d.name for d in read(given)] == ["file.txt"]
    assert [d.name for d in read(given / "folder")] == ["a.txt"], "given by itself it is followed"


def refusing(monkeypatch: pytest.MonkeyPatch, owner: Any, function: str, refused: Path) -> None:
    """The function refuses one path, as it would to whom its permissions shut out (they shut out no superuser)."""
    real = getattr(owner, function)

    def guarded(path: Any, *more: Any, **options: Any) -> Any:
        if os.fspath(path) == os.fspath(refused):
            raise OSError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path, *more, **options)

    monkeypatch.setattr(owner, function, guarded)


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "shut").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("a")
    refusing(monkeypatch, os, "scandir", tmp_path / "deep" / "shut")
    with pytest.raises(InputError, match=r"^data: .*deep/shut cannot be read \(Permission denied\)$"):
        Files([tmp_path])


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a.txt", name):
        (tmp_path / text).write_text("{}")
    files = Files([tmp_path])
    with monkeypatch.context() as patch:
        refusing(patch, Path, "open", tmp_path / name)
        for ask in (lambda: list(files.documents()), files.fingerprint):
            with pytest.raises(InputError, match=rf"^data: .*{name} cannot be read \(Permission denied\)$"):
                ask()
    refusing(monkeypatch, Path, "stat", tmp_path / name)
    with pytest.raises(InputError, match=rf"^data: .*{name} cannot be read \(Permission denied\)$"):
        Files([tmp_path])


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("a")
    for given in (path, tmp_path):
        with pytest.raises(InputError, match=r"the name of the file b'.*caf\\xe9\.txt' is not UTF-8"):
            Files([given])


BAD_LINES = {
    "not JSON": ("{'text': 1}", "line 2: not JSON"),
    "no object": ("[1]", 'line 2: must be {"text"'),
    "neither": ('{"txt": "a"}', 'line 2: must be {"text"'),
    "both": ('{"text": "a", "messages": []}', 'line 2: must be {"text"'),
    "text of another type": ('{"text": 3}', "line 2: text must be a string, got int"),
    "no turns": ('{"messages": []}', "line 2: messages must be a list of at least one turn"),
    "a turn of another type": ('{"messages": ["hi"]}', "line 2: messages[0] must be"),
    "unknown role": ('{"messages": [{"role": "bot", "content": "a"}]}', "role is 'bot', must be one of system, user"),
    "no content": ('{"messages": [{"role": "user"}]}', "messages[0].content must be a string, got NoneType"),
    "an endless integer": ('{"text": "a", "id": ' + "9" * 5000 + "}", "line 2: an integer of more than 4300 digits"),
    "nested too deep": ("[" * 100_000, "line 2: JSON nested too deep"),
    "half a surrogate": ('{"text": "\\ud800"}', "half a surrogate"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(case: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[case]
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InputError) as error:
        read(path)
    assert f"{path}, line 2" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\0b", "zero byte at offset 1"),
        (b"ab\xff", "byte 0xff at offset 2"),
        (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5"),
    ],
)
def test_what_is_no_text_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "binary.txt"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(tmp_path)


def test_missing_and_empty_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is neither a file nor a folder"):
        Files([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"holds no \.txt or \.jsonl file"):
        Files([tmp_path])


def test_the_fingerprint_follows_name_and_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = Files([path]).fingerprint()
    assert Files([tmp_path]).fingerprint() == before
    path.write_text("two")
    changed = Files([path]).fingerprint()
    assert changed != before
    path.rename(tmp_path / "b.txt")
    assert Files([tmp_path]).fingerprint() not in (before, changed)
