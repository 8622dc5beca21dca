"""The page on disk: written beside its place and moved there, so that a reader finds the old one or the new one."""

from __future__ import annotations

from pathlib import Path

from rorqual.errors import InputError
from rorqual.planner.whole_file import whole_file


def check_path(out: Path) -> None:
    """Refuse what cannot become a file, before anything is computed. Without unit; source: the caller's path.

    >>> check_path(Path("no/such/folder/report.html"))
    Traceback (most recent call last):
    rorqual.errors.InputError: --out must be in a folder that exists; no/such/folder does not

    Raises:
        InputError: a folder that is not there, or something that is no ordinary file in its place.
    """
    try:
        if not out.parent.is_dir():
            raise InputError(f"--out must be in a folder that exists; {out.parent} does not")
        if out.exists() and not out.is_file():
            raise InputError(f"--out must be an ordinary file; {out} is not")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written ({error.strerror})") from None


def write(text: str, out: Path) -> int:
    """Write the page and return its bytes. A link is followed; what stood there stays until the new page is whole.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write("<p>Größe", Path(folder) / "report.html")
    10

    Source: the caller. Raises InputError where the path cannot be written.
    """
    check_path(out)
    try:
        with whole_file(out) as file:
            return file.write(text.encode())
    except OSError as error:
        raise InputError(f"--out {out} cannot be written ({error.strerror})") from None
