"""What engines tell of themselves in files: where the files are, which are of living processes, and what they say.

One JSON document a file, one file an engine, written by `rorqual.engine.monitor`. No torch: a reader starts at once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rorqual.errors import InputError

VERSION = 1
"""Of the document; readers refuse another one."""
Document = dict[str, Any]
KEYS = ("pid", "process_start", "started", "written", "model", "runs", "stats", "requests")


def user_folder() -> Path:
    """`$XDG_RUNTIME_DIR/rorqual`, or where that is not set `rorqual-<user id>` among temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "rorqual" if runtime else Path(tempfile.gettempdir()) / f"rorqual-{os.getuid()}"


def process_start(pid: int) -> int | None:
    """When a process started, in the system's own ticks; None where there is no such process, or no /proc.

    It tells a process from a later one that was given the same number.
    """
    try:
        # The name in brackets may hold spaces and brackets of its own.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(document: Document) -> bool:
    """The process that wrote it still runs."""
    pid, start = int(document["pid"]), document["process_start"]
    if start is not None:
        return process_start(pid) == int(start)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True


def read_document(path: Path) -> Document:
    """The document of a living process.

    Raises:
        InputError: no such file, another kind of file, another version, or its process is gone.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"top: {path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"top: {path} is not a JSON document of an engine") from error
    if not isinstance(found, dict) or "version" not in found:
        raise InputError(f"top: {path} is not a JSON document of an engine")
    if found["version"] != VERSION:
        raise InputError(f"top: {path} is of version {found['version']!r}; legal: {VERSION}")
    if any(key not in found for key in KEYS) or not isinstance(found["pid"], int):
        raise InputError(f"top: {path} is not a JSON document of an engine")
    if not is_alive(found):
        raise InputError(f"top: {path} is stale: its process {found['pid']} is gone")
    return found


def find_document(wanted: str | None = None, folder: Path | None = None) -> Path:
    """Which file to read.

    Args:
        wanted: a file, or the number of a process; None for the living process that started last.
        folder: where engines write; the user's own if not given.

    Raises:
        InputError: there is none; of a process, also which others there are.
    """
    if wanted is not None and not wanted.isdecimal():
        return Path(wanted)
    folder = folder or user_folder()
    living = _living(sorted(folder.glob("*.json")))
    if wanted is None:
        if not living:
            raise InputError(f"top: no process publishes anything in {folder}; `rorqual chat` does while it runs")
        return max(living, key=lambda found: found[1]["started"])[0]
    own = [found for found in living if found[1]["pid"] == int(wanted)]
    if own:
        return max(own, key=lambda found: found[1]["started"])[0]
    stale = folder / f"{int(wanted)}.json"
    if stale.exists():
        return stale  # whoever reads it is told what is wrong with it
    others = ", ".join(sorted({str(document["pid"]) for _, document in living})) or "none"
    raise InputError(f"top: process {int(wanted)} publishes nothing in {folder}; processes that do: {others}")


def _living(paths: Sequence[Path]) -> list[tuple[Path, Document]]:
    found = []
    for path in paths:
        try:
            found.append((path, read_document(path)))
        except InputError:
            continue
    return found
