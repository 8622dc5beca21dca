"""The tokenizer that comes with a random checkpoint, and Engram's vocabulary that must fit it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.tokenizer import write_byte_tokenizer
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.model.ngram import compressed_token_map


@pytest.fixture(scope="module")
def tokenizer(tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), tiny_config)
    return Tokenizer.from_file(str(path))


def compressed_size(path: Path) -> int:
    found = Tokenizer.from_file(str(path))
    return int(compressed_token_map(found, found.get_vocab_size(with_added_tokens=True)).max()) + 1


@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    if "<" not in text:  # a spelled-out special token is that token
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_token_is_a_byte(tokenizer, tiny_config):
    text = "a \n é 🐋"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert all(0 <= token < tiny_config.vocab_size for token in ids)


def test_every_id_decodes_to_a_text_of_its_own(tokenizer, tiny_config):
    assert tokenizer.get_vocab_size(with_added_tokens=True) == tiny_config.vocab_size
    tokens = [tokenizer.id_to_token(token) for token in range(tiny_config.vocab_size)]
    assert None not in tokens and len(set(tokens)) == tiny_config.vocab_size
    assert all(tokenizer.decode([token], skip_special_tokens=False) for token in range(tiny_config.vocab_size))


def test_special_tokens_stand_at_the_configs_ids(tokenizer, tiny_config):
    wanted = {
        "<bos>": tiny_config.bos_token_id,
        "<eos>": tiny_config.eos_token_id,
        "<pad>": tiny_config.pad_token_id,
        "<image>": tiny_config.image_token_id,
        "<noise>": tiny_config.dspark_noise_token_id,
    }
    for text, token in wanted.items():
        assert tokenizer.token_to_id(text) == token
        assert tokenizer.encode(f"a{text}b").ids[1] == token
    assert tokenizer.decode([tokenizer.token_to_id("a"), *wanted.values()]) == "a"  # skipped as special


def test_a_vocabulary_too_small_for_bytes_has_none(tiny_config, tmp_path):
    config = tiny_config.without("vision", "drafts").replace(image_token_id=-1)
    assert write_byte_tokenizer(tmp_path, config.replace(vocab_size=259, engram_compressed_vocab_size=259)) is not None
    (tmp_path / "tokenizer.json").unlink()
    small = config.replace(vocab_size=258, engram_compressed_vocab_size=100)
    assert write_byte_tokenizer(tmp_path, small) is None
    written = write_random(small, tmp_path / "small", compressed_size=compressed_size)
    assert not (tmp_path / "small" / "tokenizer.json").exists()
    assert written.engram_compressed_vocab_size == 258  # the map is then the identity


def test_the_compressed_vocabulary_is_asked_of_the_tokenizer_written(tiny_config, tmp_path):
    written = write_random(tiny_config, tmp_path / "x", compressed_size=compressed_size)
    # A-Z fold onto a-z; tab, line feed and carriage return onto the space.
    assert written.engram_compressed_vocab_size == tiny_config.vocab_size - 26 - 3
    assert ModelConfig.from_json(tmp_path / "x") == written
    assert (tmp_path / "x" / "tokenizer.json").exists()


def test_without_that_number_a_model_with_engram_gets_no_tokenizer(tiny_config, tmp_path):
    small = tiny_config.replace(engram_compressed_vocab_size=100)
    assert write_random(small, tmp_path / "x").engram_compressed_vocab_size == tiny_config.vocab_size
    assert not (tmp_path / "x" / "tokenizer.json").exists()
    write_random(tiny_config.without("engram"), tmp_path / "y")
    assert (tmp_path / "y" / "tokenizer.json").exists()


def test_a_tokenizer_is_copied(goldens, tiny_config, tmp_path):
    source = goldens / "fp32-text" / "tokenizer.json"
    written = write_random(tiny_config, tmp_path / "x", tokenizer=source, compressed_size=compressed_size)
    assert written.engram_compressed_vocab_size == 422  # as the reference checkpoints' configs say
    assert (tmp_path / "x" / "tokenizer.json").read_bytes() == source.read_bytes()


def test_a_tokenizer_that_does_not_fit_is_refused(goldens, tiny_config, tmp_path):
    source = goldens / "fp32-text" / "tokenizer.json"
    small = tiny_config.without("vision", "drafts", "engram").replace(vocab_size=300, image_token_id=-1)
    with pytest.raises(InputError, match="has 512 tokens, the config's vocab_size is 300"):
        write_random(small, tmp_path / "x", tokenizer=source)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad\.json: not a tokenizer\.json"):
        write_random(tiny_config, tmp_path / "x", tokenizer=tmp_path / "bad.json")
    assert not (tmp_path / "x").exists()
