"""What a study has measured so far, on disk: one line a window and variant, so that a run that stops goes on later.

The first line says what the run is; a folder with another one is refused, never mixed in or written over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rorqual.errors import InputError

FILE = "partial.jsonl"

Row = dict[str, Any]


class Store:
    """Rows of one run, found by (what, number); `add` returns once they are in the file.

    Raises:
        InputError: the folder holds another run, or cannot be written.
    """

    def __init__(self, folder: Path, run: Row) -> None:
        self.path = folder / FILE
        self._rows: dict[tuple[str, int], Row] = {}
        # As it will be read back: tuples are lists there.
        run = json.loads(json.dumps(run))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._read(run):
                self.path.write_text(json.dumps({"run": run}) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"out: {folder} cannot be written ({error.strerror})") from error

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._rows

    def of(self, what: str) -> dict[int, Row]:
        """Rows of one kind by number, in the order of the numbers."""
        return {key[1]: self._rows[key] for key in sorted(self._rows) if key[0] == what}

    def add(self, rows: dict[tuple[str, int], Row]) -> None:
        """Keep new rows."""
        self._rows |= rows
        lines = [json.dumps({"what": what, "number": number, **row}) + "\n" for (what, number), row in rows.items()]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _read(self, run: Row) -> bool:
        """Take over the rows of an earlier run of the same kind; a last line that was cut off is dropped."""
        if not self.path.exists():
            return False
        whole, _, cut = self.path.read_text(encoding="utf-8").rpartition("\n")
        if not whole:
            return False
        lines = [json.loads(line) for line in whole.splitlines()]
        stated = lines[0].get("run")
        if stated != run:
            other = next((key for key in run if not isinstance(stated, dict) or stated.get(key) != run[key]), "run")
            raise InputError(
                f"out: {self.path.parent} holds results of another run (its {other} differs); give a new folder"
            )
        for row in lines[1:]:
            self._rows[row.pop("what"), row.pop("number")] = row
        if cut:
            self.path.write_text(whole + "\n", encoding="utf-8")
        return True
