"""The cache of tokenised documents: what it holds, who may read it, and what happens when it cannot be had."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rorqual.errors import InputError
from rorqual.training.data import shards
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.documents import Document, Turn
from rorqual.training.data.shards import Shards, open_or_build, tokenised
from rorqual.training.data.tokens import SPECIAL_TOKENS

KEY = "0123456789abcdef0123456789abcdef"
DOCUMENTS = [
    Document(name="a", text="A whale rose beside our boat. "),
    Document(name="b", turns=(Turn("user", "And then?"), Turn("assistant", "It sank."))),
    Document(name="c", text="The sea was calm.", group="d"),
]


def decide() -> tuple[Tokenizer, set[str]]:
    return train_tokenizer(DOCUMENTS, 290), {"d"}


def build(cache: Path, decide: Callable[[], tuple[Tokenizer, set[str]]] = decide) -> Shards:
    return open_or_build(cache, KEY, decide, lambda: DOCUMENTS)


def contents(found: Shards) -> list[list[int]]:
    return [found.ids(document).tolist() for document in range(len(found.entries))]


def test_what_is_written_is_what_was_tokenised(tmp_path: Path) -> None:
    found = build(tmp_path)
    assert found.array.dtype == np.uint16
    assert [(e.name, e.kind, e.split, e.characters) for e in found.entries] == [
        ("a", "text", "train", 30),
        ("b", "chat", "train", 17),
        ("c", "text", "heldout", 17),
    ]
    assert contents(found) == [list(ids) for _, ids in tokenised(decide()[0], DOCUMENTS)]
    assert contents(build(tmp_path)) == contents(found)


def test_a_large_vocabulary_takes_four_bytes_an_id(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"<{number}>" for number in range((1 << 16) - len(SPECIAL_TOKENS))]
    vocabulary = {text: token for token, text in enumerate([*SPECIAL_TOKENS, *filler, *alphabet])}
    large = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    large.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    large.decoder = decoders.ByteLevel()
    found = build(tmp_path, lambda: (large, set()))
    assert found.array.dtype == np.uint32
    ids = found.ids(0).tolist()[1:-1]
    assert min(ids) >= 1 << 16, "ids that two bytes do not hold"
    assert found.tokenizer.decode(ids) == DOCUMENTS[0].text


def test_long_documents_are_tokenised_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = decide()
    together = [(document.name, list(ids)) for document, ids in tokenised(tokenizer, DOCUMENTS * 50)]
    assert [name for name, _ in together] == ["a", "b", "c"] * 50
    assert [len(batch) for batch in shards._batches(DOCUMENTS * 50)] == [64, 64, 22]
    monkeypatch.setattr(shards, "_BATCH_CHARACTERS", 40)
    assert [len(batch) for batch in shards._batches(DOCUMENTS * 2)] == [2, 2, 2]
    apart = [(document.name, list(ids)) for document, ids in tokenised(tokenizer, DOCUMENTS * 50)]
    assert apart == together


def test_others_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        build(tmp_path)
    finally:
        os.umask(before)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_a_cache_that_cannot_be_begun_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^data: the cache .*file/cache cannot be written \(Not a directory\)$"):
        build(tmp_path / "file" / "cache")


@pytest.mark.parametrize("function", ["_put", "asdict"])
def test_a_full_disk_leaves_nothing_half_written(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards, function, full)
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)$"):
            build(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(build(tmp_path).entries) == 3


def test_what_a_source_refuses_is_reported_as_it_is(tmp_path: Path) -> None:
    def refused() -> tuple[Tokenizer, set[str]]:
        raise InputError("data: a.txt cannot be read")

    with pytest.raises(InputError, match=r"^data: a\.txt cannot be read$"):
        build(tmp_path, refused)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_what_cannot_be_opened_now_is_not_damaged(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    whole = contents(build(tmp_path))
    for owner, function in ((np, "memmap"), (Path, "read_text")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, refused)
            with pytest.raises(InputError, match=rf"^data: the cache .* cannot be read \({os.strerror(number)}\)$"):
                build(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_build", None)
        assert contents(build(tmp_path)) == whole, "it is still there"


@pytest.mark.parametrize("name", ["tokens.bin", "index.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_what_is_damaged_is_built_again(name: str, how: str, tmp_path: Path) -> None:
    whole = contents(build(tmp_path))
    path = tmp_path / KEY[:20] / name
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        path.unlink()
    assert contents(build(tmp_path)) == whole
    assert [path.name for path in tmp_path.iterdir()] == [KEY[:20]]


def test_damage_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    (tmp_path / KEY[:20] / "index.json").write_text("{}")
    real = shards.shutil.rmtree
    keep = lambda path, **options: None if path.name == KEY[:20] else real(path, **options)  # noqa: E731
    monkeypatch.setattr(shards.shutil, "rmtree", keep)
    with pytest.raises(InputError, match=r"is damaged and cannot be replaced; remove it"):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [KEY[:20]]


def test_two_that_start_together_end_with_one_folder(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=60)

    def together() -> tuple[Tokenizer, set[str]]:
        both.wait()  # both have seen that there is none
        return decide()

    with ThreadPoolExecutor(2) as pool:
        first, second = (task.result() for task in [pool.submit(build, tmp_path, together) for _ in range(2)])
    assert first.digest == second.digest and contents(first) == contents(second)
    assert [path.name for path in tmp_path.iterdir()] == [KEY[:20]]
