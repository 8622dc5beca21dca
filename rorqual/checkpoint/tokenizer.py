"""A tokenizer for random checkpoints: one token a byte, so that any text goes in and every id comes out as text."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rorqual.config import ModelConfig
from rorqual.errors import InputError

TOKENIZER_FILE = "tokenizer.json"


def copy_tokenizer(source: Path, folder: Path, config: ModelConfig) -> Path:
    """Copy a tokenizer.json whose ids lie below the config's vocab_size. InputError when it is none, or too large."""
    size = read_tokenizer(source).get_vocab_size(with_added_tokens=True)
    if size > config.vocab_size:
        raise InputError(f"{source}: has {size:,} tokens, the config's vocab_size is {config.vocab_size:,}")
    target = folder / TOKENIZER_FILE
    shutil.copyfile(source, target)
    return target


def read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise InputError(f"{path}: no such tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a tokenizer.json ({error})") from None


def write_byte_tokenizer(folder: Path, config: ModelConfig) -> Path | None:
    """Write tokenizer.json, or nothing (None) where the vocabulary cannot hold 256 bytes and the special tokens.

    Special tokens stand at the config's ids, bytes at the lowest ids left, and `<N>` at every other id N: a model of
    random weights emits those too, and they must decode.
    """
    specials = _special_tokens(config)
    free = [token for token in range(config.vocab_size) if token not in specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if len(free) < len(alphabet):
        return None
    vocabulary = {text: token for token, text in specials.items()}
    vocabulary |= dict(zip(alphabet, free, strict=False))
    vocabulary |= {f"<{token}>": token for token in free[len(alphabet) :]}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Word splitting would change nothing, there are no merges; it is off for speed.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
    path = folder / TOKENIZER_FILE
    tokenizer.save(str(path), pretty=False)
    return path


def _special_tokens(config: ModelConfig) -> dict[int, str]:
    """Id -> text; where the config gives two the same id, the first keeps it."""
    wanted = [(config.bos_token_id, "<bos>"), (config.eos_token_id, "<eos>"), (config.pad_token_id, "<pad>")]
    if config.image_token_id >= 0:
        wanted.append((config.image_token_id, "<image>"))
    if config.num_nextn_predict_layers:
        wanted.append((config.dspark_noise_token_id, "<noise>"))
    return dict(reversed(wanted))
