"""A byte-level BPE tokenizer, trained on the documents."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rorqual.training.data.documents import Document
from rorqual.training.data.tokens import LEAST_VOCAB, SPECIAL_TOKENS

SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
"""What no token reaches across, as in the release's tokenizer.json: digits by three, Han and kana, words, marks."""


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """`vocab_size` tokens: the special ones first, then 256 bytes, then merges. Fewer where the text has no more pairs.

    vocab_size: at least LEAST_VOCAB. The same documents in the same order give the same tokenizer.
    """
    assert vocab_size >= LEAST_VOCAB, vocab_size
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((passage for document in documents for passage in document.passages), trainer)
    return tokenizer
