"""A config that fits a tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer

from rorqual.config import ModelConfig
from rorqual.model.ngram import NgramHash, compressed_token_map
from rorqual.training.data.tokens import special_ids


def fit_config(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The config with everything that a tokenizer decides: vocabulary, special ids, Engram's folded vocabulary.

    Raises:
        InputError: the tokenizer lacks a special token that the config needs.
    """
    ids, vocab = special_ids(tokenizer), tokenizer.get_vocab_size(with_added_tokens=True)
    fitted = config.replace(
        vocab_size=vocab,
        bos_token_id=ids.bos,
        eos_token_id=ids.eos,
        pad_token_id=ids.pad,
        image_token_id=ids.image,
        dspark_noise_token_id=ids.noise,
        engram_pad_token_id=ids.pad,
        engram_compressed_vocab_size=min(vocab, config.engram_compressed_vocab_size),
    )
    if not config.engram_layer_ids:
        return fitted
    token_map = compressed_token_map(tokenizer, vocab)
    folded = int(token_map.max()) + 1
    made = NgramHash(
        config.engram_layer_ids,
        config.engram_vocab_size,
        config.engram_max_ngram_size,
        config.engram_n_heads,
        folded,
        int(token_map[ids.pad]),
    )
    return fitted.replace(engram_compressed_vocab_size=folded, engram_num_embeddings=made.table_rows)
