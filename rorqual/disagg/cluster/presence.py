"""Where a cluster that this machine started can be found: one small file of its user, there while it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rorqual.engine.published import process_start, user_folder
from rorqual.errors import InputError

VERSION = 1
FOLDER = "clusters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """Of a running cluster. pid, started: of the process of `cluster up`. address: of its Ray. token: that Ray asks
    for. master: of its Mooncake store, host:port, or empty.
    """

    pid: int
    started: int | None
    address: str
    token: str
    master: str

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists() and process_start(self.pid) == self.started


def presence_file(name: str) -> Path:
    return user_folder() / FOLDER / f"{name}.json"


def find(name: str) -> Presence | None:
    """The running cluster of a name; None where there is none, or its process is gone."""
    try:
        stated = json.loads(presence_file(name).read_text(encoding="utf-8"))
        if stated.pop("version") != VERSION:
            return None
        found = Presence(**stated)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if found.alive else None


@contextmanager
def announced(name: str, *, address: str, token: str, master: str) -> Iterator[Presence]:
    """Be found under a name while the block runs.

    Raises:
        InputError: another one runs under it, or the user's folder is somebody else's.
    """
    refuse_second(name)
    own = Presence(pid=os.getpid(), started=process_start(os.getpid()), address=address, token=token, master=master)
    file = presence_file(name)
    for folder in (file.parent.parent, file.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.is_symlink():
            raise InputError(f"cluster: {folder} is somebody else's folder")
    part = file.with_suffix(f".{own.pid}.part")
    # Whoever reads the token may run code in the cluster.
    with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as out:
        json.dump({"version": VERSION, **asdict(own)}, out)
    part.replace(file)
    try:
        yield own
    finally:
        file.unlink(missing_ok=True)


def refuse_second(name: str) -> None:
    """Raises InputError where a cluster of this name runs."""
    other = find(name)
    if other is not None:
        raise InputError(f"cluster: {name!r} runs already, as process {other.pid}; another name, or `cluster down`")
