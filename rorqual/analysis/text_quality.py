"""What a model writes: existing words, copied runs, and replies that come to an end.

Sampled through the engine, as a user would: packed caches, CED prefill, a seed for each sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from rorqual.analysis.positions import with_begin, without_begin
from rorqual.analysis.text_words import RUN, copied, known_share, words
from rorqual.engine.generate import generate
from rorqual.engine.params import SamplingParams
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.training.data.tokens import ASSISTANT, END_THINK, SPECIAL_TOKENS, token_id

KNOWN_AT_LEAST, COPIED_AT_MOST, ENDED_AT_LEAST = 0.98, 0.05, 0.90

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """samples: continuations of `prompt_tokens` tokens of held-out text, `tokens` each.
    replies: answers to held-out conversations, cut off after `reply_tokens`; the conversation before an answer has at
    most `conversation_tokens`."""

    samples: int = 200
    prompt_tokens: int = 32
    tokens: int = 128
    replies: int = 100
    reply_tokens: int = 256
    conversation_tokens: int = 1024
    temperature: float = 0.7
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """prompt, ids: int64, given and new. ended: whether eos came (it is the last id then)."""

    prompt: Tensor
    ids: Tensor
    ended: bool


def sample(
    model: Transformer, prompts: Sequence[Tensor], tokens: int, plan: SamplingPlan, note: Progress
) -> list[Sample]:
    """One continuation a prompt, of at most `tokens`; prompt i is drawn with seed `plan.seed` + i."""
    found = []
    for index, prompt in enumerate(prompts):
        note(f"sample {index + 1} of {len(prompts)}")
        sampling = SamplingParams(temperature=plan.temperature, seed=plan.seed + index)
        running = generate(model, prompt, max_tokens=tokens, sampling=sampling)
        for _ in running:
            pass
        ended = running.stats.finish_reason == "stop"
        found.append(Sample(prompt=prompt, ids=torch.tensor(running.ids, dtype=torch.int64), ended=ended))
    return found


def passages(documents: Sequence[Tensor], count: int, tokens: int, bos: int) -> list[Tensor]:
    """`count` stretches of `tokens` tokens, evenly spread over the documents, each after a begin token.

    Raises:
        InputError: no document is long enough.
    """
    bodies = [without_begin(ids, bos) for ids in documents]
    bodies = [body for body in bodies if len(body) > tokens]
    starts = sum(len(body) - tokens for body in bodies)
    if not starts:
        raise InputError(f"documents: none is longer than {tokens} tokens")
    found = []
    for index in range(count):
        place = index * starts // count
        for body in bodies:
            if place < len(body) - tokens:
                found.append(with_begin(body[place : place + tokens], bos))
                break
            place -= len(body) - tokens
    return found


def conversations(documents: Sequence[Tensor], tokenizer: Tokenizer, count: int, tokens: int) -> list[Tensor]:
    """`count` beginnings of conversations, up to where an assistant's answer starts, at most `tokens` long.

    Conversations are taken evenly; from the first one its first turn, from the next one its second, and so on around.

    Raises:
        InputError: no conversation reaches an answer within `tokens`.
    """
    assistant, opened = token_id(tokenizer, ASSISTANT), token_id(tokenizer, END_THINK)
    turns = []
    for ids in documents:
        marks = torch.nonzero((ids[:-1] == assistant) & (ids[1:] == opened))[:, 0] + 2
        if len(ends := marks[marks <= tokens].tolist()):
            turns.append((ids, ends))
    if not turns:
        raise InputError(f"documents: no conversation has an answer within {tokens} tokens")
    found = []
    for index in range(count):
        ids, ends = turns[index * len(turns) // count if count <= len(turns) else index % len(turns)]
        found.append(ids[: ends[index % len(ends)]])
    return found


def plain_text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Text of ids; a special token is a line end, so that no word forms across it."""
    special = {tokenizer.token_to_id(text) for text in SPECIAL_TOKENS}
    parts: list[list[int]] = [[]]
    for token in ids:
        if token in special:
            parts.append([])
        else:
            parts[-1].append(token)
    return "\n".join(tokenizer.decode(part) for part in parts)


def sample_words(tokenizer: Tokenizer, one: Sample) -> list[str]:
    """Words that the model wrote from their first letter on, and to their last."""
    given = len(plain_text(tokenizer, one.prompt.tolist()))
    text = plain_text(tokenizer, [*one.prompt.tolist(), *one.ids.tolist()])
    return words(text, given, whole=one.ended)


def text_quality(
    model: Transformer,
    documents: Iterable[tuple[str, str, str, Tensor]],
    plan: SamplingPlan | None = None,
    note: Progress = lambda _: None,
) -> dict[str, Any]:
    """The three shares, with their bars; plain numbers for JSON.

    documents: (split, name, kind, ids int64) of the whole corpus: "train" or "heldout", "text" or "chat". Prompts come
    from held-out ones, words may come from either, copies are copies of "train". Without conversations there is no
    "replies".

    Raises:
        InputError: the model has no tokenizer; nothing held out is long enough.
    """
    plan = plan or SamplingPlan()
    if model.tokenizer is None:
        raise InputError("model: it has no tokenizer.json, and so writes no words")
    tokenizer = model.tokenizer
    trained: list[list[str]] = []
    vocabulary: set[str] = set()
    held: dict[str, list[Tensor]] = {"text": [], "chat": []}
    for split, name, kind, ids in documents:
        note(f"words of {name}")
        found = words(plain_text(tokenizer, ids.tolist()))
        vocabulary.update(found)
        if split == "train":
            trained.append(found)
        else:
            held[kind].append(ids)
    prompts = passages(held["text"], plan.samples, plan.prompt_tokens, model.config.bos_token_id)
    samples = sample(model, prompts, plan.tokens, plan, note)
    report = {"samples": _words_report(tokenizer, samples, vocabulary, trained, plan)}
    if held["chat"] and plan.replies:
        prompts = conversations(held["chat"], tokenizer, plan.replies, plan.conversation_tokens)
        report["replies"] = _replies_report(sample(model, prompts, plan.reply_tokens, plan, note), plan)
    return report


def _words_report(
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    vocabulary: set[str],
    trained: Sequence[Sequence[str]],
    plan: SamplingPlan,
) -> dict[str, Any]:
    written = [sample_words(tokenizer, one) for one in samples]
    known, unknown = known_share(written, vocabulary)
    copies = copied(written, trained)
    share = sum(copies) / max(1, len(copies))
    return {
        "count": len(samples),
        "tokens": plan.tokens,
        "temperature": plan.temperature,
        "words": sum(map(len, written)),
        "known_share": known,
        "known_reached": known >= KNOWN_AT_LEAST,
        "unknown": [word for word, _ in Counter(unknown).most_common(20)],
        "copied_run": RUN,
        "copied_share": share,
        "copied_reached": share <= COPIED_AT_MOST,
    }


def _replies_report(replies: Sequence[Sample], plan: SamplingPlan) -> dict[str, Any]:
    share = sum(one.ended for one in replies) / max(1, len(replies))
    return {
        "count": len(replies),
        "within_tokens": plan.reply_tokens,
        "ended_share": share,
        "ended_reached": share >= ENDED_AT_LEAST,
        "mean_tokens": sum(len(one.ids) for one in replies) / max(1, len(replies)),
    }
