"""`KVLayout`: every byte of the cache as arithmetic, and where it stands (SPEC 11). Planner and allocator ask here.

A page holds `page_tokens` tokens of every KV source, source after source, in one buffer. The release's, 113,920 bytes:

    | source 2: 64 entries                                | source 8 | source 14 | source 20 |
    | main codes | main scales | index codes | index scales |          |           |           |
    | 64 x 256   | 64 x 32     | 64 x 64     | 64 x 4       |  22,784  |  22,784   |  45,568   |

Two lifetimes, never added up: global KV grows with tokens (890 bytes each, 356 an entry); windows, tails, draft windows
and history are fixed per sequence. *Logical* bytes are what the mathematics needs; *allocated* bytes add the rows that
drafting needs for a rollback, and round global KV up to whole pages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from typing import cast

from rorqual.config import LayerRole, ModelConfig
from rorqual.errors import ConfigError, InputError
from rorqual.formats.spec import FORMATS, NumberFormat

PREFILLS = ("ced", "full")
REPLAYS = ("bounded", "exact")
PAGE_TOKENS = 128
"""The default page."""
TAIL_TENSORS = 2  # x Wkv and x Wgate, both fp32
FP32_BYTES = 4
BF16_BYTES = 2
HISTORY_ID_BYTES = 8  # compressed token ids are int64
MAX_DRAFT_ROWS = 4096
MAX_PAGE_TOKENS = 1 << 20


def entry_bytes(main: NumberFormat, head_dim: int, index_key: NumberFormat, index_head_dim: int) -> int:
    """Bytes of one compressed group: its main KV row and its index key.

    >>> entry_bytes(FORMATS["e2m1_e4m3_16"], 512, FORMATS["e2m1_e8m0_32"], 128)
    356
    """
    return main.row_bytes(head_dim) + index_key.row_bytes(index_head_dim)


def ring_rows(window: int, draft_rows: int) -> int:
    """Rows of a window ring: rejected drafts must not overwrite what a rollback still needs.

    >>> ring_rows(128, 5)
    133
    """
    return window + draft_rows


def tail_rows(ratio: int, draft_rows: int) -> int:
    """Rows of a compressor tail. A ratio of 1 leaves no group unfinished, so it has no tail at all.

    >>> tail_rows(2, 0), tail_rows(2, 5), tail_rows(4, 5), tail_rows(1, 5)
    (1, 6, 8, 0)
    """
    return ratio - 1 + draft_rows if ratio > 1 else 0


def tail_bytes(ratio: int, draft_rows: int, head_dim: int) -> int:
    """Bytes of one source's tail: fp32 kv and gate score of each row.

    >>> 3 * tail_bytes(2, 5, 512), 3 * tail_bytes(2, 0, 512)
    (73728, 12288)
    """
    return tail_rows(ratio, draft_rows) * TAIL_TENSORS * head_dim * FP32_BYTES


def bounded_replay(hit: int, window: int) -> int:
    """Tokens computed again below a hit. A hit of `window` tokens or fewer is not adopted: all of it is computed.

    >>> [bounded_replay(hit, 128) for hit in (0, 127, 128, 129, 4096)]
    [0, 127, 128, 128, 128]
    """
    return min(hit, window)


def exact_replay(first_row: int, layers: int, window: int) -> int:
    """Where a replay must start so that every row from `first_row` on equals a cold run after `layers` layers.

    Each layer looks `window - 1` rows further back than the one after it.

    >>> 10_000 - exact_replay(10_000, 20, 128), 10_000 - exact_replay(10_000, 40, 128), exact_replay(100, 20, 128)
    (2540, 5080, 0)
    """
    return max(0, first_row - layers * (window - 1))


def prefill_layer_tokens(encoder: int, decoder: int, window: int, tokens: int, prefill: str = "ced") -> int:
    """Layer-token products of a prefill: E N + D W for `ced`, (E + D) N for `full`.

    >>> prefill_layer_tokens(20, 20, 128, 32_768) / prefill_layer_tokens(20, 20, 128, 32_768, "full")
    0.501953125
    """
    _one_of("prefill", prefill, PREFILLS)
    return encoder * tokens + decoder * (min(tokens, window) if prefill == "ced" else tokens)


def mha_bytes(layers: int, heads: int, head_dim: int) -> int:
    """Bytes a token that multi-head attention caches in bf16: a key and a value of every head in every layer.

    >>> mha_bytes(40, 64, 512)
    5242880
    """
    return 2 * layers * heads * head_dim * BF16_BYTES


def gqa_bytes(layers: int, heads: int, head_dim: int, kv_heads: int = 8) -> int:
    """Bytes a token of grouped-query attention in bf16: `kv_heads` keys and values a layer, all heads if fewer.

    >>> gqa_bytes(40, 64, 512), gqa_bytes(8, 4, 64) == mha_bytes(8, 4, 64)
    (655360, True)
    """
    return mha_bytes(layers, min(kv_heads, heads), head_dim)


def mla_bytes(layers: int, latent: int, rope: int) -> int:
    """Bytes a token of multi-head latent attention in bf16: a latent and a rotary key a layer.

    >>> mla_bytes(61, 512, 64)
    70272
    """
    return layers * (latent + rope) * BF16_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Rows of `entry_bytes` each, beginning `offset` bytes into the page: entry e is at offset + e * entry_bytes."""

    offset: int
    entry_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRegion:
    """One KV source's share of a page, contiguous from `offset` to `end`. Group g of a sequence is entry g % entries.

    Within it: main codes, main scales, index codes, index scales, each of all entries.
    """

    layer_id: int
    ratio: int
    entries: int
    main_codes: Span
    main_scales: Span
    index_codes: Span
    index_scales: Span

    @property
    def spans(self) -> tuple[Span, Span, Span, Span]:
        return self.main_codes, self.main_scales, self.index_codes, self.index_scales

    @property
    def entry_bytes(self) -> int:
        """Bytes of one group: 356 in the release."""
        return sum(span.entry_bytes for span in self.spans)

    @property
    def bytes_per_token(self) -> Fraction:
        return Fraction(self.entry_bytes, self.ratio)

    @property
    def offset(self) -> int:
        return self.main_codes.offset

    @property
    def end(self) -> int:
        return self.offset + self.entries * self.entry_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes and offsets of one config's cache. Raises ConfigError naming `page_tokens` or `draft_rows`.

    Args:
        config: the model.
        page_tokens: tokens of a page, a multiple of every ratio and of the candidate span (block x ratio).
        draft_rows: rows that one verification may write beyond the accepted position; None takes the config's draft
            block, 0 means that nothing is ever rolled back (and no draft window is kept).

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> layout.bytes_per_token, layout.page_bytes
    (Fraction(890, 1), 113920)
    >>> layout.window_bytes_logical, layout.window_bytes_allocated, layout.draft_window_bytes
    (2703360, 2808960, 202752)
    """

    config: ModelConfig
    page_tokens: int = field(default=PAGE_TOKENS, kw_only=True)
    draft_rows: int = field(default=cast(int, None), kw_only=True)  # None never outlives __post_init__
    sources: tuple[SourceRegion, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.draft_rows is None:
            drafts = self.config.num_nextn_predict_layers
            object.__setattr__(self, "draft_rows", self.config.dspark_block_size if drafts else 0)
        _in_range("draft_rows", self.draft_rows, 0, MAX_DRAFT_ROWS)
        _in_range("page_tokens", self.page_tokens, 1, MAX_PAGE_TOKENS)
        object.__setattr__(self, "sources", self._regions())
        self._check_page()

    @property
    def main_format(self) -> NumberFormat:
        return FORMATS[self.config.cache.main]

    @property
    def index_format(self) -> NumberFormat:
        return FORMATS[self.config.cache.index_key]

    @property
    def window_format(self) -> NumberFormat:
        return FORMATS[self.config.cache.window]

    @property
    def bytes_per_token(self) -> Fraction:
        """Global bytes a token, exact: a source of ratio m adds 1/m of an entry. 0 without a source."""
        return sum((source.bytes_per_token for source in self.sources), Fraction(0))

    @property
    def page_bytes(self) -> int:
        return self.sources[-1].end if self.sources else 0

    def source(self, layer_id: int) -> SourceRegion:
        """The region of KV source `layer_id`; KeyError when that layer is none."""
        for source in self.sources:
            if source.layer_id == layer_id:
                return source
        raise KeyError(layer_id)

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-_tokens(tokens) // self.page_tokens)

    def global_bytes_logical(self, tokens: int) -> int:
        """Bytes of the complete groups of `tokens` tokens, a step function: a group still filling is in the tail."""
        return sum(_tokens(tokens) // source.ratio * source.entry_bytes for source in self.sources)

    def global_bytes_allocated(self, tokens: int) -> int:
        """Bytes of the pages of one sequence of `tokens` tokens."""
        return self.pages(tokens) * self.page_bytes

    def tokens_in(self, capacity: int) -> int | None:
        """Longest single sequence that `capacity` bytes of pages hold, the inverse of `global_bytes_allocated`.

        None: there is no global KV, so bytes do not bound it.
        """
        if not self.page_bytes:
            return None
        return max(0, capacity) // self.page_bytes * self.page_tokens

    @property
    def window_row_bytes(self) -> int:
        return self.window_format.row_bytes(self.config.head_dim)

    @property
    def ring_rows(self) -> int:
        """Allocated rows of each backbone ring."""
        return ring_rows(self.config.sliding_window, self.draft_rows)

    @property
    def window_bytes_logical(self) -> int:
        return self.config.num_hidden_layers * self.config.sliding_window * self.window_row_bytes

    @property
    def window_bytes_allocated(self) -> int:
        return self.config.num_hidden_layers * self.ring_rows * self.window_row_bytes

    @property
    def draft_layers(self) -> int:
        """Draft layers whose window is kept: none without drafting."""
        return self.config.num_nextn_predict_layers if self.draft_rows else 0

    @property
    def draft_window_bytes(self) -> int:
        """A draft's window holds accepted positions only, so it needs no rows for a rollback."""
        return self.draft_layers * self.config.sliding_window * self.window_row_bytes

    def tail_rows(self, ratio: int) -> int:
        """Allocated rows of the tail of a source of this ratio."""
        return tail_rows(ratio, self.draft_rows)

    @property
    def tail_bytes_logical(self) -> int:
        return sum(tail_bytes(source.ratio, 0, self.config.head_dim) for source in self.sources)

    @property
    def tail_bytes(self) -> int:
        """Allocated tails of every source: 73,728 in the release, 12,288 without drafting."""
        return sum(tail_bytes(source.ratio, self.draft_rows, self.config.head_dim) for source in self.sources)

    @property
    def history_rows_logical(self) -> int:
        """Compressed token ids that the next n-gram looks back on; 0 without Engram."""
        return self.config.engram_max_ngram_size - 1 if self.config.engram_layer_ids else 0

    @property
    def history_rows(self) -> int:
        """Allocated ids: a rollback over rejected drafts needs the older ones again."""
        return self.history_rows_logical + self.draft_rows if self.history_rows_logical else 0

    @property
    def history_bytes(self) -> int:
        return self.history_rows * HISTORY_ID_BYTES

    @property
    def sequence_bytes_logical(self) -> int:
        """All fixed bytes of a sequence, as the mathematics needs them."""
        history = self.history_rows_logical * HISTORY_ID_BYTES
        return self.window_bytes_logical + self.draft_window_bytes + self.tail_bytes_logical + history

    @property
    def sequence_bytes_allocated(self) -> int:
        """All fixed bytes of a sequence, as a slot allocates them."""
        return self.window_bytes_allocated + self.draft_window_bytes + self.tail_bytes + self.history_bytes

    def replay_tokens(self, hit: int, mode: str = "bounded", prefill: str = "ced", length: int | None = None) -> int:
        """Tokens below a prefix hit that are computed again to rebuild the windows: a replay starts at hit minus this.

        bounded: the last W, the documented approximation. A hit of W or fewer is not adopted: it is recomputed whole.
        exact: far enough back to equal a cold run of the same prefill mode. Only layers that run on every token look
            back: the encoder in `ced`, all of them in `full`. With `ced` the decoder takes the encoder's streams of
            the rows [length - W, length), which begin below the hit when the suffix is shorter than W: give `length`,
            the prompt's tokens, and the start covers them too.

        >>> from rorqual.config import presets
        >>> layout = KVLayout(presets.load("v4.1-flash"))
        >>> layout.replay_tokens(8192), layout.replay_tokens(8192, "exact"), layout.replay_tokens(8192, "exact", "full")
        (128, 2540, 5080)
        >>> layout.replay_tokens(8192, "exact", length=8192), layout.replay_tokens(8192, "exact", length=8300)
        (2668, 2560)
        """
        _one_of("mode", mode, REPLAYS)
        _one_of("prefill", prefill, PREFILLS)
        if length is not None and length < _tokens(hit):
            raise InputError(f"length must be at least the hit of {hit} tokens; got {length}")
        window = self.config.sliding_window
        if mode == "bounded":
            return bounded_replay(_tokens(hit), window)
        first_row, layers = _tokens(hit), self.config.num_hidden_layers
        if prefill == "ced":
            layers = self.config.decoder_start
            has_decoder = layers < self.config.num_hidden_layers
            if length is not None and has_decoder:
                first_row = min(first_row, length - window)
        return hit - exact_replay(first_row, layers, window)

    def prefill_layer_tokens(self, tokens: int, prefill: str = "ced") -> int:
        """Layer-token products of a cold prefill of `tokens` tokens; the drafts and the tower are not in it."""
        encoder = self.config.decoder_start
        decoder = self.config.num_hidden_layers - encoder
        return prefill_layer_tokens(encoder, decoder, self.config.sliding_window, _tokens(tokens), prefill)

    def _regions(self) -> tuple[SourceRegion, ...]:
        regions: list[SourceRegion] = []
        for role in self.config.kv_sources:
            self._page_multiple(role.ratio, f"the ratio of source {role.layer_id}")
            regions.append(self._region(role, regions[-1].end if regions else 0))
        return tuple(regions)

    def _region(self, role: LayerRole, offset: int) -> SourceRegion:
        entries = self.page_tokens // role.ratio
        main = _row_widths(self.main_format, self.config.head_dim)
        index = _row_widths(self.index_format, self.config.index_head_dim)
        spans: list[Span] = []
        for width in (*main, *index):
            spans.append(Span(offset=offset, entry_bytes=width))
            offset += entries * width
        main_codes, main_scales, index_codes, index_scales = spans
        return SourceRegion(
            layer_id=role.layer_id,
            ratio=role.ratio,
            entries=entries,
            main_codes=main_codes,
            main_scales=main_scales,
            index_codes=index_codes,
            index_scales=index_scales,
        )

    def _check_page(self) -> None:
        """The candidate span, and alignment: bf16 and fp32 codes are read in place as wider elements."""
        config = self.config
        if config.candidate_source_layer_id >= 0:
            ratio = config.compress_ratios[config.candidate_source_layer_id]
            why = f"candidate_block_size {config.candidate_block_size} x ratio {ratio}"
            self._page_multiple(config.candidate_block_size * ratio, why)
        for source in self.sources:
            for codes, fmt in ((source.main_codes, self.main_format), (source.index_codes, self.index_format)):
                element = max(1, fmt.bits // 8)
                if codes.offset % element or self.page_bytes % element:
                    legal = f"a multiple of {4 * source.ratio} when a cache format is {fmt.name}"
                    raise ConfigError(f"page_tokens must be {legal}; got {self.page_tokens}")

    def _page_multiple(self, unit: int, why: str) -> None:
        if self.page_tokens % unit:
            raise ConfigError(f"page_tokens must be a multiple of {unit} ({why}); got {self.page_tokens}")


def _row_widths(fmt: NumberFormat, width: int) -> tuple[int, int]:
    return fmt.code_bytes(width), fmt.scale_bytes(width)


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer in {low}..{high}; got {value!r}")


def _one_of(name: str, value: str, legal: Collection[str]) -> None:
    if value not in legal:
        raise InputError(f"{name} must be one of {', '.join(legal)}; got {value!r}")


def _tokens(count: int) -> int:
    if type(count) is not int or count < 0:
        raise InputError(f"tokens must be an integer of 0 or more; got {count!r}")
    return count
