"""Images over the socket, to a small random model that sees."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from serving import Served

import rorqual
from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.model.load import load
from rorqual.server.settings import ServerSettings

TOKENIZER = Path(rorqual.__file__).parent / "checkpoint" / "demo" / "tokenizer.json"
COMPRESSED = 3258
"""What the shipped tokenizer's ids fold into."""


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    config = presets.load("tiny").replace(vocab_size=4096, image_token_id=10, engram_compressed_vocab_size=COMPRESSED)
    write_random(config, folder, seed=3, tokenizer=TOKENIZER)
    model = load(folder, page_tokens=16, kernels="plain")
    served = Served(model, ServerSettings(images=3, image_pixels=6_000_000), slots=2)
    yield served
    served.close()


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def flat(width: int, height: int, colour: int = 90, mode: str = "L") -> Image.Image:
    return Image.new(mode, (width, height), colour)


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def asked(server: Served, *urls: str) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": "rorqual",
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}],
        "max_tokens": 2,
        "temperature": 0,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def usage(server: Served, *images: Image.Image) -> Any:
    answer = asked(server, *(url_of(encoded(image)) for image in images))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_images_cost_tokens_by_their_size(sees: Served) -> None:
    small, large = (usage(sees, flat(*size))["prompt_tokens"] for size in ((20, 16), (2500, 2000)))
    assert small < large
    assert usage(sees, flat(20, 16), flat(20, 16))["prompt_tokens"] > small
    sees.assert_clean()


def test_two_images_of_one_size_share_nothing(sees: Served) -> None:
    shown, other = flat(300, 300, 10), flat(300, 300, 11)
    assert usage(sees, shown)["prompt_cache_hit_tokens"] == 0
    assert usage(sees, other)["prompt_cache_hit_tokens"] == 0
    assert usage(sees, shown)["prompt_cache_hit_tokens"] > 0
    sees.assert_clean()


@pytest.mark.parametrize("size", ((1, 1), (1, 2000), (2000, 1), (13, 13)))
def test_odd_shapes_have_a_grid_or_are_refused(sees: Served, size: tuple[int, int]) -> None:
    answer = asked(sees, url_of(encoded(flat(*size))))
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert "image" in answer.json()["error"]["message"]
    sees.assert_clean()


def test_other_pixel_formats_are_images(sees: Served) -> None:
    formats = (("CMYK", "JPEG"), ("I;16", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("L", "WEBP"))
    for mode, kind in formats:
        answer = asked(sees, url_of(encoded(Image.new(mode, (40, 30)), kind)))
        assert answer.status_code in (200, 400), (mode, answer.text)
        assert answer.status_code == 200 or "image" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "says"),
    (
        (url_of(b"no image"), "image"),
        (url_of(encoded(flat(64, 64, mode="RGB"))[:60]), "image"),
        (url_of(b""), "image"),
        ("data:image/png;base64,%%%", "base64"),
        ("https://example.com/a.png", "example.com"),
        ("http://127.0.0.1/a.png", "127.0.0.1"),
        ("file:///etc/passwd", "image"),
        ("/etc/passwd", "image"),
        (url_of(encoded(flat(3000, 3000, mode="1"))), "pixels"),
    ),
)
def test_what_is_no_image_here_is_refused(sees: Served, url: str, says: str) -> None:
    answer = asked(sees, url)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert "root:" not in answer.text


def test_too_many_images_are_refused(sees: Served) -> None:
    answer = asked(sees, *[url_of(encoded(flat(20, 16)))] * 4)
    assert answer.status_code == 400
    assert "limit is 3" in answer.json()["error"]["message"]
    sees.assert_clean()
