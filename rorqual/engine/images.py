"""Prompts with images: each image is encoded whole, once; its features then enter the model in chunks of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from rorqual.engine.sequence import Prompt
from rorqual.engine.text_model import TextModel
from rorqual.errors import InputError
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import ImageInput, image_patches, load_image

ImageSource = str | Path | bytes | Image.Image | ImageInput


def read_images(model: TextModel, images: Sequence[ImageSource]) -> list[ImageInput]:
    """Open and fit images to the model's grid rule.

    Raises:
        InputError: a text-only model, or an image that cannot be read or fitted.
    """
    if not images:
        return []
    vision = model.config.vision
    if vision is None:
        raise InputError("image: this model has no vision tower; give a text prompt")
    return [
        i if isinstance(i, ImageInput) else image_patches(load_image(Path(i) if isinstance(i, str) else i), vision)
        for i in images
    ]


def image_prompt(model: Transformer, ids: Tensor, images: Sequence[ImageInput], tap: Tap | None = None) -> Prompt:
    """Pair a prompt's image positions with images, in order, and encode them. Raises InputError as `spans_prompt`."""
    made = spans_prompt(model, ids, images)
    return replace(made, embeds=image_features(model, images, tap)) if images else made


def image_features(model: Transformer, images: Sequence[ImageInput], tap: Tap | None = None) -> Tensor:
    """Features [image positions, D] of at least one image."""
    assert model.vision is not None
    with torch.inference_mode():
        return torch.cat([model.vision(image, _named(tap, n)) for n, image in enumerate(images)])


def spans_prompt(model: TextModel, ids: Tensor, images: Sequence[ImageInput]) -> Prompt:
    """Pair a prompt's image positions with images, in order; nothing is encoded.

    Raises:
        InputError: image tokens without an image, or a count that is not the images' own.
    """
    if model.config.vision is None:
        return Prompt(ids=ids)
    mask = ids == model.config.image_token_id
    found, needed = int(mask.sum()), sum(i.grid.tokens for i in images)
    if found != needed:
        raise InputError(
            f"image: the prompt has {found} image positions (id {model.config.image_token_id}), "
            f"its {len(images)} images need {needed}"
        )
    if not images:
        return Prompt(ids=ids)
    for start, image in zip(span_starts(ids, model.config.image_token_id, images), images, strict=True):
        if not bool(mask[start : start + image.grid.tokens].all()):
            raise InputError(
                f"image: the span at position {start} is not the {image.grid.tokens} positions of its image; "
                "images go in the order of their spans"
            )
    return Prompt(ids=ids, image=mask)


def span_starts(ids: Tensor, image_token_id: int, images: Sequence[ImageInput]) -> list[int]:
    """Position of each image's first token; spans may touch, so lengths come from the grids."""
    at = torch.nonzero(ids == image_token_id).flatten().tolist()
    starts, used = [], 0
    for image in images:
        starts.append(at[used])
        used += image.grid.tokens
    return starts


def _named(tap: Tap | None, image: int) -> Callable[[str, Tensor], Tensor] | None:
    if tap is None:
        return None
    return lambda name, value: tap(f"image.{image}.{name}", value)
