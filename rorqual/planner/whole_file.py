"""A file that appears under its name when it is whole, or not at all: a reader finds the old one or the new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a part beside `path` for writing; it is moved there when the block ends, and removed if it fails.

    A link is followed; what stood there stays until then. Without unit; source: the caller.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with whole_file(Path(folder) / "report.html") as file:
    ...         _ = file.write(b"new")
    ...     [(path.name, path.read_bytes()) for path in Path(folder).iterdir()]
    [('report.html', b'new')]

    Raises:
        OSError: it cannot be written.
    """
    place = path.resolve()
    part = place.with_name(f".{os.urandom(8).hex()}.part")
    try:
        # "x" makes it with the permissions that the user's own files have, and never follows what is there.
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
