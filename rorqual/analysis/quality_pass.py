"""Teacher-forced loss after the prompts of one window, in every way that one loaded model can run them.

One pass over the window serves all: wherever a prompt ends, the running sequence is forked and the fork reads the
tokens to score. `ced` forks a window earlier: what the encoder does never depends on the decoder, so from there the
decoder's window floor is all that differs. A hit forks at the end, keeps the pages below it, and loses everything else.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rorqual.analysis.quality_variants import Variant, hit_tokens
from rorqual.engine.sequence import Prompt, new_cache, resume
from rorqual.engine.sequence import Sequence as Running
from rorqual.errors import FormatError
from rorqual.model.forward import forward
from rorqual.model.transformer import Transformer

# L tokens of a window, V vocabulary

Losses = dict[str, list[float | None]]
"""Variant -> mean nats a token after each prompt length; None where a variant has none."""


def window_losses(
    model: Transformer, ids_L: Tensor, lengths: Sequence[int], measured: Sequence[Variant], *, scored: int, chunk: int
) -> Losses:
    """Losses of the `scored` tokens after every prompt ids_L[:length], for variants of this model's loading.

    Args:
        lengths: ascending; the longest and the scored tokens make up the window.
        chunk: prompt tokens a prefill step.

    Raises:
        FormatError: a loss that is not a number.
    """
    assert len(ids_L) == max(lengths) + scored
    with torch.inference_mode():
        one = WindowPass(model, ids_L, lengths, scored, chunk)
        cold = one.cold(want_full=any(v.prefill == "full" for v in measured))
        found: Losses = {}
        for variant in measured:
            if variant.hit is None:
                found[variant.name] = [cold[variant.prefill, n] for n in lengths]
            else:
                found[variant.name] = [one.after_hit(n, variant.hit, variant.replay) for n in lengths]
    return found


class WindowPass:
    """One window through one model."""

    def __init__(self, model: Transformer, ids_L: Tensor, lengths: Sequence[int], scored: int, chunk: int) -> None:
        self.model, self.ids, self.lengths, self.scored, self.chunk = model, ids_L, lengths, scored, chunk
        self.window = model.config.sliding_window
        self.running = Running(model, new_cache(model, len(ids_L)))
        self._hits: dict[tuple[int, int, str], float] = {}

    def cold(self, *, want_full: bool) -> dict[tuple[str, int], float]:
        """(prefill, prompt length) -> loss without a hit; leaves the pages of the longest prompt behind.

        want_full: False leaves the decoder out of the pass and `full` out of the result.
        """
        found = {}
        starts = {n: max(0, n - self.window) for n in self.lengths}
        for stop in sorted({*starts.values(), *self.lengths}):
            logits = self._go_on(stop, decode=want_full)
            if stop in self.lengths and logits is not None:
                found["full", stop] = self._score(fork(self.running), logits, stop)
            for n in (n for n, start in starts.items() if start == stop):
                twin = fork(self.running)
                if n > self.window:
                    twin.decoder_floor = stop
                found["ced", n] = self._prefill_and_score(twin, n)
        return found

    def after_hit(self, tokens: int, hit: str, replay: str) -> float | None:
        """Loss after a prompt whose first pages an earlier request left; only after `cold`."""
        end = hit_tokens(hit, tokens, self.window, self.model.layout.page_tokens)
        if end is None:
            return None
        if (tokens, end, replay) not in self._hits:
            twin = fork(self.running)
            # What a hit does not bring must not be read: NaN in its place would show.
            twin.cache.slots.poison(twin.slot)
            twin.cache.pages.poison(twin.block_table[end // self.model.layout.page_tokens :])
            resume(twin, Prompt(ids=self.ids[:tokens]), end, mode=replay, prefill="ced")
            self._hits[tokens, end, replay] = self._prefill_and_score(twin, tokens, write_floor=end)
        return self._hits[tokens, end, replay]

    def _go_on(self, stop: int, *, decode: bool) -> Tensor | None:
        """Run the pass up to `stop`; the last logits [V] when the decoder runs."""
        running = self.running
        if stop <= running.length:
            return None
        if decode:
            logits = running.prefill(Prompt(ids=self.ids[:stop]), mode="full", chunk=self.chunk)[-1].logits
            assert logits is not None
            return logits[-1]
        for first in range(running.length, stop, self.chunk):
            step = replace(running.step(self.ids[first : min(first + self.chunk, stop)]), run_decoder=False)
            running.ran(step, forward(self.model, running.cache, [step])[0])
        return None

    def _prefill_and_score(self, sequence: Running, tokens: int, write_floor: int = 0) -> float:
        prompt = Prompt(ids=self.ids[:tokens])
        outputs = sequence.prefill(prompt, mode="ced", chunk=self.chunk, write_floor=write_floor)
        assert outputs[-1].logits is not None
        return self._score(sequence, outputs[-1].logits[-1], tokens)

    def _score(self, sequence: Running, logits_V: Tensor, tokens: int) -> float:
        """Mean nats of the tokens after the prompt: the first from its own logits, the others read in one step."""
        targets = self.ids[tokens : tokens + self.scored]
        logits = logits_V[None]
        if self.scored > 1:
            rest = sequence.append(targets[:-1], logits_from=0).logits
            assert rest is not None
            logits = torch.cat((logits, rest))
        loss = float(torch.nn.functional.cross_entropy(logits.double(), targets))
        if loss != loss:
            raise FormatError("logits: NaN; the checkpoint's weights are damaged or overflow")
        return loss


def fork(sequence: Running) -> Running:
    """A second sequence that stands where the first one does, on a cache of its own."""
    cache = sequence.cache
    twin = copy.copy(sequence)
    twin.cache = copy.deepcopy(cache, {id(shared): shared for shared in (cache.config, cache.layout)})
    return twin
