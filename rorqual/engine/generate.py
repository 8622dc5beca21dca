"""Text in, text out, one sequence: what `rorqual generate` runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.engine.ids import as_ids
from rorqual.engine.images import ImageSource, image_prompt, read_images
from rorqual.engine.sampler import Sampler, SamplingParams
from rorqual.engine.sequence import Sequence as Running
from rorqual.engine.sequence import check_choice, new_cache
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import ImageInput, image_token_ids


@dataclass(slots=True)
class Stats:
    """What a generation cost. Seconds are wall clock; bytes are measured on the allocated tensors.

    page_bytes: the pages of global KV, which hold `capacity` tokens. sequence_bytes: all that does not grow with
    tokens, of which window_bytes are the backbone's rings.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    capacity: int = 0
    page_bytes: int = 0
    sequence_bytes: int = 0
    window_bytes: int = 0
    layer_tokens: int = 0
    layer_tokens_full: int = 0
    finish_reason: str = ""

    @property
    def bytes_per_token(self) -> float:
        """Global KV of one token, from the bytes of the pages."""
        return self.page_bytes / max(1, self.capacity)

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        return max(0, self.new_tokens - 1) / max(self.decode_seconds, 1e-9)


@dataclass(slots=True)
class Generation:
    """A running generation: iterate for text deltas; `ids` and `stats` fill as it goes."""

    deltas: Iterator[str]
    ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __iter__(self) -> Iterator[str]:
        return self.deltas


def checked_tokenizer(model: Transformer, prompt: str) -> Tokenizer:
    """The model's tokenizer. Raises InputError when there is none, or for a text that it cannot take."""
    if model.tokenizer is None:
        raise InputError("prompt: this checkpoint has no tokenizer.json; give token ids instead of text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("prompt: not valid UTF-8 text") from error
    return model.tokenizer


def encode(model: Transformer, prompt: str, images: Sequence[ImageInput] = ()) -> Tensor:
    """Token ids of a text: bos, one span per image, then the text.

    Raises:
        InputError: no tokenizer, or an empty prompt.
    """
    tokenizer = checked_tokenizer(model, prompt)
    if not prompt and not images:
        raise InputError("prompt: empty; give at least one character")
    config = model.config
    text = tokenizer.encode(prompt, add_special_tokens=False).ids
    spans = [image_token_ids(i.grid, config.image_token_id) for i in images]
    return torch.cat((torch.tensor([config.bos_token_id]), *spans, torch.tensor(text, dtype=torch.int64)))


def generate(
    model: Transformer,
    prompt: str | Tensor | Sequence[int],
    *,
    max_tokens: int = 128,
    sampling: SamplingParams | None = None,
    prefill: str = "ced",
    chunk: int | None = 512,
    images: Sequence[ImageSource] = (),
) -> Generation:
    """Generate up to `max_tokens` tokens after a prompt (text, or ids int64 [N]).

    Raises:
        InputError: before anything is computed, for an empty prompt, ids or options outside their range, or a prompt
            that leaves no position for a new token.
    """
    check_choice("prefill", prefill, ("ced", "full"))
    if max_tokens < 1:
        raise InputError(f"max_tokens: {max_tokens} is not legal; legal: at least 1")
    pictures = read_images(model, images)
    ids = encode(model, prompt, pictures) if isinstance(prompt, str) else as_ids(prompt, "prompt")
    limit = model.config.max_position_embeddings
    if len(ids) >= limit:
        raise InputError(f"prompt: {len(ids)} tokens do not fit the model's {limit} positions with a new token")
    budget = min(max_tokens, limit - len(ids))
    result = Generation(iter(()))
    result.deltas = _stream(model, ids, pictures, budget, sampling or SamplingParams(), prefill, chunk, result)
    return result


def _stream(
    model: Transformer,
    ids: Tensor,
    pictures: Sequence[ImageInput],
    budget: int,
    sampling: SamplingParams,
    prefill: str,
    chunk: int | None,
    result: Generation,
) -> Iterator[str]:
    stats, sampler = result.stats, Sampler(sampling)
    sequence = Running(model, new_cache(model, len(ids) + budget))
    decoder = Detokenizer(model.tokenizer)
    start = time.perf_counter()
    logits = sequence.prefill(image_prompt(model, ids, pictures), mode=prefill, chunk=chunk)[-1].logits
    stats.prompt_tokens, stats.prefill_seconds = len(ids), time.perf_counter() - start
    stats.layer_tokens = sequence.layer_tokens
    stats.layer_tokens_full = len(ids) * model.config.num_hidden_layers
    stats.window_bytes = sequence.cache.slots.rings.nbytes
    stats.sequence_bytes = sequence.cache.slots.nbytes
    stats.page_bytes, stats.capacity = sequence.cache.pages.nbytes, sequence.capacity
    start = time.perf_counter()
    stats.finish_reason = "length"
    for n in range(budget):
        assert logits is not None
        token = sampler(logits[-1])
        result.ids.append(token)
        stats.new_tokens = n + 1
        stats.decode_seconds = time.perf_counter() - start
        if token == model.config.eos_token_id:
            stats.finish_reason = "stop"
            break
        if delta := decoder.add(token):
            yield delta
        if n + 1 < budget:
            logits = sequence.append(torch.tensor([token])).logits
    if rest := decoder.flush():
        yield rest


class Detokenizer:
    """Text deltas of a token stream; bytes of one character split over tokens are held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = 0

    def add(self, token: int) -> str:
        """The text that this token completes; without a tokenizer, its id and a space."""
        if self.tokenizer is None:
            return f"{token} "
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        delta, self.shown = text[self.shown :], len(text)
        if "\n" in delta and len(self.ids) > 1:
            # A line end is a safe place to forget the past, so that each delta costs the same.
            self.ids, self.shown = [], 0
        return delta

    def flush(self) -> str:
        """What is left at the end, incomplete bytes included."""
        if self.tokenizer is None or not self.ids:
            return ""
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)[self.shown :]
