"""What a model says after beginnings of texts: what its drafts are to agree with, so what they learn best from.

Beginnings of one length are continued in groups, one step for all sequences of a group; a sequence leaves its group at
EOS. A row's bits do not depend on its neighbours, so a text is the same in any group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rorqual.analysis.quality_windows import Windows
from rorqual.engine.params import SamplingParams
from rorqual.engine.sampler import Sampler
from rorqual.engine.sequence import Prompt, new_cache
from rorqual.engine.sequence import Sequence as Running
from rorqual.errors import InputError
from rorqual.model.forward import forward
from rorqual.model.transformer import Transformer

# P beginnings, L their tokens

GROUP = 32
"""Sequences that run together."""


def own_texts(
    model: Transformer, windows: Windows, new: int, *, temperature: float = 0.0, seed: int = 0, group: int = GROUP
) -> Iterator[list[int]]:
    """The ids of each window int64 [L] with at most `new` tokens after it, none after EOS, in the order of the windows.

    temperature: 0 is greedy; else window i draws from a stream of its own, `seed` + i.

    Raises:
        InputError: windows and `new` tokens do not fit the model's positions; a temperature that is not legal.
    """
    length, limit = windows.ids.shape[1] + new, model.config.max_position_embeddings
    if length > limit:
        raise InputError(f"new: {length:,} positions with the beginning do not fit the model's {limit:,}")
    for first in range(0, len(windows), group):
        ids = windows.ids[first : first + group]
        samplers = [Sampler(SamplingParams(temperature=temperature, seed=seed + first + i)) for i in range(len(ids))]
        yield from _continued(model, ids, new, samplers)


def _continued(model: Transformer, ids_PL: Tensor, new: int, samplers: Sequence[Sampler]) -> list[list[int]]:
    cache = new_cache(model, ids_PL.shape[1] + new, slots=len(ids_PL))
    running = [Running(model, cache, slot=i) for i in range(len(ids_PL))]
    texts: list[list[int]] = [ids.tolist() for ids in ids_PL]
    for sequence, text, sampler, ids in zip(running, texts, samplers, ids_PL, strict=True):
        logits = sequence.prefill(Prompt(ids=ids))[-1].logits
        assert logits is not None
        text.append(sampler(logits[-1]))
    eos = model.config.eos_token_id
    for _ in range(new - 1):
        live = [i for i, text in enumerate(texts) if text[-1] != eos]
        if not live:
            break
        steps = [running[i].step(torch.tensor(texts[i][-1:])) for i in live]
        for i, step, output in zip(live, steps, forward(model, cache, steps), strict=True):
            running[i].ran(step, output)
            assert output.logits is not None
            texts[i].append(samplers[i](output.logits[-1]))
    return texts


def write_own_texts(
    model: Transformer,
    windows: Windows,
    new: int,
    out: Path,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write them as JSONL, `{"text": ...}` a line, special tokens left out; the tokens said, beginnings not counted.

    `progress` gets texts done and in all. The file is written beside its place and moved there at the end.

    Raises:
        InputError: as `own_texts`; a model without a tokenizer; a file that cannot be written.
    """
    if model.tokenizer is None:
        raise InputError("model: it has no tokenizer.json; its ids cannot be turned into text")
    part, said = out.with_name(f".{out.name}.part"), 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for done, ids in enumerate(own_texts(model, windows, new, temperature=temperature, seed=seed), 1):
                said += len(ids) - windows.ids.shape[1]
                file.write(json.dumps({"text": model.tokenizer.decode(ids)}, ensure_ascii=False) + "\n")
                progress(done, len(windows))
        part.replace(out)
    except OSError as error:
        raise InputError(f"out: {out} cannot be written ({error.strerror})") from None
    finally:
        part.unlink(missing_ok=True)
    return said
