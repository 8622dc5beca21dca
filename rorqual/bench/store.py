"""The disk tier of the store against bare pread and pwrite: `rorqual bench store`.

Both write and read the same pages at the release's page size, on the same file system and in turn. The store also
checks every page and commits its index every `BATCH` pages. Neither syncs anything.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rorqual.bench.report import Bar, JsonRow, TimeRow
from rorqual.bench.timing import Sample, elapsed, undisturbed
from rorqual.config import presets
from rorqual.layout import KVLayout
from rorqual.ops.dispatch import Progress
from rorqual.store.disk import BATCH, DiskStore
from rorqual.store.interface import StoreIdentity

REPEATS = 9
PRESET = "v4.1-flash"
DISTINCT = 64
"""Contents among the pages that are written; further ones repeat them under keys of their own."""
RATE_BAR, SIZE_BAR = Bar(at_least=0.6), Bar(at_most=1.02)

NOTES = (
    "put: pages of the release one by one into an empty store, and a flush; raw: pwrite of the same pages, one behind "
    "the other, into an empty file",
    f"get: the same pages in a random order, each checked; raw: pread; the index is committed every {BATCH} pages",
    "files are not synced and are read while the system still holds them in memory: what is compared is the store's "
    "own work, not the medium",
    "size: bytes of all files of the store while it is open, index and its log included, over those of the pages",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """Pages that are put and got in one sample."""

    pages: int = 512


FULL = Amount()
QUICK = Amount(pages=DISTINCT)


def run_store(
    *, repeats: int = REPEATS, quick: bool = False, progress: Progress | None = None
) -> list[TimeRow | JsonRow]:
    """A row for put, one for get, one for the size on disk. Files lie where temporary ones do, one sample at a time."""
    amount = QUICK if quick else FULL
    layout = KVLayout(presets.load(PRESET))
    identity = StoreIdentity(fingerprint=PRESET, page_tokens=layout.page_tokens, page_bytes=layout.page_bytes)
    draw = random.Random(0)
    contents = [draw.randbytes(identity.page_bytes) for _ in range(DISTINCT)]
    pages = [contents[i % DISTINCT] for i in range(amount.pages)]
    keys = [hashlib.sha256(str(i).encode()).digest() for i in range(amount.pages)]
    order = draw.sample(range(amount.pages), amount.pages)
    seconds: dict[str, list[float]] = {name: [] for name in ("raw_put", "put", "raw_get", "get")}
    used = 0
    with undisturbed():
        for turn in range(repeats + 1):
            taken, used = _turn(identity, keys, pages, order)
            if turn:  # the first one warms up
                for name, one in taken.items():
                    seconds[name].append(one / amount.pages)
            if progress is not None:
                progress(turn, repeats)
    samples = {name: Sample.of(found) for name, found in seconds.items()}
    shape = f"{amount.pages} pages of {identity.page_bytes:,} bytes"
    rows: list[TimeRow | JsonRow] = [_row(name, shape, samples, identity.page_bytes) for name in ("put", "get")]
    return [*rows, _size_row(identity, amount.pages, used)]


def _turn(
    identity: StoreIdentity, keys: Sequence[bytes], pages: Sequence[bytes], order: Sequence[int]
) -> tuple[dict[str, float], int]:
    """Seconds of all four in a fresh folder, and the bytes of the store in it."""
    with TemporaryDirectory(prefix="rorqual-bench-") as name:
        file = os.open(Path(name) / "raw", os.O_RDWR | os.O_CREAT)
        store = DiskStore(Path(name) / "store", identity, disk_bytes=None)
        try:
            taken = {
                "raw_put": elapsed(lambda: _raw_put(file, pages)),
                "put": elapsed(lambda: _put(store, keys, pages)),
                "raw_get": elapsed(lambda: _raw_get(file, identity.page_bytes, order)),
                "get": elapsed(lambda: _get(store, keys, order)),
            }
            assert all(store.get(key) == page for key, page in zip(keys, pages, strict=True))
            return taken, store.stat().used
        finally:
            store.close()
            os.close(file)


def _raw_put(file: int, pages: Sequence[bytes]) -> None:
    start = 0
    for page in pages:
        start += os.pwrite(file, page, start)


def _raw_get(file: int, size: int, order: Sequence[int]) -> None:
    for i in order:
        os.pread(file, size, i * size)


def _put(store: DiskStore, keys: Sequence[bytes], pages: Sequence[bytes]) -> None:
    for key, page in zip(keys, pages, strict=True):
        store.put(key, page)
    store.flush()


def _get(store: DiskStore, keys: Sequence[bytes], order: Sequence[int]) -> None:
    for i in order:
        store.get(keys[i])


def _row(name: str, shape: str, samples: dict[str, Sample], page_bytes: int) -> TimeRow:
    raw, own = samples[f"raw_{name}"], samples[name]
    return TimeRow(
        name=name,
        shape=shape,
        times={"raw": raw, "store": own},
        ratio_of=("raw", "store"),
        measured="store",
        bar=RATE_BAR,
        extra={"raw_bytes_a_second": page_bytes / raw.median, "store_bytes_a_second": page_bytes / own.median},
    )


def _size_row(identity: StoreIdentity, pages: int, used: int) -> JsonRow:
    over = used / (pages * identity.page_bytes)
    return {
        "name": "size",
        "shape": f"{pages} pages",
        "used_bytes": used,
        "bytes_a_token": used / (pages * identity.page_tokens),
        "size": over,
        "bar": SIZE_BAR.as_json(over),
    }
