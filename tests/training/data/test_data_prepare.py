"""The facade: batches by step, resume, processes, held-out documents, the cache."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.training.batch import Packed
from rorqual.training.data import shards
from rorqual.training.data.prepare import HELDOUT_NUMBERS, TrainingData
from rorqual.training.data.tokens import special_ids
from rorqual.training.recipe import DataRecipe, Recipe, RunRecipe

WORDS = ("sea", "was", "calm", "and", "whale", "rose", "slowly", "beside", "our", "boat", "then", "sank")
DATA = DataRecipe(
    vocab_size=300,
    seq_len=32,
    long_seq_len=64,
    long_from=0.75,
    batch_tokens=192,
    heldout=("book-1.txt",),
    heldout_fraction=0.1,
    chat_fraction=1 / 3,
)


def recipe(**changes: object) -> Recipe:
    data = dataclasses.replace(DATA, **changes)  # type: ignore[arg-type]
    return Recipe(name="test", model=presets.load("tiny").without("vision"), data=data, run=RunRecipe(steps=40))


def sentence(seed: int, words: int) -> str:
    return " ".join(WORDS[(seed * 7 + at * (seed + 3)) % len(WORDS)] for at in range(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    for book in range(4):
        (path / f"book-{book}.txt").write_text(sentence(book, 150))
    lines = [
        {
            "messages": [
                {"role": "user", "content": sentence(n, 4)},
                {"role": "assistant", "content": sentence(n + 50, 9)},
            ]
        }
        for n in range(20)
    ]
    (path / "chats.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data(folder: Path, cache: Path) -> TrainingData:
    return TrainingData.prepare(recipe(), [folder], cache, seed=3)


def same(left: list[Packed], right: list[Packed]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.ids, b.ids) and torch.equal(a.targets, b.targets) and (a.starts, a.number) == (b.starts, b.number)
        for a, b in zip(left, right, strict=True)
    )


def test_resuming_is_asking_for_the_next_step(data: TrainingData, folder: Path, cache: Path) -> None:
    run = [data.batch(step) for step in range(40)]
    for step in (0, 17, 29, 30, 39):
        fresh = TrainingData.prepare(recipe(), [folder], cache, seed=3)
        assert same(fresh.batch(step), run[step])
        assert fresh.fingerprint == data.fingerprint
    numbers = [sequence.number for batch in run for sequence in batch]
    assert numbers == list(range(30 * 6 + 10 * 3))


def test_the_last_steps_are_long(data: TrainingData) -> None:
    assert [tuple(s.ids.shape[0] for s in data.batch(step)) for step in (29, 30)] == [(32,) * 6, (64,) * 3]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_share_the_batch_in_order(data: TrainingData, world: int) -> None:
    for step in (0, 11):
        together = [sequence for rank in range(world) for sequence in data.batch(step, rank, world)]
        assert same(together, data.batch(step))
        assert all(data.batch(step, rank, world) for rank in range(world))


def test_of_more_processes_than_sequences_some_have_none(data: TrainingData) -> None:
    two = TrainingData(data.shards, recipe(batch_tokens=64), 3)
    for step in (0, 11):
        shares = [two.batch(step, rank, 7) for rank in range(7)]
        assert sorted(map(len, shares)) == [0, 0, 0, 0, 0, 1, 1]
        assert same([sequence for share in shares for sequence in share], two.batch(step))


def test_a_step_is_whole_sequences_and_at_least_one(data: TrainingData) -> None:
    for tokens, sequences in ((191, 5), (33, 1), (1, 1)):
        assert len(TrainingData(data.shards, recipe(batch_tokens=tokens), 3).batch(0)) == sequences


def test_a_third_of_the_sequences_are_chat(data: TrainingData) -> None:
    markers = torch.tensor([data.tokenizer.token_to_id(text) for text in ("<｜User｜>", "<｜Assistant｜>")])

    def is_chat(sequence: Packed) -> bool:
        return bool(torch.isin(sequence.ids[:2], markers).any())

    chats = [is_chat(sequence) for step in range(30) for sequence in data.batch(step)]
    assert sum(chats) == 60
    assert sum(chats[:30]) == 10
    only = TrainingData(data.shards, recipe(chat_fraction=1.0), 3)
    assert all(is_chat(sequence) for step in range(6) for sequence in only.batch(step))
    none = TrainingData(data.shards, recipe(chat_fraction=0.0), 3)
    assert not any(is_chat(sequence) for step in range(6) for sequence in none.batch(step))


def test_as_they_come_a_pass_is_every_document_once(data: TrainingData) -> None:
    alike = TrainingData(data.shards, recipe(chat_fraction=-1.0), 3)
    expected: Counter[int] = Counter()
    for _, _, ids in alike.documents("train"):
        expected.update(ids[1:].tolist())
    plan, _ = alike._pools[0].find(0, 32)
    passed = [alike.batch(step) for step in range(-(-plan.sequences // 6))]
    first = [sequence for batch in passed for sequence in batch][: plan.sequences]
    found: Counter[int] = Counter()
    for sequence in first:
        found.update(sequence.targets[sequence.targets >= 0].tolist())
    assert found == expected


def test_what_is_held_out_is_never_trained_on(data: TrainingData) -> None:
    names = {split: [name for name, _, _ in data.documents(split)] for split in ("train", "heldout")}
    assert "book-1.txt" in names["heldout"]
    assert not set(names["train"]) & set(names["heldout"])
    assert len(names["train"]) + len(names["heldout"]) == 24
    assert len(names["heldout"]) == 1 + 3, "a tenth of the 23 others, rounded up"
    (held,) = (ids for name, _, ids in data.documents("heldout") if name == "book-1.txt")
    assert data.tokenizer.decode(held.tolist()) == sentence(1, 150)


def test_documents_begin_and_end(data: TrainingData) -> None:
    special = special_ids(data.tokenizer)
    for split in ("train", "heldout"):
        for _, kind, ids in data.documents(split):
            assert (int(ids[0]), int(ids[-1])) == (special.bos, special.eos)
            assert ids.dtype == torch.int64
            assert int((ids == special.bos).sum()) == 1 and kind in ("text", "chat")


def test_a_conversation_that_the_user_ends_has_no_eos(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (tmp_path / "open.jsonl").write_text(json.dumps({"messages": turns}))
    data = TrainingData.prepare(recipe(heldout=()), [tmp_path], tmp_path / "cache", seed=0)
    ((_, _, ids),) = data.documents("train")
    assert data.tokenizer.decode(ids[-1:].tolist()) == "c"
    assert int((ids == special_ids(data.tokenizer).eos).sum()) == 1


def test_heldout_sequences_are_the_held_out_documents(data: TrainingData) -> None:
    everything = data.heldout_batches(32, 10_000)
    targets = sum(sequence.trained for sequence in everything)
    assert targets == sum(len(ids) - 1 for _, _, ids in data.documents("heldout"))
    assert same(data.heldout_batches(32, 10_000), everything)
    few = data.heldout_batches(32, 3)
    assert len(few) == 3
    numbers = [sequence.number for sequence in everything]
    assert len(set(numbers)) == len(numbers) and min(numbers) >= HELDOUT_NUMBERS
    assert {sequence.number for sequence in few} < set(numbers)
    assert data.heldout_batches(32, 0) == []


def test_the_summary_counts_documents_tokens_and_characters(data: TrainingData) -> None:
    lines = data.summary().splitlines()
    assert lines[0] == "300 tokens in the vocabulary"
    found = [(name, ids) for name, kind, ids in data.documents("heldout", "text")]
    tokens = sum(len(ids) for _, ids in found)
    characters = sum(len(sentence(int(name[5]), 150)) for name, _ in found)
    assert f"heldout text: {len(found)} documents, {tokens:,} tokens, {characters:,} characters" in lines


def test_seed_order_and_content_are_in_the_fingerprint(data: TrainingData, folder: Path, cache: Path) -> None:
    others = [
        TrainingData(data.shards, recipe(), 4),
        TrainingData(data.shards, recipe(batch_tokens=96), 3),
        TrainingData(data.shards, recipe(chat_fraction=0.5), 3),
        TrainingData.prepare(recipe(heldout=("book-2.txt",)), [folder], cache, seed=3),
        TrainingData.prepare(recipe(vocab_size=290), [folder], cache, seed=3),
    ]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert not same(others[0].batch(0), data.batch(0)), "another seed, another order"
    assert data.shards.digest == others[0].shards.digest


def test_a_cut_conversation_goes_on_as_one_that_starts_in_the_turn(tmp_path: Path) -> None:
    turns = [{"role": role, "content": sentence(n, 30)} for n in range(3) for role in ("user", "assistant")]
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": turns}))
    cut = TrainingData.prepare(recipe(heldout=(), batch_tokens=32), [tmp_path], tmp_path / "cache", seed=0)
    ((_, _, ids),) = cut.documents("train")
    whole = ids.tolist()
    special = special_ids(cut.tokenizer)
    openings = {
        (cut.tokenizer.token_to_id("<｜User｜>"),),
        tuple(cut.tokenizer.token_to_id(text) for text in ("<｜Assistant｜>", "</think>")),
    }
    plan, _ = cut._pools[0].find(0, 32)
    found = set()
    for step in range(plan.sequences):
        (sequence,) = cut.batch(step)
        (_, start, _) = plan.pieces[cut._pools[0].find(step, 32)[1]].tolist()
        ids = sequence.ids.tolist()
        if start == 0:
            assert ids == whole[:32]
            continue
        # What precedes the document's own tokens is the opening of the turn that they belong to.
        extra = next(at for at in range(1, 4) if ids[at : at + 20] == whole[start : start + 20][: len(ids) - at])
        marks = [at for at in range(start) if whole[at] in {opening[0] for opening in openings}]
        opening = tuple(ids[1:extra])
        assert ids[0] == special.bos
        assert opening in openings and list(opening) == whole[marks[-1] : marks[-1] + len(opening)]
        assert set(sequence.targets[:extra].tolist()) == {-100}
        found.add(opening)
    assert found == openings


def test_one_document_is_trained_on_and_none_held_out(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("so it goes")
    small = TrainingData.prepare(recipe(heldout=()), [tmp_path / "only.txt"], tmp_path / "cache", seed=0)
    assert small.heldout_batches(32, 8) == []
    assert "nothing to evaluate on" in small.summary()
    for sequence in small.batch(5):
        first, last = sequence.pieces()
        assert small.tokenizer.decode(sequence.ids[: first[1]].tolist()) == "so it goes"
        assert sequence.targets[last[0] :].unique().tolist() == [-100]


def test_no_source_and_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither --data nor a corpus"):
        TrainingData.prepare(recipe(), [], tmp_path / "cache", seed=0)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(InputError, match="no document holds any text"):
        TrainingData.prepare(recipe(heldout=()), [tmp_path / "empty.txt"], tmp_path / "cache", seed=0)
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-made is left"


def test_what_is_read_twice_is_held_out_once_and_never_trained_on(tmp_path: Path) -> None:
    """By paths that overlap and by a link, whether a pattern or a share of the rest holds it out."""
    books = tmp_path / "books"
    (books / "sub").mkdir(parents=True)
    for name in ("one", "two", "sub/held"):
        (books / f"{name}.txt").write_text(f"{name} {sentence(len(name), 60)}")
    (books / "again.txt").symlink_to(books / "sub" / "held.txt")
    paths = [books / "sub", books, books / "sub" / "held.txt"]
    named = {"heldout": ("held.txt",), "heldout_fraction": 0.0}
    for changes in (named, {"heldout": (), "heldout_fraction": 0.6}):
        data = TrainingData.prepare(recipe(chat_fraction=-1.0, **changes), paths, tmp_path / "cache", seed=0)
        texts = {
            split: [data.tokenizer.decode(ids.tolist()) for _, _, ids in data.documents(split)]
            for split in ("train", "heldout")
        }
        assert not set(texts["train"]) & set(texts["heldout"])
        assert len(texts["train"] + texts["heldout"]) == 3
        assert len(texts["heldout"]) == (1 if changes is named else 2)


def test_the_cache_is_used_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "a.txt", tmp_path / "cache"
    source.write_text(sentence(1, 60))

    def prepare() -> TrainingData:
        return TrainingData.prepare(recipe(heldout=()), [source], cache, seed=0)

    first = prepare()
    assert first.shards.array.dtype == "uint16"
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_build", None)
        assert prepare().fingerprint == first.fingerprint, "read, not built"
    source.write_text(sentence(2, 60))
    second = prepare()
    assert second.fingerprint != first.fingerprint
    assert len(list(cache.iterdir())) == 2
    source.write_text(sentence(1, 60))
    (folder,) = (
        path
        for path in cache.iterdir()
        if json.loads((path / "index.json").read_text())["digest"] == first.shards.digest
    )
    for name in ("tokens.bin", "index.json", "tokenizer.json"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-7])
        assert prepare().fingerprint == first.fingerprint, f"{name} was damaged: built again"
    assert len(list(cache.iterdir())) == 2
