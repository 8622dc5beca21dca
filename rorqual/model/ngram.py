"""Which rows of the Engram tables a position reads: the compressed vocabulary and the n-gram hash (SPEC section 8).

Three steps, integers only:

* `compressed_token_map` folds the vocabulary: tokens that differ in case, accents or white space share an id.
* `compress_ids` maps a prompt and marks its image-span positions with `IMAGE`.
* `NgramHash.rows` folds the ids of a position and its lookbacks into (max_ngram - 1) x heads row ids a layer.

The hash of a position needs the last max_ngram - 1 compressed ids before it and nothing else, so a sequence keeps that
many ("history", newest last) and chunks of any size give the rows of one shot. Any negative id ends the n-gram: it and
every older id count as the pad. `IMAGE` and `BEFORE` (no such position) therefore hash alike; they are two so that a
history can be read by a human.

Shapes: T tokens, V vocabulary, N max_ngram, H heads, L Engram layers, E = (N - 1) * H columns, n-gram-major.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from rorqual.errors import ConfigError

IMAGE = -1
BEFORE = -2

# Each Engram layer seeds its multipliers with SEED_STEP * layer id.
SEED_STEP = 10007


def compressed_token_map(
    tokenizer: Tokenizer, vocab_size: int, *, compressed_vocab: int | None = None
) -> npt.NDArray[np.int64]:
    """The compressed id of every token id, [V]; new ids in order of first appearance (99,092 of the release's 129,280).

    A token is decoded alone, special tokens kept. One that is no text by itself (part of a UTF-8 sequence) is keyed by
    the vocabulary's own spelling, any other by its folded text. An id below `vocab_size` that the tokenizer does not
    know decodes to nothing, so all such ids share the key "".

    Raises ConfigError when `compressed_vocab` (config key engram_compressed_vocab_size) is given and is not the number
    of ids found: the multipliers depend on it, so another tokenizer would read wrong rows in silence.
    """
    texts = tokenizer.decode_batch([[i] for i in range(vocab_size)], skip_special_tokens=False)
    fold = _TextFolder()
    ids: dict[str, int] = {}
    token_map = np.empty(vocab_size, dtype=np.int64)
    for i, text in enumerate(texts):
        key = (tokenizer.id_to_token(i) or "") if "\ufffd" in text else fold(text)
        token_map[i] = ids.setdefault(key, len(ids))
    if compressed_vocab is not None and len(ids) != compressed_vocab:
        raise ConfigError(
            f"engram_compressed_vocab_size is {compressed_vocab}, but this tokenizer's {vocab_size} ids "
            f"fold into {len(ids)}: tokenizer and config do not belong together"
        )
    return token_map


def identity_token_map(vocab_size: int) -> npt.NDArray[np.int64]:
    """The map of a model without a tokenizer, [V]: every token is its own compressed id."""
    return np.arange(vocab_size, dtype=np.int64)


class _TextFolder:
    """NFKC, NFD, strip accents, lower case, one space for a run of [ \\t\\r\\n], strip, except a lone space.

    The normalisers of `tokenizers` rather than `unicodedata`: "accents" are all three mark categories (Mn alone gives
    99,510 ids), and the Unicode tables then do not change with the Python version.
    """

    def __init__(self) -> None:
        self._fold = normalizers.Sequence(
            [
                normalizers.NFKC(),
                normalizers.NFD(),
                normalizers.StripAccents(),
                normalizers.Lowercase(),
                normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            ]
        )
        self._strip = normalizers.Strip()

    def __call__(self, text: str) -> str:
        folded: str = self._fold.normalize_str(text)
        if folded != " ":
            folded = self._strip.normalize_str(folded)
        return folded or text


def compress_ids(token_map_V: Tensor, ids_T: Tensor, is_image_T: Tensor | None = None) -> Tensor:
    """Compressed ids [T] (int64) of token ids [T]; `IMAGE` wherever `is_image_T` (the span's delimiters included)."""
    compressed_T = token_map_V[ids_T]
    return compressed_T if is_image_T is None else compressed_T.masked_fill(is_image_T, IMAGE)


def primes_from(start: int, count: int) -> npt.NDArray[np.int64]:
    """The first `count` primes >= `start`, ascending: a sieve over a segment just long enough."""
    start = max(start, 2)
    span = 64
    while True:
        found = _primes_in(start, start + span)
        if len(found) >= count:
            return found[:count]
        span = max(2 * span, int(2 * (count - len(found)) * math.log(start + span)))


def _primes_in(start: int, end: int) -> npt.NDArray[np.int64]:
    """All primes in [start, end), start >= 2."""
    root = math.isqrt(end - 1)
    small = np.ones(root + 1, dtype=bool)
    is_prime = np.ones(end - start, dtype=bool)
    for p in range(2, root + 1):
        if not small[p]:
            continue
        small[p * p :: p] = False
        is_prime[max(p * p, -(-start // p) * p) - start :: p] = False
    return np.flatnonzero(is_prime).astype(np.int64) + start


class NgramHash:
    """The hash of all Engram layers: constants drawn once, rows for any chunk of a sequence.

    `vocab_size` is config key engram_vocab_size (a lower bound of the buckets, not the tokenizer's vocabulary);
    `pad_id` is the *compressed* id of the pad token. The primes are consecutive ones >= `vocab_size`, never reused, in
    the order layer, n-gram size, head; the multipliers of layer i are odd and small enough that id * multiplier stays
    positive in int64.

    Attributes: multipliers [L, N], primes [L, N - 1, H], offsets [L, E] (first row of each bucket), all int64;
    `table_rows`: rows of each layer's table, the sum of its primes.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        vocab_size: int,
        max_ngram: int,
        n_heads: int,
        compressed_vocab: int,
        pad_id: int,
    ) -> None:
        assert max_ngram >= 2 and n_heads >= 1 and 0 <= pad_id < compressed_vocab
        self.layer_ids = tuple(layer_ids)
        self.max_ngram = max_ngram
        self.n_heads = n_heads
        self.compressed_vocab = compressed_vocab
        self.pad_id = pad_id
        columns = (max_ngram - 1) * n_heads
        primes_LE = primes_from(vocab_size, len(self.layer_ids) * columns).reshape(-1, columns)
        self.primes = torch.from_numpy(primes_LE.reshape(-1, max_ngram - 1, n_heads))
        self.offsets = torch.from_numpy(np.cumsum(primes_LE, axis=1) - primes_LE)
        self.multipliers = torch.from_numpy(self._draw_multipliers())
        self.table_rows: tuple[int, ...] = tuple(int(total) for total in primes_LE.sum(axis=1))

    @property
    def columns(self) -> int:
        """Rows read per position and layer, E: 24 in the release."""
        return (self.max_ngram - 1) * self.n_heads

    @property
    def history_size(self) -> int:
        """Compressed ids a sequence keeps for its next chunk."""
        return self.max_ngram - 1

    def no_history(self) -> Tensor:
        """The history of a sequence's first position, [N - 1]: no position before it."""
        return torch.full((self.history_size,), BEFORE, dtype=torch.int64)

    def next_history(self, compressed_T: Tensor, history: Tensor | None = None) -> Tensor:
        """The history after these ids, [..., N - 1], newest last; T may be 0 or less than N - 1."""
        return self._with_history(compressed_T, history)[..., compressed_T.shape[-1] :].clone()

    def rows(self, compressed_T: Tensor, history: Tensor | None = None) -> Tensor:
        """Row ids [..., T, L, E] of compressed ids [..., T] that follow `history` [..., N - 1] (None: nothing before).

        With N = 3 and ids [7, IMAGE, 5, 9] the lookbacks are, newest first: 7 pad pad; pad pad pad; 5 pad pad; 9 5 pad.
        """
        seen, count, last = self._with_history(compressed_T, history), compressed_T.shape[-1], self.history_size
        lookbacks = [seen[..., last - k : last - k + count] for k in range(self.max_ngram)]
        return self.rows_of_lookbacks(torch.stack(lookbacks, dim=-1))

    def rows_of_lookbacks(self, lookback_TN: Tensor) -> Tensor:
        """Row ids [..., L, E] where lookback [..., k] is the compressed id k positions back (0: the position itself).

        For rows of many sequences in one call; `rows` builds the lookbacks of one sequence.
        """
        assert lookback_TN.shape[-1] == self.max_ngram
        assert lookback_TN.numel() == 0 or int(lookback_TN.max()) < self.compressed_vocab
        device = lookback_TN.device
        broken_TN = (lookback_TN < 0).cumsum(-1) > 0
        ids_TN = lookback_TN.masked_fill(broken_TN, self.pad_id)
        terms_TLN = ids_TN.unsqueeze(-2) * self.multipliers.to(device)
        primes_LGH = self.primes.to(device)
        running_TL = terms_TLN[..., 0]
        buckets = []
        for k in range(1, self.max_ngram):
            running_TL = running_TL ^ terms_TLN[..., k]
            buckets.append(running_TL.unsqueeze(-1) % primes_LGH[:, k - 1])
        return torch.stack(buckets, dim=-2).flatten(-2) + self.offsets.to(device)

    def _with_history(self, compressed_T: Tensor, history: Tensor | None) -> Tensor:
        """History and ids as one run, [..., N - 1 + T]."""
        if history is None:
            history = self.no_history().to(compressed_T.device).expand(*compressed_T.shape[:-1], -1)
        assert history.shape[-1] == self.history_size and compressed_T.dtype == torch.int64
        return torch.cat([history, compressed_T], dim=-1)

    def _draw_multipliers(self) -> npt.NDArray[np.int64]:
        """Odd multipliers [L, N], one generator a layer."""
        bound = max(1, int(np.iinfo(np.int64).max) // self.compressed_vocab // 2)
        drawn = np.empty((len(self.layer_ids), self.max_ngram), dtype=np.int64)
        for i, layer_id in enumerate(self.layer_ids):
            generator = np.random.default_rng(SEED_STEP * layer_id)
            drawn[i] = generator.integers(0, bound, size=self.max_ngram, dtype=np.int64) * 2 + 1
        return drawn
