"""Images of a request: data URLs, and hosts that the server allows. Nothing else is opened."""

from __future__ import annotations

import base64
import binascii
import io
import ipaddress
import urllib.parse
from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import torch
from PIL import Image
from torch import Tensor

from rorqual.engine.images import read_images
from rorqual.engine.text_model import TextModel
from rorqual.errors import InputError
from rorqual.model.vision.image import FORMATS, ImageInput, image_token_ids
from rorqual.server.settings import ServerSettings


def image_bytes(source: Any, settings: ServerSettings) -> bytes:
    """The encoded bytes of one image source of a conversation.

    Raises:
        InputError: too large in bytes or pixels, no data URL and no allowed host, or nothing that can be read; with
            where it stands.
    """
    where = source.path or "image"
    if source.kind == "data_url":
        found = _data(source.data_url, where)
    elif source.kind == "url":
        found = _fetched(source.url, where, settings)
    else:
        found = source.data or b""
    if len(found) > settings.image_bytes:
        raise InputError(f"{where}: {len(found):,} bytes are too many; the limit is {settings.image_bytes:,}")
    _check_pixels(found, where, settings.image_pixels)
    return found


def _check_pixels(data: bytes, where: str, limit: int) -> None:
    """By its header, before any pixel is decoded. What has no header is told by whoever decodes it."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
    except Image.DecompressionBombError as error:
        raise InputError(f"{where}: image is too large; the limit is {limit:,} pixels") from error
    except Exception:  # decoders raise nearly anything on hostile bytes
        return
    if pixels > limit:
        raise InputError(f"{where}: image of {pixels:,} pixels is too large; the limit is {limit:,} pixels")


def _data(url: str | None, where: str) -> bytes:
    head, comma, body = (url or "").partition(",")
    if not comma:
        raise InputError(f"{where}: not a data URL")
    if not head.endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(urllib.parse.unquote(body), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: not valid base64") from error


def _fetched(url: str | None, where: str, settings: ServerSettings) -> bytes:
    host = urllib.parse.urlsplit(url or "").hostname
    if host not in settings.image_hosts:
        raise InputError(f"{where}: images are not fetched from {host!r} here; give it as a data URL")
    fetcher = recipe.ReqwestImageFetcher.with_max_bytes(settings.image_bytes).with_destination_filter(
        lambda name, address: name in settings.image_hosts and ipaddress.ip_address(address).is_global
    )
    try:
        return bytes(fetcher.fetch(url or ""))
    except recipe.ImageError as error:
        raise InputError(f"{where}: {error}") from error


def with_images(
    model: TextModel, ids: Sequence[int], sources: Sequence[Any], settings: ServerSettings
) -> tuple[Tensor, list[ImageInput]]:
    """The prompt with a span of positions for each image, and the images.

    Raises:
        InputError: a text-only model, too many images, or one that cannot be read.
    """
    prompt = torch.tensor(list(ids), dtype=torch.int64)
    if not sources:
        return prompt, []
    if model.config.vision is None:
        raise InputError("image: this model has no vision tower; give a text prompt")
    if len(sources) > settings.images:
        raise InputError(f"image: {len(sources)} are too many; the limit is {settings.images}")
    pictures = read_images(model, [image_bytes(source, settings) for source in sources])
    token = model.config.image_token_id
    at = torch.nonzero(prompt == token).flatten().tolist()
    if len(at) != len(pictures):
        raise InputError(f"image: the prompt has {len(at)} places for {len(pictures)} images")
    parts, shown = [], 0
    for place, picture in zip(at, pictures, strict=True):
        parts += [prompt[shown:place], image_token_ids(picture.grid, token)]
        shown = place + 1
    return torch.cat((*parts, prompt[shown:])), pictures
