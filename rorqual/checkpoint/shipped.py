"""The model that comes with the package: what `--model` and `rorqual.load` take when none is named. No torch.

`demo/` beside this file holds a checkpoint of three files, made by the recipe `demo`, and the passage that the demo
continues.
"""

from __future__ import annotations

from pathlib import Path

from rorqual.checkpoint.index import SINGLE_FILE
from rorqual.errors import CheckpointError

FOLDER = Path(__file__).parent / "demo"
FILES = ("config.json", "tokenizer.json", SINGLE_FILE)
PASSAGE = FOLDER / "passage.txt"


def shipped_model(folder: Path | None = None) -> Path:
    """The folder of the shipped checkpoint; `folder` looks in another one.

    Raises:
        CheckpointError: this installation lacks one of its files.
    """
    folder = FOLDER if folder is None else folder
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"model: none given, and the one that ships with the package lacks {', '.join(missing)} here; name a "
            "checkpoint folder, such as one that `rorqual init tiny DIR` makes"
        )
    return folder


def passage() -> str:
    """A text that the shipped model was not trained on, for it to continue: the demo's prompt."""
    return PASSAGE.read_text(encoding="utf-8").rstrip("\n")
