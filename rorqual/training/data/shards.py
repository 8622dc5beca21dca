"""Tokenised documents on disk: one array of ids, an index, and the tokenizer that made them.

    CACHE/KEY/tokens.bin       ids, uint16 (uint32 from 65,537 tokens), one document after the other
    CACHE/KEY/index.json       version, type of the ids, digest of the content; documents in order (`Entry`)
    CACHE/KEY/tokenizer.json

The key hashes whatever decides the content, so a changed source, split or vocabulary is another folder, and a folder is
never changed: it is written under another name and moved. Any of them may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.checkpoint.tokenizer import TOKENIZER_FILE
from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.training.data.chat import chat_ids
from rorqual.training.data.documents import Document
from rorqual.training.data.tokens import BOS, EOS, token_id

VERSION = 1
"""Of the file format and of how documents become tokens."""

TRAIN, HELDOUT = "train", "heldout"
SPLITS = (TRAIN, HELDOUT)
_BATCH, _BATCH_CHARACTERS = 64, 1 << 20
"""Documents tokenised at once: so many, fewer where they hold so much text."""
_DAMAGE = (ValueError, KeyError, TypeError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What a folder raises that is not as it was written. Other errors of the system say nothing about the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A document of the index. start: of its ids in the array; tokens: its ids, special ones counted."""

    name: str
    kind: str
    split: str
    start: int
    tokens: int
    characters: int


class Shards:
    """A finished folder, its ids memory-mapped."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.tokenizer = _read_tokenizer(folder / TOKENIZER_FILE)
        self.digest: str = index["digest"]
        self.entries = [Entry(**entry) for entry in index["documents"]]
        dtype = np.dtype(index["dtype"])
        path = folder / "tokens.bin"
        total = sum(entry.tokens for entry in self.entries)
        if path.stat().st_size != total * dtype.itemsize:
            raise ValueError(f"{path} does not hold the {total:,} ids of its index")
        self.array: NDArray[np.unsignedinteger] = np.memmap(path, dtype=dtype, mode="r")

    def ids(self, document: int, start: int = 0, stop: int | None = None) -> Tensor:
        """int64, a copy: [start, stop) of the document's ids."""
        entry = self.entries[document]
        stop = entry.tokens if stop is None else min(stop, entry.tokens)
        part = self.array[entry.start + start : entry.start + stop]
        return torch.from_numpy(part.astype(np.int64))


def key_of(parts: Mapping[str, object]) -> str:
    """A hash of JSON-able values by name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


Decide = Callable[[], tuple[Tokenizer, set[str]]]
"""Makes the tokenizer and says which groups are held out."""


def open_or_build(cache: Path, key: str, decide: Decide, documents: Callable[[], Iterable[Document]]) -> Shards:
    """The cache's folder for the key, built when it is not there or damaged. Safe for processes that start together.

    Raises:
        InputError: the cache cannot be read or written; no document holds text; whatever the callables raise.
    """
    folder = cache / key[:20]
    found = _opened(folder)
    if found is None:
        _build(cache, folder, decide, documents)
        found = _opened(folder)
    if found is None:
        raise InputError(f"data: the cache {folder} is damaged and cannot be replaced; remove it, or take another")
    return found


def _opened(folder: Path) -> Shards | None:
    """None where there is none. One that is damaged is removed."""
    if not os.path.isdir(folder):
        return None
    try:
        return Shards(folder)
    except _DAMAGE as error:
        logger.warning("data: %s is damaged (%s) and is not used", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:
        raise InputError(f"data: the cache {folder} cannot be read ({error.strerror})") from None


def _read_tokenizer(path: Path) -> Tokenizer:
    """ValueError where the file holds none; OSError where it cannot be read."""
    text = path.read_text(encoding="utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is no tokenizer.json: {error}") from None


def _build(cache: Path, folder: Path, decide: Decide, documents: Callable[[], Iterable[Document]]) -> None:
    # Not one of `tempfile`: those are the user's alone, and a cache is shared.
    unfinished = cache / f".unfinished-{uuid.uuid4().hex}"
    try:
        with _writing(cache):
            unfinished.mkdir(parents=True)
        tokenizer, held = decide()
        with _writing(cache):
            _write(unfinished, tokenizer, documents(), held)
            try:
                os.replace(unfinished, folder)
            except OSError:
                # Another process was first, and its folder holds the same.
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """What the system refuses in here is the cache's: sources report their own."""
    try:
        yield
    except OSError as error:
        raise InputError(f"data: the cache {cache} cannot be written ({error.strerror})") from None


def _write(folder: Path, tokenizer: Tokenizer, documents: Iterable[Document], held: set[str]) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size(with_added_tokens=True) <= 1 << 16 else np.uint32)
    digest = hashlib.sha256(tokenizer.to_str().encode())
    entries: list[Entry] = []
    start = 0
    (folder / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
    with (folder / "tokens.bin").open("wb") as file:
        for document, ids in tokenised(tokenizer, documents):
            data = np.asarray(ids, dtype=dtype)
            _put(file, data, digest)
            split = HELDOUT if document.family in held else TRAIN
            entry = Entry(
                name=document.name,
                kind=document.kind,
                split=split,
                start=start,
                tokens=len(ids),
                characters=document.characters,
            )
            digest.update(f"{entry.name}\0{entry.kind}\0{split}\0{entry.tokens}\0".encode())
            entries.append(entry)
            start += len(ids)
        file.flush()
        os.fsync(file.fileno())
    if not entries:
        raise InputError("data: no document holds any text")
    index = {"version": VERSION, "dtype": dtype.name, "digest": digest.hexdigest()}
    index["documents"] = [asdict(entry) for entry in entries]
    (folder / "index.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")


def _put(file: IO[bytes], data: NDArray[np.unsignedinteger], digest: hashlib._Hash) -> None:
    little = data.astype(data.dtype.newbyteorder("<")).tobytes()
    file.write(little)
    digest.update(little)


def tokenised(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[tuple[Document, Sequence[int]]]:
    """Each document with its ids: a text between bos and eos, a conversation as the chat encoding renders it."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    bos, eos = token_id(tokenizer, BOS), token_id(tokenizer, EOS)
    for batch in _batches(documents):
        texts = [document.text for document in batch if document.kind == "text"]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document in batch:
            if document.kind == "text":
                yield document, [bos, *next(encoded).ids, eos]
            else:
                yield document, chat_ids(tokenizer, document.turns)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += document.characters
        if len(batch) == _BATCH or held >= _BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
