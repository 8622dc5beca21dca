"""What is handed over: every bit verified, every byte the planner's."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from models import golden, random_ids, tiny
from splits import poisoned

from rorqual.config import presets
from rorqual.disagg.packing import pack, planned, unpack
from rorqual.disagg.parcel import PARTS, Header, Parcel
from rorqual.disagg.transport import InProcess
from rorqual.errors import HandoverError
from rorqual.layout import KVLayout
from rorqual.model.transformer import Transformer
from rorqual.planner.traffic import HANDOVERS, handover
from rorqual.pool.prefix import ImageSpan

FLIPS = 400
FULL_FLIPS = 20_000


def parcel_of(model: Transformer, tokens: int, mode: str) -> Parcel:
    transport = InProcess()
    worker = poisoned(model, transport)
    worker.submit(random_ids(tokens, seed=tokens), mode=mode)
    offers = []
    while not offers:
        offers = worker.step()
    assert offers[0].ticket is not None
    parcel = Parcel.from_bytes(transport.pull(offers[0].ticket, 1))
    assert offers[0].ticket.nbytes == parcel.nbytes
    return parcel


@cache
def message(mode: str) -> bytes:
    return bytes(parcel_of(golden("fp32-dspark", "fast"), 17, mode).to_bytes())


@pytest.mark.parametrize("mode", HANDOVERS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 97])
def test_bytes_are_the_planners(mode: str, tokens: int) -> None:
    """By part, at the width of the model's activations; the header apart, and bounded."""
    for model in (golden("fp32-dspark", "fast"), tiny("fast", "native")):
        parcel = parcel_of(model, tokens, mode)
        wide = 2 if model.numerics.native else 4
        assert parcel.sizes() == handover(model.layout, tokens, mode, wide) == planned(model, tokens, mode)
        assert parcel.nbytes == len(parcel.to_bytes()) == len(parcel.head) + parcel.sizes().total
        assert len(parcel.head) <= parcel.header.bound


def test_draft_targets_below_the_seam_are_as_wide_as_activations() -> None:
    config = presets.load("v4.1-flash").replace(dspark_target_layer_ids=(10, 19, 39))
    assert handover(KVLayout(config), 200, "streams", 4).carried == 2 * 128 * 5120 * 4


def test_a_round_trip() -> None:
    for mode in HANDOVERS:
        parcel = Parcel.from_bytes(message(mode))
        assert parcel.header.mode == mode and parcel.header.tokens == 17 and parcel.header.page_tokens == 16
        assert parcel.header.ids == tuple(random_ids(17, seed=17).tolist())
        handed = unpack(parcel, golden("fp32-dspark", "fast"))
        again = pack(parcel.header, handed)
        assert bytes(again.to_bytes()) == message(mode)


def test_images_and_the_largest_header_fit_their_bound() -> None:
    spans = tuple(ImageSpan(start=10**6 * n, end=10**6 * n + 577, digest=bytes(32)) for n in range(40))
    header = Header(
        request="ü" * 200,
        mode="rings",
        ids=(129_279,) * 5000,
        images=spans,
        fingerprint="f" * 64,
        page_tokens=128,
        first=10**7,
        write_floor=10**7,
        decoder_floor=10**7,
    )
    parcel = Parcel.of(header, {})
    assert len(parcel.head) <= header.bound
    assert Parcel.from_bytes(parcel.to_bytes()).header == header


@pytest.mark.parametrize("flips", [FLIPS, pytest.param(FULL_FLIPS, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", HANDOVERS)
def test_one_flipped_bit_anywhere_is_refused(mode: str, flips: int) -> None:
    """Field case 55. Every byte of the header, and places at random in what follows it."""
    whole, drawn = message(mode), random.Random(3)
    head = len(Parcel.from_bytes(whole).head)
    places = [*range(head), *(drawn.randrange(head, len(whole)) for _ in range(flips))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << drawn.randrange(8)
        with pytest.raises(HandoverError, match=r"^hand-over"):
            Parcel.from_bytes(damaged)


def test_a_damaged_part_is_named() -> None:
    whole = message("streams")
    parcel = Parcel.from_bytes(whole)
    at, sizes = len(parcel.head), parcel.sizes()
    for name in PARTS:
        if not getattr(sizes, name):
            continue
        damaged = bytearray(whole)
        damaged[at] ^= 1
        with pytest.raises(HandoverError, match=f"part {name} is damaged"):
            Parcel.from_bytes(damaged)
        at += getattr(sizes, name)
    assert at == len(whole)


def test_cut_off_or_too_long_is_refused() -> None:
    whole = message("replay")
    for length in (0, 5, 18, 40, len(Parcel.from_bytes(whole).head), len(whole) - 1):
        with pytest.raises(HandoverError):
            Parcel.from_bytes(whole[:length])
    with pytest.raises(HandoverError, match="1 bytes follow its last part"):
        Parcel.from_bytes(whole + b"\0")


def test_another_version_is_refused_by_name() -> None:
    damaged = bytearray(message("replay"))
    damaged[8] = 9
    with pytest.raises(HandoverError, match="version 9 is not legal, or the header is damaged; legal: 1"):
        Parcel.from_bytes(damaged)


def test_parts_of_another_model_are_refused() -> None:
    """Even under a right fingerprint: nothing is read past its end."""
    parcel = Parcel.from_bytes(message("streams"))
    with pytest.raises(HandoverError, match=r"part streams has \d+ bytes; legal: "):
        unpack(parcel, tiny("fast", "native"))


def test_the_header_is_plain_json() -> None:
    """What a person sees in a dump."""
    head = Parcel.from_bytes(message("rings")).head
    text = head[head.index(b"{") : head.rindex(b"}") + 1].split(b"}")[0] + b"}"
    meta = json.loads(text)
    assert meta["mode"] == "rings" and [name for name, _, _ in meta["parts"]] == list(PARTS)
