"""A request while it runs: what was asked, its completions in the making, and what they have cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.engine.handed import Handed
from rorqual.engine.output import Completion, Counts, Delta, RequestOutput, Times, TokenLogprob
from rorqual.engine.params import SamplingParams
from rorqual.engine.sampler import Sampler
from rorqual.engine.speculation import NO_DRAFTS
from rorqual.engine.text import Detokenizer, StopText
from rorqual.engine.tokens import Tokens
from rorqual.pool.prefix import PrefixChain


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """As submitted, and what it has given so far. chain: of its prompt, for the completions to go on from."""

    id: str
    params: SamplingParams
    chain: PrefixChain
    output: RequestOutput
    budget: int
    speculative: bool = False
    priority: int = 0
    prefill: str = "ced"
    ends: frozenset[int] = frozenset()
    lives: list[Live] = field(default_factory=list)
    begun: bool = False
    """Its prefill has ended, and every completion has its first token."""

    @property
    def counts(self) -> Counts:
        return self.output.counts

    @property
    def times(self) -> Times:
        return self.output.times


class Live:
    """One completion in the making; `key` is its name in scheduler and plans. detokenizer: makes one, at each start."""

    def __init__(
        self, request: Request, key: str, tokens: Tokens, sampler: Sampler, detokenizer: Callable[[], Detokenizer]
    ) -> None:
        self.request, self.key, self.tokens, self.sampler = request, key, tokens, sampler
        self.drafts = NO_DRAFTS
        self.handed: Handed | None = None
        """What it begins with, until it has begun."""
        self.completion = Completion(index=len(request.output.completions))
        self._make = detokenizer
        request.output.completions.append(self.completion)
        request.lives.append(self)
        self._restart()

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def left(self) -> int:
        """Tokens that it may still have."""
        return self.request.budget - len(self.completion.token_ids)

    def add(self, ids: Iterable[int], logprobs: list[TokenLogprob] | None = None) -> Delta:
        """Tokens that were chosen, until one ends the text; what is behind it is dropped."""
        done = self.completion
        first, text = len(done.token_ids), ""
        for token in ids:
            done.token_ids.append(token)
            text += self._text_of(token)
            if done.finish_reason is not None:
                break
            if len(done.token_ids) == self.request.budget:
                done.finish_reason = "length"
                break
        if done.finish_reason is not None and self._stop.found is None:
            text += self._stop.add(self._detokenizer.flush()) + self._stop.flush()
        done.text += text
        taken = len(done.token_ids) - first
        if done.logprobs is not None and logprobs is not None:
            logprobs = logprobs[:taken]
            done.logprobs += logprobs
        return self._delta(text, done.token_ids[first:], logprobs)

    def end(self, reason: str, why: str | None = None) -> Delta:
        """End it from outside: `abort` or `error`."""
        text = self._stop.flush()
        self.completion.text += text
        self.completion.finish_reason, self.completion.stopped_by = reason, why
        return self._delta(text, [], None)

    def rewind(self, new: int) -> None:
        """Keep the first `new` tokens; the text is made of them again."""
        kept, logprobs = self.completion.token_ids[:new], self.completion.logprobs
        self.drafts = NO_DRAFTS
        self._restart()
        self.add(kept, None if logprobs is None else logprobs[:new])

    def _restart(self) -> None:
        params, done = self.request.params, self.completion
        done.token_ids, done.text, done.finish_reason, done.stopped_by = [], "", None, None
        done.logprobs = None if params.logprobs is None else []
        self._detokenizer, self._stop = self._make(), StopText(params.stop)

    def _text_of(self, token: int) -> str:
        done, early = self.completion, len(self.completion.token_ids) < self.request.params.min_tokens
        if token in self.request.ends and not early:
            done.finish_reason, done.stopped_by = "stop", token
            return ""
        delta = self._detokenizer.add(token)
        if early:
            return delta
        shown = self._stop.add(delta)
        if self._stop.found is not None:
            done.finish_reason, done.stopped_by = "stop", self._stop.found
        return shown

    def _delta(self, text: str, ids: list[int], logprobs: list[TokenLogprob] | None) -> Delta:
        done = self.completion
        return Delta(
            request=self.request.id,
            index=done.index,
            text=text,
            token_ids=tuple(ids),
            logprobs=None if logprobs is None or done.logprobs is None else tuple(logprobs),
            finish_reason=done.finish_reason,
            stopped_by=done.stopped_by,
        )


def token_logprobs(logits_nV: Tensor, ids: list[int], top: int) -> list[TokenLogprob]:
    """Of each token under its row of logits. A probability of 0 is the smallest finite logarithm."""
    rows = logits_nV[: len(ids)].cpu().double().log_softmax(-1).clamp_min(torch.finfo(torch.float32).min)
    own = rows.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    best = rows.topk(min(top, rows.shape[1])) if top else None
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(ids)
    if best is not None:
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        tops = [tuple(zip(indices, values, strict=True)) for indices, values in pairs]
    return [TokenLogprob(token=t, logprob=p, top=b) for t, p, b in zip(ids, own, tops, strict=True)]
