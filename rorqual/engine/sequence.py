"""One sequence over a cache of its own: prefill in any chunks, decode, verification, rewind, replay after a hit.

This is the single-user counterpart of a scheduler: it turns "these tokens, this prefill mode" into steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rorqual.cache.filler import fill_pages, fill_slot
from rorqual.cache.kv_cache import KVCache
from rorqual.errors import CapacityError, InputError
from rorqual.model.forward import forward
from rorqual.model.ngram import compress_ids
from rorqual.model.step import SequenceOutput, SequenceStep
from rorqual.model.tap import Tap
from rorqual.model.transformer import Transformer
from rorqual.ops.memory import HeapBound

PREFILL_MODES = ("ced", "full")
REPLAY_MODES = ("bounded", "exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """ids int64 [N]; image: bool [N], positions of image spans; embeds [image positions, D], in order, or None while
    nobody has computed them."""

    ids: Tensor
    image: Tensor | None = None
    embeds: Tensor | None = None

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def cut(self, start: int, end: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(ids, image mask, features) of positions [start, end)."""
        if self.image is None or self.embeds is None:
            return self.ids[start:end], None if self.image is None else self.image[start:end], None
        before, inside = int(self.image[:start].sum()), int(self.image[start:end].sum())
        return self.ids[start:end], self.image[start:end], self.embeds[before : before + inside]


def check_choice(name: str, value: str, legal: Seq[str]) -> str:
    if value not in legal:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(legal)}")
    return value


def new_cache(model: Transformer, tokens: int, slots: int = 1) -> KVCache:
    """A cache for `slots` sequences of up to `tokens` tokens each, on the model's device."""
    pages = -(-tokens // model.layout.page_tokens)
    return KVCache(model.config, model.layout, pages=pages * slots, slots=slots, device=model.device)


class Sequence:
    """Positions [0, length) of one sequence; pages [slot * n, (slot + 1) * n) of the cache unless given.

    layer_tokens counts rows x layers actually run, the work that CED saves (SPEC 11).
    """

    def __init__(self, model: Transformer, cache: KVCache, *, slot: int = 0, block_table: Tensor | None = None) -> None:
        self.model, self.cache, self.slot = model, cache, slot
        pages = cache.pages.pool.shape[0] // len(cache.slots.states)
        own = torch.arange(slot * pages, (slot + 1) * pages) if block_table is None else block_table
        self.block_table = own.to(model.device)
        self.length = 0
        self.decoder_floor = 0
        self.window_floor = 0
        self.layer_tokens = 0
        self.reset()

    @property
    def capacity(self) -> int:
        return int(self.block_table.shape[0]) * self.model.layout.page_tokens

    def reset(self, start: int = 0, before: Tensor | None = None) -> None:
        """Forget private state and stand at position `start`. `before`: compressed ids of the positions just before.

        Global KV stays where it is: that is what a prefix hit is.
        """
        self.cache.slots.begin(self.slot, start, before)
        self.length = self.window_floor = start
        self.decoder_floor = 0

    def rewind(self, position: int) -> None:
        """Forget positions >= `position`: rejected drafts.

        Raises:
            CapacityError: the rings have overwritten what the position needs; `resume` from a hit instead.
        """
        config = self.model.config
        lookback = self.model.ngram.history_size if self.model.ngram is not None else 0
        lowest = self.cache.slots.lowest_rewind(self.slot, config.sliding_window, lookback)
        if not lowest <= position <= self.length:
            raise CapacityError(f"rewind: position {position} is out of reach; legal: {lowest}..{self.length}")
        self.cache.slots.states[self.slot].rewind(position)
        self.length = position

    def prefill(
        self,
        prompt: Prompt,
        *,
        mode: str = "ced",
        chunk: int | None = None,
        write_floor: int = 0,
        logits_from: int | None = None,
        tap: Tap | None = None,
    ) -> list[SequenceOutput]:
        """Run positions [length, len(prompt)) of the prompt; one output a chunk, the last one with logits.

        Unless `logits_from` asks for more, earlier chunks keep nothing that a later step does not need: no logits, and
        hidden states for the draft only where its window still reaches. So the outputs do not grow with the prompt.
        """
        check_choice("prefill", mode, PREFILL_MODES)
        start, end = self.length, len(prompt)
        if chunk is not None and chunk < 1:
            raise InputError(f"chunk: {chunk} is not at least 1")
        self._check_room(end)
        if end <= start:
            raise InputError(f"prompt: {end} tokens, of which {start} are already in the cache; at least 1 is needed")
        window = self.model.config.sliding_window
        if mode == "ced" and end - window > start:
            self.decoder_floor = end - window
        elif mode == "full" and start == self.window_floor and start:
            self.decoder_floor = start
        outputs, heap = [], HeapBound()
        for first in range(start, end, chunk or end):
            last = min(first + (chunk or end), end)
            ids, image, embeds = prompt.cut(first, last)
            step = SequenceStep(
                tokens_n=ids,
                start=first,
                slot=self.slot,
                block_table=self.block_table,
                image_n=image,
                image_embeds=embeds,
                write_floor=write_floor,
                window_floor=self.window_floor,
                decoder_floor=self.decoder_floor,
                run_decoder=mode == "full" or last == end,
                logits_from=last if logits_from is None and last < end else logits_from,
            )
            (output,) = self._run(step, tap)
            heap.check()
            passed = logits_from is None and last <= end - window
            outputs.append(replace(output, logits=None, main_hidden=None) if passed else output)
        return outputs

    def append(
        self, ids: Tensor, *, logits_from: int | None = None, tap: Tap | None = None, stale_decode: bool = False
    ) -> SequenceOutput:
        """Run given tokens after the sequence: a decode step, or a verification of several tokens at once.

        stale_decode: the released code's defect, for traces (SPEC 5).
        """
        self._check_room(self.length + len(ids))
        return self._run(self.step(ids, logits_from=logits_from), tap, stale_decode)[0]

    def step(self, ids: Tensor, *, logits_from: int | None = None) -> SequenceStep:
        """The step that `append` runs, for callers who batch sequences."""
        return SequenceStep(
            tokens_n=ids,
            start=self.length,
            slot=self.slot,
            block_table=self.block_table,
            window_floor=self.window_floor,
            decoder_floor=self.decoder_floor,
            logits_from=logits_from,
        )

    def ran(self, step: SequenceStep, output: SequenceOutput) -> None:
        """Account for a step that was run in a batch."""
        config = self.model.config
        rows = step.end - step.start
        decoder = output.end - output.first
        self.layer_tokens += rows * config.decoder_start + decoder * (config.num_hidden_layers - config.decoder_start)
        self.length = step.end

    def _run(self, step: SequenceStep, tap: Tap | None, stale_decode: bool = False) -> list[SequenceOutput]:
        outputs = forward(self.model, self.cache, [step], tap=tap, stale_decode=stale_decode)
        self.ran(step, outputs[0])
        return outputs

    def _check_room(self, end: int) -> None:
        limit = self.model.config.max_position_embeddings
        if end > limit:
            raise InputError(f"prompt: {end} tokens do not fit the model's {limit} positions")
        if end > self.capacity:
            raise CapacityError(f"cache: {end} tokens do not fit the {self.capacity} allocated for this sequence")


def fill(sequence: Sequence, tokens: int, *, prefill: str = "full", seed: int = 0) -> None:
    """Stand at position `tokens` as after a prefill of so many, over plausible random bytes (`rorqual.cache.filler`).

    The next steps run exactly as after the prefill, only what they read means nothing. For measuring.

    Raises:
        InputError: an unknown mode, tokens below 1 or past the model's positions.
        CapacityError: more tokens than the sequence's pages hold.
    """
    check_choice("prefill", prefill, PREFILL_MODES)
    sequence._check_room(tokens)
    fill_pages(sequence.cache, sequence.block_table, tokens, seed)
    sequence.reset()
    if prefill == "ced":
        sequence.decoder_floor = max(0, tokens - sequence.model.config.sliding_window)
    fill_slot(sequence.cache, sequence.slot, tokens, sequence.decoder_floor, seed)
    sequence.length = tokens


def replay_start(model: Transformer, hit: int, length: int, *, mode: str = "bounded", prefill: str = "ced") -> int:
    """Where recomputation starts after a prefix hit that ends at `hit` (SPEC 11)."""
    check_choice("replay", mode, REPLAY_MODES)
    return hit - model.layout.replay_tokens(hit, mode=mode, prefill=prefill, length=length)


def resume(sequence: Sequence, prompt: Prompt, hit: int, *, mode: str = "bounded", prefill: str = "ced") -> None:
    """Stand ready to prefill `prompt` after a hit of `hit` tokens: private state dropped, n-gram history rebuilt.

    The caller then prefills with `write_floor=hit`.

    Raises:
        InputError: `hit` is not a multiple of every ratio, not in (window, len(prompt)].
    """
    model = sequence.model
    step = math.lcm(*(s.ratio for s in model.layout.sources))
    if hit % step or not 0 < hit <= len(prompt):
        raise InputError(f"hit: {hit} is not legal; legal: {step}..{len(prompt)} in steps of {step}")
    start = replay_start(model, hit, len(prompt), mode=mode, prefill=prefill)
    sequence.reset(start, compressed_before(model, prompt, start))


def compressed_before(model: Transformer, prompt: Prompt, start: int) -> Tensor | None:
    """Compressed ids of the positions before `start` that an n-gram may reach back to; None without Engram."""
    if model.ngram is None:
        return None
    ids, image, _ = prompt.cut(max(0, start - model.ngram.history_size), start)
    return compress_ids(model.token_map, ids.to(model.device), None if image is None else image.to(model.device))
