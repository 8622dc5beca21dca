"""What a prefill worker hands to a decode worker: a small header, and the parts that the planner counts.

    magic  version  sizes | meta (JSON)  token ids (int32) | sha256 of all that | part, part, ...

The header names every part with its size and its sha256. A receiver verifies all of it before it uses any: a damaged
hand-over is refused by the name of what is damaged, and the prompt is computed again. What the parts hold is
`rorqual.planner.traffic.Handover`'s to say, and `rorqual.disagg.packing` reads and writes them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rorqual.errors import HandoverError
from rorqual.planner.traffic import HANDOVERS, Handover
from rorqual.pool.prefix import ImageSpan

MAGIC = b"RQPARCEL"
VERSION = 1
"""Of the format; a receiver refuses another one."""
PARTS = tuple(Handover.__slots__)
"""Names of the parts, in their order on the wire."""

_START = struct.Struct("<8sHII")
_DIGEST = hashlib.sha256().digest_size
ID_BYTES = 4
META_BYTES = 2048
IMAGE_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a hand-over is of.

    request: the caller's id. mode: of `HANDOVERS`. ids: the prompt's tokens. images: where they stand in it, and what
    is in them. fingerprint: of the model as far as the parts depend on it, for `rings` with its decoder
    (`rorqual.engine.identity`). page_tokens: of a page.
    first: position of the first row of rings and streams; they end with the prompt.
    write_floor: below it, the last source's global KV stands in the pages; the decoder's first layer writes the rest.
    decoder_floor: as of `SequenceStep`.
    """

    request: str
    mode: str
    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()
    fingerprint: str
    page_tokens: int
    first: int
    write_floor: int
    decoder_floor: int

    @property
    def tokens(self) -> int:
        """Of the prompt."""
        return len(self.ids)

    @property
    def bound(self) -> int:
        """Bytes that the header takes on the wire, at most: they grow with ids and images alone."""
        return META_BYTES + 6 * len(self.request) + ID_BYTES * self.tokens + IMAGE_BYTES * len(self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A header and its parts. A part is a run of buffers: on the sender's side pages where they stand in the cache.

    head: the header as it goes over the wire, made once, of the parts as they were then.
    """

    header: Header
    parts: Mapping[str, Sequence[memoryview]]
    head: bytes

    @classmethod
    def of(cls, header: Header, parts: Mapping[str, Sequence[memoryview]]) -> Parcel:
        """A parcel to be sent. It takes one look at every byte."""
        return cls(header=header, parts=parts, head=_encoded(header, parts))

    @property
    def nbytes(self) -> int:
        """Of the whole message."""
        return len(self.head) + self.sizes().total

    def sizes(self) -> Handover:
        """Bytes of every part, to be compared with the planner's."""
        return Handover(**{name: _size(self.parts.get(name, ())) for name in PARTS})

    def buffers(self) -> list[memoryview]:
        """Everything that goes over the wire, in order: the header, then every part."""
        found = [memoryview(self.head)]
        for name in PARTS:
            found += self.parts.get(name, ())
        return found

    def to_bytes(self) -> bytearray:
        """The buffers as one message."""
        return bytearray().join(self.buffers())

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Parcel:
        """A message that came, all of it verified. Parts are views of `data`.

        Raises:
            HandoverError: it is damaged, cut off, or of another version; which part of it.
        """
        view = memoryview(data).cast("B")
        meta, ids, at = _read_header(view)
        header, head = _header(meta, ids), bytes(view[:at])
        parts: dict[str, Sequence[memoryview]] = {}
        for name, size, digest in meta["parts"]:
            own = view[at : at + size]
            if len(own) != size or hashlib.sha256(own).hexdigest() != digest:
                raise HandoverError(f"hand-over of {header.request!r}: part {name} is damaged")
            parts[name] = (own,) if size else ()
            at += size
        if at != len(view):
            raise HandoverError(f"hand-over of {header.request!r}: {len(view) - at} bytes follow its last part")
        return cls(header=header, parts=parts, head=head)


def _encoded(header: Header, parts: Mapping[str, Sequence[memoryview]]) -> bytes:
    told = []
    for name in PARTS:
        buffers, total = parts.get(name, ()), hashlib.sha256()
        for own in buffers:
            total.update(own)
        told.append([name, _size(buffers), total.hexdigest()])
    meta = {
        "request": header.request,
        "mode": header.mode,
        "images": [[image.start, image.end, image.digest.hex()] for image in header.images],
        "fingerprint": header.fingerprint,
        "page_tokens": header.page_tokens,
        "first": header.first,
        "write_floor": header.write_floor,
        "decoder_floor": header.decoder_floor,
        "parts": told,
    }
    text = json.dumps(meta, separators=(",", ":")).encode()
    start = _START.pack(MAGIC, VERSION, len(text), header.tokens)
    body = start + text + _little_endian(array("i", header.ids)).tobytes()
    return body + hashlib.sha256(body).digest()


def _read_header(view: memoryview) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """(meta, ids, where the first part begins)."""
    if len(view) < _START.size:
        raise HandoverError(f"hand-over: {len(view)} bytes are no header")
    magic, version, size, tokens = _START.unpack_from(view)
    if magic != MAGIC:
        raise HandoverError("hand-over: the header is damaged, or this is none")
    if version != VERSION:
        raise HandoverError(f"hand-over: version {version} is not legal, or the header is damaged; legal: {VERSION}")
    end = _START.size + size + ID_BYTES * tokens
    if hashlib.sha256(view[:end]).digest() != view[end : end + _DIGEST]:
        raise HandoverError("hand-over: the header is damaged")
    ids = array("i", bytes(view[_START.size + size : end]))
    return json.loads(bytes(view[_START.size : _START.size + size])), tuple(_little_endian(ids)), end + _DIGEST


def _header(meta: Mapping[str, Any], ids: tuple[int, ...]) -> Header:
    images = tuple(
        ImageSpan(start=start, end=end, digest=bytes.fromhex(digest)) for start, end, digest in meta["images"]
    )
    if meta["mode"] not in HANDOVERS:
        raise HandoverError(f"hand-over: mode {meta['mode']!r} is not legal; legal: {', '.join(HANDOVERS)}")
    if tuple(name for name, _, _ in meta["parts"]) != PARTS:
        raise HandoverError(f"hand-over: its parts are not {', '.join(PARTS)}")
    numbers = {name: meta[name] for name in ("page_tokens", "first", "write_floor", "decoder_floor")}
    names = {name: meta[name] for name in ("request", "mode", "fingerprint")}
    return Header(ids=ids, images=images, **numbers, **names)


def _size(buffers: Sequence[memoryview]) -> int:
    return sum(own.nbytes for own in buffers)


def _little_endian(ids: array[int]) -> array[int]:
    assert ids.itemsize == ID_BYTES
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        ids.byteswap()
    return ids
