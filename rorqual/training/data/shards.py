"""Tokenised documents on disk: one array of ids, an index, and the tokenizer that made them.

    CACHE/KEY/tokens.bin       ids, uint16 (uint32 from 65,537 tokens), one document after the other
    CACHE/KEY/index.json       documents in order with kind, split, tokens, characters; what the key is made of
    CACHE/KEY/tokenizer.json

The key hashes whatever decides the content, so a changed source, split or vocabulary is another folder, and a folder is
never changed: it is written under another name and moved. Any of them may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.checkpoint.tokenizer import TOKENIZER_FILE, read_tokenizer
from rorqual.errors import InputError
from rorqual.log import logger
from rorqual.training.data.chat import chat_ids
from rorqual.training.data.documents import Document
from rorqual.training.data.tokens import BOS, EOS, token_id

VERSION = 1
"""Of the file format and of how documents become tokens."""

TRAIN, HELDOUT = "train", "heldout"
SPLITS = (TRAIN, HELDOUT)
_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A document of the index. start: of its ids in the array; tokens: its ids, bos and eos counted."""

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
        self.tokenizer = read_tokenizer(folder / TOKENIZER_FILE)
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
        InputError: the cache cannot be written; no document holds text; whatever the callables raise.
    """
    folder = cache / key[:20]
    for attempt in range(2):
        if folder.is_dir():
            try:
                return Shards(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if attempt:
                    raise InputError(f"data: the cache {folder} cannot be read ({error})") from None
                logger.warning("data: %s is damaged (%s) and is built again", folder, error)
                shutil.rmtree(folder, ignore_errors=True)
        _build(cache, folder, decide, documents)
    return Shards(folder)


def _build(cache: Path, folder: Path, decide: Decide, documents: Callable[[], Iterable[Document]]) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache))
    except OSError as error:
        raise InputError(f"data: the cache {cache} cannot be written ({error.strerror})") from None
    try:
        tokenizer, held = decide()
        tokenizer.save(str(unfinished / TOKENIZER_FILE), pretty=False)
        _write(unfinished, tokenizer, documents(), held)
        try:
            os.replace(unfinished, folder)
        except OSError:
            # Another process was first, and its folder holds the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, tokenizer: Tokenizer, documents: Iterable[Document], held: set[str]) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size(with_added_tokens=True) <= 1 << 16 else np.uint32)
    digest = hashlib.sha256(tokenizer.to_str().encode())
    entries: list[Entry] = []
    start = 0
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
    waiting = iter(documents)
    while batch := list(islice(waiting, _BATCH)):
        texts = [document.text for document in batch if document.kind == "text"]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document in batch:
            if document.kind == "text":
                yield document, [bos, *next(encoded).ids, eos]
            else:
                yield document, chat_ids(tokenizer, document.turns)
