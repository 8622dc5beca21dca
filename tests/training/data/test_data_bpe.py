"""The tokenizer: ids of the special tokens, bytes, determinism."""

from __future__ import annotations

import json

import pytest

from rorqual.errors import InputError
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.documents import Document, Turn
from rorqual.training.data.tokens import LEAST_VOCAB, SPECIAL_TOKENS, plain_ids, special_ids, token_id

TEXT = "the whale, the whale's tail; 12345 whales said <｜User｜> twice\n\nthe end. " * 8
DOCUMENTS = [
    Document(name="a", text=TEXT),
    Document(name="b", turns=(Turn("user", "thence"), Turn("assistant", "then"))),
]


def test_special_tokens_come_first_and_only_once() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 310)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 310
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    ids = special_ids(tokenizer)
    assert (ids.bos, ids.eos, ids.pad) == (0, 1, 2)
    assert len({ids.bos, ids.eos, ids.pad, ids.image, ids.noise}) == 5
    spelled = plain_ids(tokenizer, TEXT)
    assert min(spelled) >= len(SPECIAL_TOKENS), "a marker spelled in a text is no marker"
    assert tokenizer.decode(spelled, skip_special_tokens=False) == TEXT
    assert token_id(tokenizer, "<｜User｜>") in tokenizer.encode(TEXT).ids, "the tokenizer itself is left as it was"


def test_any_text_survives() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 300)
    text = "  \t\r\n naïve 東京 🐋 0123456789 \x7f'"
    assert tokenizer.decode(plain_ids(tokenizer, text)) == text


def test_tokens_keep_to_the_releases_words() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, 600)
    tokens = [tokenizer.decode([token]) for token in plain_ids(tokenizer, "the whale's 12345 whales, whale")]
    assert "".join(tokens) == "the whale's 12345 whales, whale"
    assert "123" in tokens and "45" in tokens, "digits by three"
    assert all(token == token.rstrip() or not token.strip() for token in tokens), "a blank opens a word, ends none"


def test_a_small_text_gives_fewer_tokens() -> None:
    assert 276 < train_tokenizer(DOCUMENTS, 5000).get_vocab_size(with_added_tokens=True) < 400


def test_same_documents_same_tokenizer() -> None:
    first, second = (train_tokenizer(iter(DOCUMENTS), 340).to_str() for _ in range(2))
    assert first == second
    assert json.loads(first)["model"]["merges"]


def test_the_least_vocabulary_has_no_merge() -> None:
    tokenizer = train_tokenizer(DOCUMENTS, LEAST_VOCAB)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == LEAST_VOCAB == 276
    assert json.loads(tokenizer.to_str())["model"]["merges"] == []
    assert plain_ids(tokenizer, "whale") == [token_id(tokenizer, letter) for letter in "whale"]


def test_a_foreign_tokenizer_is_refused_by_the_token_it_lacks() -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(InputError, match="begin▁of▁sentence"):
        special_ids(Tokenizer(models.BPE()))
