"""Images over the socket, to a small random model that sees."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from dialogue import conversations
from PIL import Image
from serving import Served

import rorqual
from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.config.image_grid import image_grid
from rorqual.model.load import load
from rorqual.server.protocol import CHAT
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


def url_of(data: bytes, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64," + base64.b64encode(data).decode()


def body_of(*urls: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {
        "model": "rorqual",
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}],
        "max_tokens": 2,
        "temperature": 0,
    }


def asked(server: Served, *urls: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body_of(*urls), timeout=60)


def usage(server: Served, *images: Image.Image) -> Any:
    answer = asked(server, *(url_of(encoded(image)) for image in images))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def test_the_official_clients_send_images(sees: Served) -> None:
    """Each in its own protocol, streamed too; the same picture costs the same everywhere."""
    picture = encoded(flat(100, 80))
    data, body = base64.b64encode(picture).decode(), body_of(url_of(picture))
    text = {"type": "text", "text": "What is it?"}
    own = openai.OpenAI(base_url=f"{sees.url}/v1", api_key="any", max_retries=0)
    answer = own.chat.completions.create(**body)
    chunks = list(own.chat.completions.create(**body, stream=True))
    said = answer.choices[0].message.content or ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    shown: Any = [{"type": "input_image", "image_url": url_of(picture)}, {"type": "input_text", "text": "What is it?"}]
    response = own.responses.create(
        model="rorqual", input=[{"role": "user", "content": shown}], max_output_tokens=2, temperature=0
    )
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    message = anthropic.Anthropic(base_url=sees.url, api_key="any", max_retries=0).messages.create(
        model="rorqual",
        max_tokens=2,
        messages=[{"role": "user", "content": [{"type": "image", "source": source}, text]}],  # type: ignore[list-item]
    )
    assert answer.usage is not None and response.usage is not None
    cost = answer.usage.prompt_tokens
    without = own.chat.completions.create(
        model="rorqual", messages=[{"role": "user", "content": "What is it?"}], max_tokens=2
    )
    assert without.usage is not None and cost > without.usage.prompt_tokens
    cached = message.usage.cache_read_input_tokens or 0
    assert response.usage.input_tokens == cost
    assert message.usage.input_tokens + cached == cost
    sees.assert_clean()


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


@pytest.mark.parametrize("size", ((1, 1), (13, 13), (1, 50), (400, 1), (20, 16), (1200, 30), (800, 200)))
def test_a_shape_costs_the_tokens_of_its_grid(sees: Served, size: tuple[int, int]) -> None:
    """Field case 45: counted tokens are produced features, in the answer and in every count of it."""
    vision = sees.model.config.vision
    assert vision is not None
    grid = image_grid(*size, vision)
    assert grid.tokens == len(grid.token_types())
    body = body_of(url_of(encoded(flat(*size))))
    answer = httpx.post(f"{sees.url}/v1/chat/completions", json=body, timeout=60)
    counted = httpx.post(f"{sees.url}/tokenize", json={"messages": body["messages"]}, timeout=60)
    assert (answer.status_code, counted.status_code) == (200, 200), answer.text
    # The one token that stands for an image in a rendered prompt becomes its span.
    rendered = len(conversations().call(CHAT, body, "answer").ids)
    assert answer.json()["usage"]["prompt_tokens"] == counted.json()["count"] == rendered - 1 + grid.tokens
    sees.assert_clean()


@pytest.mark.parametrize("size", ((1, 10_000), (10_000, 1), (42_882, 42)))
def test_what_is_too_long_and_thin_is_refused_by_its_size(sees: Served, size: tuple[int, int]) -> None:
    answer = asked(sees, url_of(encoded(flat(*size))))
    message = answer.json()["error"]["message"] if answer.status_code == 400 else ""
    vision = sees.model.config.vision
    assert vision is not None
    grid = image_grid(*size, vision)
    if min(size) * min(grid.best_width / size[0], grid.best_height / size[1]) < 0.5:
        assert f"image of {size[0]} x {size[1]} pixels: too long and thin to be seen" in message
    else:
        assert answer.status_code == 200, answer.text
    sees.assert_clean()


GREY = {
    "L": 128,
    "RGB": (128, 128, 128),
    "CMYK": (0, 0, 0, 127),
    "I;16": 128 << 8 | 77,
    "P": 1,
    "RGBA": (128,) * 3 + (9,),
}


@pytest.mark.parametrize(
    ("mode", "kind"),
    (("CMYK", "JPEG"), ("I;16", "PNG"), ("P", "PNG"), ("P", "GIF"), ("RGBA", "PNG"), ("RGBA", "WEBP"), ("RGB", "WEBP")),
)
def test_a_grey_is_the_same_grey_in_every_pixel_format(sees: Served, mode: str, kind: str) -> None:
    """The same pixels are the same prompt: the second image is found in the cache, to the last page."""
    image = Image.new(mode, (300, 300), GREY[mode])  # type: ignore[arg-type]
    if mode == "P":
        image.putpalette([9, 9, 9, 128, 128, 128])
    first, plain = usage(sees, flat(300, 300, 128)), usage(sees, flat(300, 300, 128))
    assert first["prompt_cache_hit_tokens"] < plain["prompt_cache_hit_tokens"]
    answer = asked(sees, url_of(encoded(image, kind), kind))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_cache_hit_tokens"] == plain["prompt_cache_hit_tokens"]
    sees.assert_clean()


def test_a_kind_that_no_api_has_is_refused_with_those_that_they_have(sees: Served) -> None:
    answer = asked(sees, url_of(encoded(flat(40, 30), "BMP"), "BMP"))
    assert answer.status_code == 400
    assert all(kind in answer.json()["error"]["message"] for kind in ("webp", "png", "jpeg", "gif"))


def animated(kind: str) -> bytes:
    file = io.BytesIO()
    frames = [flat(40, 30, colour, "RGB") for colour in (10, 200)]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


@pytest.mark.parametrize("kind", ("GIF", "WEBP", "PNG"))
def test_an_animation_is_refused_whichever_frame_was_meant(sees: Served, kind: str) -> None:
    answer = asked(sees, url_of(animated(kind), kind))
    assert answer.status_code == 400, answer.text
    assert "2 frames" in answer.json()["error"]["message"]


def bomb() -> bytes:
    """A PNG of a few bytes that says of itself that it is 30,000 x 30,000."""
    data = bytearray(encoded(flat(8, 8)))
    data[16:24] = struct.pack(">II", 30_000, 30_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_damaged_files_are_refused_wherever_they_are_cut(sees: Served) -> None:
    """Of every format, cut at many places, or with some of its bytes turned over."""
    rng, picture = random.Random(3), Image.effect_noise((60, 40), 80)
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        whole = encoded(picture, kind)
        for cut in (1, 10, len(whole) // 3, len(whole) // 2, len(whole) * 4 // 5):
            answer = asked(sees, url_of(whole[:cut], kind))
            assert answer.status_code == 400, (kind, cut, answer.text)
            assert "image" in answer.json()["error"]["message"], (kind, cut)
        for _ in range(4):
            data = bytearray(whole)
            for at in rng.sample(range(len(data)), 12):
                data[at] ^= 0xFF
            # Some are still pictures: other ones, but never a fault of ours.
            answer = asked(sees, url_of(bytes(data), kind))
            assert answer.status_code == 200 or "image" in answer.json()["error"]["message"], (kind, answer.text)
            assert answer.status_code in (200, 400)
    sees.assert_clean()


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
        (url_of(encoded(flat(3000, 3000, mode="1"))), "9,000,000 pixels is too large; the limit is 6,000,000"),
        (url_of(bomb()), "image is too large; the limit is 6,000,000 pixels"),
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
