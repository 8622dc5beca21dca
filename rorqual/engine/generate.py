"""Text in, text out, one sequence: what `rorqual generate` runs. An engine with one slot, that says what it cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from rorqual.engine.engine import Engine
from rorqual.engine.ids import as_ids
from rorqual.engine.images import ImageSource, read_images
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import encode
from rorqual.engine.sequence import PREFILL_MODES, check_choice
from rorqual.errors import FormatError, InputError
from rorqual.model.transformer import Transformer
from rorqual.store.interface import PageStore


@dataclass(slots=True)
class Stats:
    """What a generation cost. Seconds are wall clock; bytes are measured on the allocated tensors.

    page_bytes: the pages of global KV, which hold `capacity` tokens. sequence_bytes: all that does not grow with
    tokens, of which window_bytes are the backbone's rings.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    capacity: int = 0
    page_bytes: int = 0
    sequence_bytes: int = 0
    window_bytes: int = 0
    layer_tokens: int = 0
    layer_tokens_full: int = 0
    finish_reason: str = ""

    @property
    def bytes_per_token(self) -> float:
        """Global KV of one token, from the bytes of the pages."""
        return self.page_bytes / max(1, self.capacity)

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        return max(0, self.new_tokens - 1) / max(self.decode_seconds, 1e-9)


@dataclass(slots=True)
class Generation:
    """A running generation: iterate for text deltas; `ids` and `stats` fill as it goes."""

    deltas: Iterator[str]
    ids: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __iter__(self) -> Iterator[str]:
        return self.deltas


def generate(
    model: Transformer,
    prompt: str | Tensor | Sequence[int],
    *,
    max_tokens: int = 128,
    sampling: SamplingParams | None = None,
    prefill: str = "ced",
    chunk: int | None = 512,
    images: Sequence[ImageSource] = (),
    speculative: bool = False,
    store: PageStore | None = None,
) -> Generation:
    """Generate up to `max_tokens` tokens after a prompt (text, or ids int64 [N]).

    sampling: how; its `max_tokens` is not looked at. store: of pages that outlive the generation.

    Raises:
        InputError: before anything is computed, for an empty prompt, ids or options outside their range, or a prompt
            that leaves no position for a new token.
    """
    check_choice("prefill", prefill, PREFILL_MODES)
    params = replace(sampling or SamplingParams(), max_tokens=max_tokens)
    if params.n != 1:
        raise InputError(f"n: {params.n} is not legal here; legal: 1")
    engine, ids, pictures = single(model, prompt, max_tokens, chunk, images, speculative, store)
    name = engine.submit(ids, params, images=pictures, prefill=prefill)
    result = Generation(iter(()))
    result.deltas = _stream(engine, name, result)
    return result


def single(
    model: Transformer,
    prompt: str | Tensor | Sequence[int],
    max_tokens: int,
    chunk: int | None,
    images: Sequence[ImageSource],
    speculative: bool,
    store: PageStore | None = None,
) -> tuple[Engine, Tensor, Sequence[ImageSource]]:
    """An engine with the pages of one request, and that request's ids and images."""
    pictures = read_images(model, images)
    ids = encode(model, prompt, pictures) if isinstance(prompt, str) else as_ids(prompt, "prompt")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk: {chunk} is not at least 1")
    positions = min(len(ids) + max_tokens, model.config.max_position_embeddings)
    engine = Engine(
        model,
        slots=1,
        pages=model.layout.pages(positions) or 1,
        speculative=speculative,
        chunk_tokens=chunk or positions,
        store=store,
    )
    return engine, ids, pictures


def _stream(engine: Engine, name: str, result: Generation) -> Iterator[str]:
    output, stats = engine.output(name), result.stats
    _sizes(stats, engine)
    layers = engine.model.config.num_hidden_layers
    for delta in engine.stream(name):
        result.ids += delta.token_ids
        if delta.finish_reason == "error":
            raise FormatError(str(delta.stopped_by))
        _costs(stats, output, layers)
        if delta.text:
            yield delta.text


def _sizes(stats: Stats, engine: Engine) -> None:
    cache = engine.cache
    stats.window_bytes = cache.slots.rings.nbytes
    stats.sequence_bytes = cache.slots.nbytes
    stats.page_bytes, stats.capacity = cache.pages.nbytes, engine.plan.pool_tokens


def _costs(stats: Stats, output: RequestOutput, layers: int) -> None:
    counts, times = output.counts, output.times
    assert times.first_token is not None and times.last_token is not None
    if not stats.new_tokens:
        stats.prompt_tokens, stats.layer_tokens = counts.prompt, counts.layer_tokens
        stats.layer_tokens_full = counts.prompt * layers
        stats.prefill_seconds = times.first_token - (times.admitted or times.arrived)
    stats.new_tokens, stats.decode_seconds = counts.new, times.last_token - times.first_token
    stats.finish_reason = output.finish_reason or "length"
