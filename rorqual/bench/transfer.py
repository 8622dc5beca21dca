"""Mooncake on this machine's loopback against a copy in memory: `rorqual bench transfer`.

A parcel that one transfer engine reads out of another's memory, and pages that go into a Mooncake store and come back.
Both sides run on this machine, over TCP; what a network or RDMA gives is not in it.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rorqual.bench.report import TimeRow
from rorqual.bench.timing import Sample, elapsed, undisturbed
from rorqual.config import presets
from rorqual.disagg.mooncake import MooncakeTransport
from rorqual.disagg.parcel import Header, Parcel
from rorqual.layout import KVLayout
from rorqual.ops.dispatch import Progress
from rorqual.planner.traffic import handover_bytes
from rorqual.store.interface import StoreIdentity
from rorqual.store.local_pool import LocalPool
from rorqual.store.remote import RemoteOptions, RemoteStore

REPEATS = 9
PRESET = "v4.1-flash"
MODE = "streams"
WAIT_S = 60.0

NOTES = (
    "pull: a hand-over of the release (streams) from one transfer engine's memory into another's, both in one process, "
    "on loopback over TCP; it is not verified in that time",
    "put, get: a page of the release at a time into and out of a Mooncake store whose memory another process lends; "
    "each page is checked",
    "copy: the same bytes from one buffer into another, in this process",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """tokens: of the prompt that is handed over. pages: put and got in one sample."""

    tokens: int = 32_768
    pages: int = 128


FULL = Amount()
QUICK = Amount(tokens=128, pages=4)


def run_transfer(*, repeats: int = REPEATS, quick: bool = False, progress: Progress | None = None) -> list[TimeRow]:
    """A row for a parcel, one for put, one for get.

    Raises:
        InputError: Mooncake is not installed here, or does not start.
    """
    amount = QUICK if quick else FULL
    layout = KVLayout(presets.load(PRESET))
    with (
        _pulled(handover_bytes(layout, amount.tokens, MODE)) as pull,
        _stored(layout, amount.pages, repeats + 1) as stored,
    ):
        works = {"pull": pull, **stored}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        with undisturbed():
            for turn in range(repeats + 1):
                for name, work in works.items():
                    taken = elapsed(work.run), elapsed(work.copy)
                    if turn:  # the first one warms up
                        seconds[name].append(taken)
                if progress is not None:
                    progress(turn, repeats)
    return [_row(name, work, seconds[name]) for name, work in works.items()]


@dataclass(frozen=True, slots=True)
class _Work:
    shape: str
    nbytes: int
    run: Callable[[], object]
    copy: Callable[[], object]


@contextmanager
def _pulled(nbytes: int) -> Iterator[_Work]:
    data = random.Random(0).randbytes(nbytes)
    header = Header(
        request="bench",
        mode=MODE,
        ids=(0,),
        fingerprint=PRESET,
        page_tokens=1,
        first=0,
        write_floor=0,
        decoder_floor=0,
    )
    parcel = Parcel.of(header, {"pages": (memoryview(data),)})
    sender = MooncakeTransport(credit_bytes=parcel.nbytes, credit_parcels=1)
    receiver = MooncakeTransport(credit_bytes=parcel.nbytes, credit_parcels=1)
    ticket = sender.offer(parcel, hold_s=float("inf"))
    assert ticket is not None
    assert bytes(receiver.pull(ticket, WAIT_S)) == bytes(parcel.to_bytes())
    # A fresh buffer each time, as a pull has one.
    yield _Work(f"{nbytes:,} bytes", nbytes, lambda: receiver.pull(ticket, WAIT_S), lambda: bytearray(data))
    receiver.close()
    sender.close()


@contextmanager
def _stored(layout: KVLayout, pages: int, turns: int) -> Iterator[dict[str, _Work]]:
    identity = StoreIdentity(fingerprint=PRESET, page_tokens=layout.page_tokens, page_bytes=layout.page_bytes)
    draw = random.Random(1)
    contents = [draw.randbytes(identity.page_bytes) for _ in range(pages)]
    numbers = itertools.count()
    keys: list[bytes] = []

    def put() -> None:
        keys[:] = [hashlib.sha256(str(next(numbers)).encode()).digest() for _ in range(pages)]
        assert all(store.put(key, page) for key, page in zip(keys, contents, strict=True))

    def get() -> None:
        assert None not in [store.get(key) for key in keys]

    def copy() -> list[bytearray]:
        return [bytearray(page) for page in contents]

    shape, nbytes = f"{pages} pages of {identity.page_bytes:,} bytes", pages * identity.page_bytes
    # Room for all of it: the store evicts before it is full.
    with LocalPool((64 << 20) + 2 * turns * nbytes) as pool:
        store = RemoteStore(identity, RemoteOptions(master=pool.master, deadline_s=WAIT_S))
        yield {"put": _Work(shape, nbytes, put, copy), "get": _Work(shape, nbytes, get, copy)}
        store.close()


def _row(name: str, work: _Work, seconds: list[tuple[float, float]]) -> TimeRow:
    own, copy = (Sample.of(found) for found in zip(*seconds, strict=True))
    return TimeRow(
        name=name,
        shape=work.shape,
        times={"copy": copy, "mooncake": own},
        ratio_of=("copy", "mooncake"),
        measured="mooncake",
        extra={
            "copy_bytes_a_second": work.nbytes / copy.median,
            "mooncake_bytes_a_second": work.nbytes / own.median,
        },
    )
