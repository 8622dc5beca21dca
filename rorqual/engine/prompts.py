"""What a caller hands in becomes a prompt: ids, image features, and the chain of keys that finds its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.engine.ids import as_ids
from rorqual.engine.images import ImageSource, image_features, read_images, span_starts, spans_prompt
from rorqual.engine.sequence import Prompt
from rorqual.engine.text_model import TextModel
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import ImageInput, image_token_ids
from rorqual.pool.prefix import ImageSpan

PromptInput = str | Tensor | Sequence[int]
"""A text, or its token ids."""


def checked_tokenizer(model: TextModel, prompt: str) -> Tokenizer:
    """The model's tokenizer. Raises InputError when there is none, or for a text that it cannot take."""
    if model.tokenizer is None:
        raise InputError("prompt: this checkpoint has no tokenizer.json; give token ids instead of text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError("prompt: not valid UTF-8 text") from error
    return model.tokenizer


def encode(model: TextModel, prompt: str, images: Sequence[ImageInput] = ()) -> Tensor:
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


def place_prompt(
    model: TextModel, prompt: PromptInput, images: Sequence[ImageSource] = ()
) -> tuple[Prompt, list[ImageInput], list[ImageSpan]]:
    """A prompt without image features, its images, and where they stand in it.

    Raises:
        InputError: an empty prompt, ids outside the vocabulary, images that do not fit.
    """
    pictures = read_images(model, images)
    ids = encode(model, prompt, pictures) if isinstance(prompt, str) else as_ids(prompt, "prompt")
    vocabulary = model.config.vocab_size
    outside = (ids < 0) | (ids >= vocabulary)
    if bool(outside.any()):
        raise InputError(f"prompt: id {int(ids[outside][0])} is outside the vocabulary; legal: 0..{vocabulary - 1}")
    made = spans_prompt(model, ids, pictures)
    starts = span_starts(ids, model.config.image_token_id, pictures) if pictures else []
    spans = [
        ImageSpan(start=start, end=start + picture.grid.tokens, digest=bytes.fromhex(picture.sha256))
        for start, picture in zip(starts, pictures, strict=True)
    ]
    return made, pictures, spans


def read_prompt(
    model: Transformer, prompt: PromptInput, images: Sequence[ImageSource] = (), lazy: bool = False
) -> tuple[Prompt, list[ImageSpan], Callable[[], Tensor] | None]:
    """A prompt with its images encoded, where they stand in it, and None.

    lazy: gives the prompt without features, and in the last place what computes them, if it has images.

    Raises:
        InputError: as `place_prompt`, before anything is computed.
    """
    made, pictures, spans = place_prompt(model, prompt, images)
    features = partial(image_features, model, pictures) if pictures else None
    if features is None or lazy:
        return made, spans, features
    return replace(made, embeds=features()), spans, None
