"""The folder of a disk store: one subfolder a format version and identity, so that no store ever reads another's files.

FOLDER/v1-0f3a.../store.json       whose pages these are, for people and for `rorqual store stat`
                  lock             held by the one process that has it open, with its number inside
                  index.sqlite     which page is where (`index`)
                  00000007.pages   a segment (`segments`)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.store.interface import StoreIdentity

FORMAT = 1
"""Of the files of a subfolder; a store of another number is left alone."""
LOCK, ABOUT = "lock", "store.json"
_NAME = re.compile(r"v(\d+)-[0-9a-f]{32}")


def subfolder(folder: Path, identity: StoreIdentity) -> Path:
    """Where the pages of an identity are, in this format."""
    fields = json.dumps([identity.fingerprint, identity.page_tokens, identity.page_bytes])
    return folder / f"v{FORMAT}-{hashlib.sha256(fields.encode()).hexdigest()[:32]}"


def subfolders(folder: Path) -> list[Path]:
    """Of every identity and format, in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"store: {folder} is not a folder; legal: the folder of a store")
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def format_of(path: Path) -> int:
    """The format version of a subfolder."""
    found = _NAME.fullmatch(path.name)
    assert found, path
    return int(found[1])


def make(folder: Path, identity: StoreIdentity) -> Path:
    """The identity's subfolder, made where it is missing. Raises InputError."""
    path = subfolder(folder, identity)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"store: {folder} cannot be made ({error.strerror})") from error
    return path


def mention_others(folder: Path, identity: StoreIdentity) -> None:
    """Say which subfolders a store of this identity leaves alone."""
    own = subfolder(folder, identity)
    if others := [path.name for path in subfolders(folder) if path != own]:
        logger.info("store: %s also holds pages of other models or formats, left alone: %s", folder, ", ".join(others))


def write_about(path: Path, identity: StoreIdentity) -> None:
    """Say whose pages a subfolder holds. The name alone decides; this may be missing or damaged."""
    text = json.dumps({"format": FORMAT, **asdict(identity)}, indent=2) + "\n"
    try:
        if (path / ABOUT).read_text(encoding="utf-8") == text:
            return
    except (OSError, ValueError):
        pass
    (path / ABOUT).write_text(text, encoding="utf-8")


def identity_of(path: Path) -> StoreIdentity | None:
    """Whose pages a subfolder holds; None where it does not say so any more, or is of another format."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        identity = StoreIdentity(
            fingerprint=str(about["fingerprint"]),
            page_tokens=int(about["page_tokens"]),
            page_bytes=int(about["page_bytes"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return identity if subfolder(path.parent, identity) == path else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The subfolder for one process alone: `lock` as a context."""
    held = lock(path)
    try:
        yield
    finally:
        os.close(held)


def lock(path: Path) -> int:
    """Take a subfolder for this process and hand out the descriptor that holds it. The system frees it with a process.

    Raises:
        InputError: another process has it, or this one a second time; or it cannot be written.
    """
    file = path / LOCK
    while True:
        try:
            held = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"store: {file} cannot be opened ({error.strerror})") from error
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have removed the folder between the two calls; a lock on a file without a name is none.
            if file.exists() and os.stat(file).st_ino == os.fstat(held).st_ino:
                os.ftruncate(held, 0)
                os.pwrite(held, str(os.getpid()).encode(), 0)
                return held
            os.close(held)
        except BlockingIOError as error:
            owner = os.pread(held, 20, 0).decode(errors="replace") or "unknown"
            os.close(held)
            message = f"store: {path} is open in process {owner}; legal: one process at a time"
            raise InputError(message) from error
