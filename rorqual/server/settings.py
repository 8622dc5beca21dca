"""What a server is called, who may use it, and what each request is bounded by. Every bound is on by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rorqual.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Of one server.

    model: the name that clients use. aliases: others that mean the same.
    api_keys: key -> tenant; tenants never share a page. Without any, everybody is one tenant.
    body_bytes: of a request. messages, tools, images: of one. image_bytes, image_pixels: of one image.
    waiting: requests in the queue. concurrency: requests of one key at a time. timeout: seconds of one request.
    stream_interval: seconds between two events of a stream, at least, but for its first and its last; what comes sooner
    joins the next one. 0 tells each step's tokens at once.
    completions: `n` at most. prompts: of one text completion. stops: stop texts at most.
    image_hosts: hosts that images may be fetched from; without any, data URLs alone are taken.
    thinking: whether a request thinks that does not say.

    Raises:
        InputError: naming the setting and its legal values.
    """

    model: str = "rorqual"
    aliases: tuple[str, ...] = ()
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    body_bytes: int = 32 << 20
    messages: int = 2048
    tools: int = 128
    images: int = 16
    image_bytes: int = 16 << 20
    image_pixels: int = 64 << 20
    waiting: int = 256
    concurrency: int = 64
    timeout: float = 600.0
    stream_interval: float = 0.02
    completions: int = 16
    prompts: int = 64
    stops: int = 16
    image_hosts: tuple[str, ...] = ()
    thinking: bool = False

    def __post_init__(self) -> None:
        for name in ("body_bytes", "messages", "tools", "images", "image_bytes", "image_pixels", "waiting"):
            _at_least_one(name, getattr(self, name))
        for name in ("concurrency", "timeout", "completions", "prompts", "stops"):
            _at_least_one(name, getattr(self, name))
        if not 0 <= self.stream_interval < self.timeout:
            raise InputError(
                f"stream_interval: {self.stream_interval} is not legal; legal: 0 and above, less than the timeout"
            )
        if not self.model:
            raise InputError("model: '' is not legal; legal: a name of at least 1 character")
        if not all(self.api_keys) or not all(self.api_keys.values()):
            raise InputError("api_keys: an empty key or tenant is not legal; legal: texts of at least 1 character")


def _at_least_one(name: str, value: float) -> None:
    if value < 1:
        raise InputError(f"{name}: {value} is not legal; legal: at least 1")
