"""One step of the model over ragged sequences: plain integers in, logits out (DESIGN 5).

Cold, chunked, resumed, replayed and decode steps are one code path; what differs is the integers of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceStep:
    """Tokens [start, start + n) of the sequence in `slot`.

    tokens_n: int64 ids. None of them where the decoder runs on rows that wait in the slot already, and nothing enters
        (`write_floor` is then where its first layer begins to write global KV of its own).
    image_n: bool, positions of an image span (delimiters included), or None.
    image_embeds: features [count of image_n, D] of those positions, in order.
    block_table: int64 page ids, enough for start + n tokens.
    write_floor: global KV of positions below it is stored already and stays untouched.
    window_floor: where a replay began: encoder layers see no window key below it.
    decoder_floor: first position that decoder layers run on, and their window floor. 0 runs them on everything
        (`full`); N - W after a CED prefill of N tokens.
    run_decoder: False for every chunk of a CED prefill but the last: the encoder's streams of the last W rows wait.
    logits_from: logits are wanted of positions at or above it (None: of the last row only, when the decoder runs).
    """

    tokens_n: Tensor
    start: int
    slot: int
    block_table: Tensor | None = None
    image_n: Tensor | None = None
    image_embeds: Tensor | None = None
    write_floor: int = 0
    window_floor: int = 0
    decoder_floor: int = 0
    run_decoder: bool = True
    logits_from: int | None = None

    @property
    def end(self) -> int:
        return self.start + int(self.tokens_n.shape[0])

    def to(self, device: torch.device) -> SequenceStep:
        """The step with its tensors on a device; itself where they are."""
        held = {name: getattr(self, name) for name in ("tokens_n", "block_table", "image_n", "image_embeds")}
        moved = {name: x.to(device) for name, x in held.items() if x is not None and x.device != device}
        return replace(self, **moved) if moved else self


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOutput:
    """What a step gives for one sequence, in the order of the steps.

    first: position of the first decoder row. logits: fp32 [rows, V] of the last `rows` positions, None when the
    decoder did not run. main_hidden: [decoder rows, targets x D] for the draft, None without one.
    """

    first: int
    end: int
    logits: Tensor | None
    main_hidden: Tensor | None
