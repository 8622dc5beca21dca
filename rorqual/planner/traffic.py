"""What a prefill/decode split and a pool of pages put on the wire: bytes, rates, and when fetching beats computing.

Sizes are exact integers, rates and times Fractions. A rate given as a float counts as the binary fraction it is.
One request's prompt is `tokens` long; its *hit* is what a pool holds of it, in whole pages.

A hand-over is what a prefill node sends to the node that decodes (SPEC 11, eq. 1 of the report for the seam):

    replay   pages, tails, history: the receiver computes the last W tokens again, in every layer
    streams  and the encoder's rings and its streams of the last W rows: the receiver runs the decoder on those
    rings    pages, tails, history, all rings and draft windows, and the last row's logits: the receiver samples at once

The request itself, its ids and image spans, goes with any of them and is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from rorqual.errors import InputError
from rorqual.layout import BF16_BYTES, FP32_BYTES, HISTORY_ID_BYTES, KVLayout
from rorqual.planner.units import Number

HANDOVERS = ("replay", "streams", "rings")
BLOCK_ID_BYTES = 4  # a candidate block's id on the wire; context / 8 fits
DAY_S = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """Bytes of one hand-over by what they are.

    pages: whole pages, the partial last one included. tails: fp32 rows of unfinished groups. history: the last
    compressed ids. rings: window KV, of the encoder or of all layers. drafts: their windows. streams: the residual
    copies of the last W rows. mixing: the fp32 coefficients that collapse them. carried: what else crosses the
    seam in those rows (candidates of an encoder layer, DSpark targets below the seam); nothing in the release. logits:
    fp32, of the last row, from which the first token is drawn in whatever way the request asks for.
    """

    pages: int
    tails: int
    history: int
    rings: int = 0
    drafts: int = 0
    streams: int = 0
    mixing: int = 0
    carried: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """All of it.

        >>> Handover(pages=113_920, tails=12_288, history=24).total
        126232
        """
        return sum(getattr(self, name) for name in self.__slots__)


def handover(layout: KVLayout, tokens: int, mode: str, activation_bytes: int = BF16_BYTES) -> Handover:
    """Bytes [B] that a prefill of `tokens` tokens hands over, by part.

    activation_bytes: of a value of the streams: 2 in native numerics, 4 in fp32.

    Source: SPEC 11. Rings hold the window itself, without the rows that a rollback needs. Tails are counted whole
    (m - 1 rows a source), though an even length has none: a message of one size.

    Raises:
        InputError: a mode other than replay, streams, rings, or a negative number of tokens.

    >>> from rorqual.config import presets
    >>> handover(KVLayout(presets.load("v4.1-flash")), 129, "streams")  # doctest: +NORMALIZE_WHITESPACE
    Handover(pages=227840, tails=12288, history=24, rings=1351680, drafts=0, streams=5242880, mixing=2048, carried=0,
    logits=0)
    """
    _one_of("hand-over", mode, HANDOVERS)
    base = Handover(
        pages=layout.global_bytes_allocated(tokens),
        tails=layout.tail_bytes_logical,
        history=layout.history_rows_logical * HISTORY_ID_BYTES,
    )
    rows = min(tokens, layout.config.sliding_window)
    if mode == "streams":
        return _with_streams(layout, base, rows, activation_bytes)
    if mode == "rings":
        return _with_rings(layout, base, rows)
    return base


def handover_bytes(layout: KVLayout, tokens: int, mode: str) -> int:
    """Bytes [B] of one hand-over, all parts together. Source and errors: as `handover`.

    >>> from rorqual.config import presets
    >>> release = KVLayout(presets.load("v4.1-flash"))
    >>> [handover_bytes(release, 32_768, mode) for mode in ("replay", "streams", "rings")]
    [29175832, 35772440, 32599064]
    """
    return handover(layout, tokens, mode).total


def _with_streams(layout: KVLayout, base: Handover, rows: int, activation_bytes: int) -> Handover:
    config, seam = layout.config, layout.config.decoder_start
    hidden = sum(target < seam for target in config.dspark_target_layer_ids) if layout.draft_layers else 0
    candidates = config.candidate_topk_blocks if 0 <= config.candidate_source_layer_id < seam else 0
    return Handover(
        pages=base.pages,
        tails=base.tails,
        history=base.history,
        rings=seam * rows * layout.window_row_bytes,
        streams=rows * config.hc_mult * config.hidden_size * activation_bytes,
        mixing=rows * config.hc_mult * FP32_BYTES,
        carried=rows * (hidden * config.hidden_size * activation_bytes + candidates * BLOCK_ID_BYTES),
    )


def _with_rings(layout: KVLayout, base: Handover, rows: int) -> Handover:
    row_bytes = rows * layout.window_row_bytes
    return Handover(
        pages=base.pages,
        tails=base.tails,
        history=base.history,
        rings=layout.config.num_hidden_layers * row_bytes,
        drafts=layout.draft_layers * row_bytes,
        logits=layout.config.vocab_size * FP32_BYTES,
    )


def handover_layer_tokens(layout: KVLayout, tokens: int, mode: str) -> int:
    """Layer-tokens [1] that the receiver computes before its first step: W rows through all layers, the decoder, none.

    Source: SPEC 11, bounded replay: E W + D W for `replay`, D W for `streams`. Errors: as `handover`.

    >>> from rorqual.config import presets
    >>> release = KVLayout(presets.load("v4.1-flash"))
    >>> [handover_layer_tokens(release, 32_768, mode) for mode in ("replay", "streams", "rings")]
    [5120, 2560, 0]
    """
    _one_of("hand-over", mode, HANDOVERS)
    layers = layout.config.num_hidden_layers
    if mode != "replay":
        layers = layers - layout.config.decoder_start if mode == "streams" else 0
    return layers * min(tokens, layout.config.sliding_window)


def nonnegative(name: str, value: Number) -> Fraction:
    """A number given by the caller, exactly, in its own unit; InputError if it is negative or not finite.

    Source: the caller.

    >>> nonnegative("rate", 0.5)
    Fraction(1, 2)
    """
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise InputError(f"{name} must be a number of 0 or more; got {value}")
    return Fraction(value)


def hit_tokens(layout: KVLayout, tokens: int, hit_rate: Number) -> int:
    """Tokens of a prompt that a pool serves when it holds the share `hit_rate` of it.

    Source: SPEC 11. Whole pages only, and a hit of W tokens or fewer is not adopted: 0.

    Raises:
        InputError: a hit rate outside 0..1, a negative number of tokens.

    >>> from rorqual.config import presets
    >>> release = KVLayout(presets.load("v4.1-flash"))
    >>> hit_tokens(release, 1000, 0.5), hit_tokens(release, 400, 0.5)
    (384, 0)
    """
    share = nonnegative("hit rate", hit_rate)
    if not 0 <= share <= 1:
        raise InputError(f"hit rate must be in 0..1; got {hit_rate}")
    layout.pages(tokens)  # refuses what is no number of tokens
    found = math.floor(share * tokens) // layout.page_tokens * layout.page_tokens
    return found if found > layout.config.sliding_window else 0


def computed_tokens(layout: KVLayout, tokens: int, hit: int) -> int:
    """Tokens that a prefill computes after a hit: those beyond it and the W replayed.

    Source: SPEC 11, encoder side of the bounded replay; `hit` is one that `hit_tokens` gave.

    >>> from rorqual.config import presets
    >>> computed_tokens(KVLayout(presets.load("v4.1-flash")), 1000, 384)
    744
    """
    return tokens - hit + layout.replay_tokens(hit)


def replay_layer_tokens(layout: KVLayout, hit: int, mode: str = "bounded") -> int:
    """Layer-tokens [1] that a hit costs over a state that kept its windows: the tokens replayed, in encoder layers.

    The decoder runs on the last W rows of a prompt in any case. Source: SPEC 11; modes as `KVLayout.replay_tokens`.

    >>> from rorqual.config import presets
    >>> release = KVLayout(presets.load("v4.1-flash"))
    >>> replay_layer_tokens(release, 16_384), replay_layer_tokens(release, 16_384, "exact")
    (2560, 50800)
    """
    return layout.config.decoder_start * layout.replay_tokens(hit, mode)


def pool_read_bytes(layout: KVLayout, hit: int) -> int:
    """Bytes [B] read from a pool for a hit: its whole pages.

    Those of the W replayed tokens are among them: later queries attend to their stored global KV, which a replay does
    not write again (SPEC 11). What the replay takes off is the work saved, `computed_tokens`.

    >>> from rorqual.config import presets
    >>> pool_read_bytes(KVLayout(presets.load("v4.1-flash")), 384)
    341760
    """
    return hit // layout.page_tokens * layout.page_bytes


def pool_write_bytes(layout: KVLayout, prompt: int, output: int, hit: int) -> int:
    """Bytes [B] written to a pool by one request: the whole pages of prompt and output beyond the hit.

    Source: SPEC 11; a page that is not full is not published, and its tokens are computed again next time.

    >>> from rorqual.config import presets
    >>> pool_write_bytes(KVLayout(presets.load("v4.1-flash")), 1000, 100, 384)
    569600
    """
    return ((prompt + output) // layout.page_tokens - hit // layout.page_tokens) * layout.page_bytes


def node_rate(prefill_rate: Number, computed: int) -> Fraction:
    """Requests a second [1/s] of a prefill node that computes `prefill_rate` tokens a second, `computed` a request.

    Source: the caller's rate.

    >>> node_rate(20_000, 16_512)
    Fraction(625, 516)
    """
    return _positive("prefill rate", prefill_rate) / _positive("computed tokens", computed)


def emitted_rate(handover_bytes: int, prefill_rate: Number, computed: int) -> Fraction:
    """Bytes a second [B/s] that a busy prefill node sends: bytes of one hand-over x its requests a second.

    Source: `node_rate`.

    >>> emitted_rate(29_175_832, 20_000, 32_768) == Fraction(29_175_832 * 20_000, 32_768)
    True
    >>> round(emitted_rate(29_175_832, 20_000, 32_768))
    17807515
    """
    return handover_bytes * node_rate(prefill_rate, computed)


def transfer_s(size: int, link: Number, latency_s: Number = 0) -> Fraction:
    """Seconds [s] until `size` bytes have arrived over a link of `link` bytes a second. Source: the caller's link.

    >>> transfer_s(29_175_832, 50_000_000_000, 0.0)
    Fraction(3646979, 6250000000)
    """
    return nonnegative("latency", latency_s) + size / _positive("link", link)


def link_for(size: int, target_s: Number, latency_s: Number = 0) -> Fraction:
    """Bytes a second [B/s] of a link that hands `size` bytes over in `target_s` seconds; inverse of `transfer_s`.

    Source: `transfer_s`.

    Raises:
        InputError: the target is not longer than the latency: no link is fast enough.

    >>> link_for(29_175_832, Fraction(1, 100))
    Fraction(2917583200, 1)
    """
    left = _positive("target time", target_s) - nonnegative("latency", latency_s)
    if left <= 0:
        raise InputError(f"target time must be above the latency of {float(latency_s):g} s; got {float(target_s):g} s")
    return size / left


def break_even_link(layout: KVLayout, prefill_rate: Number) -> Fraction:
    """Link [B/s] at which fetching a token's global KV takes as long as computing the token: bytes a token x rate.

    Source: `KVLayout.bytes_per_token`, 890 in the release. A slower link is better left idle.

    >>> from rorqual.config import presets
    >>> break_even_link(KVLayout(presets.load("v4.1-flash")), 20_000)
    Fraction(17800000, 1)
    """
    return layout.bytes_per_token * _positive("prefill rate", prefill_rate)


def shortest_fetch(layout: KVLayout, prefill_rate: Number, link: Number, latency_s: Number = 0) -> int | None:
    """Tokens of the shortest prefix that is fetched no slower than computed; None if none ever is.

    latency + N b / link + W / rate <= N / rate, N whole pages above W (SPEC 11), b bytes a token.

    >>> from rorqual.config import presets
    >>> release = KVLayout(presets.load("v4.1-flash"))
    >>> shortest_fetch(release, 20_000, 10**9, 0.01), shortest_fetch(release, 20_000, 17_800_000)
    (384, None)
    """
    rate, speed = _positive("prefill rate", prefill_rate), _positive("link", link)
    gained = 1 / rate - layout.bytes_per_token / speed
    if gained <= 0:
        return None
    window = layout.config.sliding_window
    least = max((nonnegative("latency", latency_s) + window / rate) / gained, Fraction(window + 1))
    return math.ceil(least / layout.page_tokens) * layout.page_tokens


def drive_writes_per_day(write_rate: Number, capacity: int) -> Fraction:
    """Drive writes a day (DWPD) [1/day] at `write_rate` bytes a second on disks of `capacity` bytes together.

    Source: the drives' data sheets name it so.

    >>> drive_writes_per_day(10**9, 8_640_000_000_000)
    Fraction(10, 1)
    """
    return DAY_S * nonnegative("write rate", write_rate) / _positive("disk capacity", capacity)


def disk_life_s(write_rate: Number, endurance: Number, amplification: Number = 1) -> Fraction | None:
    """Seconds [s] until disks rated for `endurance` bytes written (TBW x 10^12) are worn; None if nothing is written.

    Source: the endurance in the drives' data sheet.

    amplification: bytes that the flash writes for each byte given to it, 1 for whole pages in large files.

    >>> disk_life_s(10**9, 14_016 * 10**12) / DAY_S
    Fraction(1460, 9)
    """
    worn = nonnegative("write rate", write_rate) * _positive("write amplification", amplification)
    return _positive("endurance", endurance) / worn if worn else None


def endurance_bytes(capacity: int, dwpd: Number, years: Number) -> Fraction:
    """Bytes [B] that disks rated `dwpd` drive writes a day for `years` years may be written: their TBW x 10^12.

    Source: the drives' data sheet.

    >>> endurance_bytes(7_680_000_000_000, 1, 5)
    Fraction(14016000000000000, 1)
    """
    return _positive("disk capacity", capacity) * _positive("DWPD", dwpd) * 365 * _positive("years", years)


def _positive(name: str, value: Number) -> Fraction:
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} must be a number above 0; got {value}")
    return Fraction(value)


def _one_of(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise InputError(f"{name} must be one of {', '.join(legal)}; got {value!r}")
