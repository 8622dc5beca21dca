"""Text files, folders and JSONL given by the user.

A text file is one document. A line of a `.jsonl` file is one: `{"text": "..."}` or `{"messages": [{"role": "user",
"content": "..."}, ...]}`; other keys are not read. In a folder every `.txt` and `.jsonl` file counts, at any depth;
other and hidden files are left alone, and links to folders are not followed. A file given by itself counts whatever its
ending. Left out are text files of nothing but white space, blank lines of JSONL, and what holds no character there.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rorqual.errors import InputError
from rorqual.training.data.documents import ROLES, Document, Turn

ENDINGS = (".txt", ".jsonl")


class Files:
    """The documents under the given paths, in the order of the paths, files of a folder by name.

    A document's name is its path below the folder given (a file's is its own name), with `:LINE` for a line of JSONL.
    A name met again gets `#2`, `#3`, ...: both stay in one held-out group. A file met again, by paths that overlap or
    by a link, is left out: under its second name it might be trained on though it is held out under its first.

    Raises:
        InputError: a path that does not exist, a folder with no file of these kinds, or what cannot be looked into; a
            file's name that is not UTF-8.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.files: list[tuple[str, Path]] = []
        seen: set[Path] = set()
        for given in paths:
            for name, path in _found(Path(given)):
                real = path.resolve()
                if real not in seen:
                    seen.add(real)
                    self.files.append((name, path))

    def documents(self) -> Iterator[Document]:
        """Raises InputError on a file that cannot be read or is not UTF-8 text, or on a bad line, naming both."""
        seen: dict[str, int] = {}
        for name, path in self.files:
            times = seen[name] = seen.get(name, 0) + 1
            unique = f"{name}#{times}" if times > 1 else name
            if path.suffix.lower() == ".jsonl":
                for line, document in _lines(path):
                    yield _named(document, f"{unique}:{line}", f"{name}:{line}")
            else:
                with _reading(path):
                    data = path.read_bytes()
                text = _decoded(data, str(path))
                if text.strip():
                    yield Document(name=unique, text=text, group=name)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, path in self.files:
            with _reading(path), path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(hashlib.sha256(name.encode()).digest() + content)
        return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the system refuses in here is an InputError that names the path, or the one below it that was refused."""
    try:
        yield
    except OSError as error:
        raise InputError(f"data: {error.filename or path} cannot be read ({error.strerror})") from None


def _found(path: Path) -> list[tuple[str, Path]]:
    """(name, path) of the file, or of the files that count below the folder."""
    if _is_file(path):
        found = [(path.name, path)]
    elif path.is_dir():
        found = _below(path)
    else:
        raise InputError(f"data: {path} is neither a file nor a folder")
    for name, file in found:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InputError(f"data: the name of the file {os.fsencode(file)!r} is not UTF-8") from None
    return found


def _below(folder: Path) -> list[tuple[str, Path]]:
    found = []
    with _reading(folder):
        for parent, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(parent, name) for name in names if not name.startswith(".")):
                if path.suffix.lower() in ENDINGS and _is_file(path):
                    found.append((path.relative_to(folder).as_posix(), path))
    if not found:
        raise InputError(f"data: {folder} holds no {' or '.join(ENDINGS)} file")
    return sorted(found)


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_file(path: Path) -> bool:
    """Links are followed; one that leads nowhere is no file."""
    with _reading(path):
        try:
            return stat.S_ISREG(path.stat().st_mode)
        except FileNotFoundError:
            return False


def _decoded(data: bytes, where: str) -> str:
    """UTF-8, a byte order mark dropped, line ends as \\n."""
    if b"\0" in data:
        raise InputError(f"data: {where} is not text (a zero byte at offset {data.index(0)})")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"data: {where} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start})"
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _lines(path: Path) -> Iterator[tuple[int, Document]]:
    """(line number from 1, nameless document) of each line that holds text."""
    with _reading(path), path.open("rb") as file:
        for number, data in enumerate(file, 1):
            where = f"{path}, line {number}"
            text = _decoded(data, where).strip()
            if not text:
                continue
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise InputError(f"data: {where}: not JSON ({error.msg}, column {error.colno})") from None
            except ValueError:  # of an integer that Python does not convert
                most = sys.get_int_max_str_digits()
                raise InputError(f"data: {where}: an integer of more than {most} digits") from None
            except RecursionError:
                raise InputError(f"data: {where}: JSON nested too deep") from None
            document = _parsed(value, where)
            if document.characters:
                yield number, document


def _parsed(value: Any, where: str) -> Document:
    form = '{"text": "..."} or {"messages": [{"role": "...", "content": "..."}, ...]}'
    if not isinstance(value, dict) or ("text" in value) == ("messages" in value):
        raise InputError(f"data: {where}: must be {form}")
    if "text" in value:
        return Document(name="", text=_string(value["text"], f"{where}: text"))
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"data: {where}: messages must be a list of at least one turn")
    return Document(name="", turns=tuple(_turn(turn, f"{where}: messages[{i}]") for i, turn in enumerate(messages)))


def _turn(value: Any, where: str) -> Turn:
    if not isinstance(value, dict):
        raise InputError(f'data: {where} must be {{"role": "...", "content": "..."}}')
    role = value.get("role")
    if role not in ROLES:
        raise InputError(f"data: {where}.role is {role!r}, must be one of {', '.join(ROLES)}")
    return Turn(role, _string(value.get("content"), f"{where}.content"))


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"data: {where} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"data: {where} holds half a surrogate pair") from None
    return value


def _named(document: Document, name: str, group: str) -> Document:
    return Document(name=name, text=document.text, turns=document.turns, group=group)
