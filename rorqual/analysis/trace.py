"""`rorqual.trace`: every intermediate tensor of a prompt and a forced continuation, by the goldens' names.

Prompt tensors are named as they are; a decode step's begin with `decode.`, the draft's with `spec.`, the cache's after
the last step with `state.`. With `prefill="ced"` or a hit, prompt tensors begin with `ced.` or `hitH.` and cover the
last W rows, those that every layer ran on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.analysis.trace_state import is_row_tensor, join_pieces, record_state, record_truncated
from rorqual.engine.draft import feed_draft, propose_after
from rorqual.engine.ids import as_ids
from rorqual.engine.images import ImageSource, image_prompt, read_images, span_starts
from rorqual.engine.sequence import Prompt, check_choice, new_cache, resume
from rorqual.engine.sequence import Sequence as Running
from rorqual.errors import InputError
from rorqual.model.tap import Recorder
from rorqual.model.transformer import Transformer
from rorqual.model.vision.image import ImageInput, image_token_types

SPEC_DETAIL = re.compile(r"mtp\.\d+\.(?!moe_)")
SPEC_DETAIL_STEPS = 4
"""Steps whose draft-layer streams are kept; of later ones only routing, logits and ids, as in the goldens."""


def trace(
    model: Transformer,
    input_ids: Tensor | Sequence[int],
    forced_ids: Tensor | Sequence[int] | None = None,
    prefill: str = "full",
    chunk: int | None = None,
    hit: int | None = None,
    spec: bool = False,
    images: Sequence[ImageSource] | None = None,
    inject: Mapping[str, Tensor] | None = None,
    select: str | Sequence[str] = "*",
    stale_decode: bool = False,
    tap: Recorder | None = None,
) -> dict[str, Tensor]:
    """Run a prompt, then a forced continuation one token a step, and return the named tensors.

    Args:
        input_ids: int64 [N] or [1, N].
        forced_ids: tokens fed after the prompt; `decode.logits[t]` follows token t.
        prefill: "full" (every layer on every token) or "ced".
        chunk: rows a prefill chunk, None for the whole prompt.
        hit: the first H tokens are prefilled by themselves, windows dropped, the prompt resumed by bounded replay.
        spec: draft after every decode step (`spec.*`); needs forced ids and a model with a draft.
        images: in the order of their spans in the prompt.
        inject: name -> tensor of the whole prompt, used in place of ours; compare only what is computed from it.
        select: globs, a list or separated by commas; what is not selected is never held.
        tap: a recorder of the caller's own, instead of `select` and `inject`.
        stale_decode: the released code's decode (SPEC 5); names begin with `decode_stale.`.

    Raises:
        InputError: bad ids, an injected name that the run never met, or an option that does not fit the model.
    """
    check_choice("prefill", prefill, ("full", "ced"))
    if spec and model.draft is None:
        raise InputError("spec: this model has no draft layers")
    if (spec or stale_decode) and forced_ids is None:
        raise InputError("forced_ids: none given; spec and stale_decode are of decode steps")
    with torch.inference_mode():
        tap = tap or Recorder(select if isinstance(select, str) else ",".join(select), inject)
        pictures = read_images(model, images or ())
        ids = as_ids(input_ids, "input_ids")
        forced = as_ids(forced_ids, "forced_ids") if forced_ids is not None else torch.zeros(0, dtype=torch.int64)
        tracer = Tracer(model, tap, image_prompt(model, ids, pictures, tap), forced, pictures, stale_decode)
        tracer.run(prefill, chunk, hit, spec)
        unused = sorted(set(tap.inject) - tap.used)
        if unused:
            raise InputError(f"inject: {unused[0]} is not a tensor of this run; see the names of `rorqual trace`")
        return tracer.tensors()


@dataclass(slots=True)
class Tracer:
    """One traced sequence."""

    model: Transformer
    tap: Recorder
    prompt: Prompt
    forced: Tensor
    images: list[ImageInput]
    stale: bool
    first_row: int = 0

    def run(self, prefill: str, chunk: int | None, hit: int | None, spec: bool) -> None:
        total = len(self.prompt) + len(self.forced)
        sequence = Running(self.model, new_cache(self.model, total))
        self._constants()
        if hit is not None:
            self._earlier(sequence, hit, prefill, chunk)
            self.tap.prefix = f"hit{hit}."
        elif prefill == "ced":
            self.tap.prefix = "ced."
        prefix = self.tap.prefix
        floor = hit or 0
        self.first_row = max(0, len(self.prompt) - self.model.config.sliding_window) if prefix else 0
        if prefix:
            self.tap.add("first_row", torch.tensor(self.first_row))
        outputs = sequence.prefill(
            self.prompt, mode=prefill, chunk=chunk, write_floor=floor, logits_from=0, tap=self.tap
        )
        if self.model.draft is not None:
            for output in outputs:
                if output.main_hidden is not None:
                    feed_draft(sequence, output, self.tap)
        self.tap.injecting = False
        if prefix:
            record_truncated(sequence, self.tap, self.first_row)
        self._decode(sequence, prefix, spec)
        if not prefix and not self.stale:
            record_state(sequence, self.tap, *self._seen())

    def _earlier(self, sequence: Running, hit: int, prefill: str, chunk: int | None) -> None:
        """The earlier request that left the first `hit` tokens' global KV, then the hit."""
        self.tap.muted, self.tap.injecting = True, False
        ids, image, embeds = self.prompt.cut(0, hit)
        if 0 < hit <= len(self.prompt):
            sequence.prefill(Prompt(ids=ids, image=image, embeds=embeds), mode=prefill, chunk=chunk)
        resume(sequence, self.prompt, hit, prefill=prefill)
        self.tap.muted, self.tap.injecting = False, True

    def _constants(self) -> None:
        tap, model = self.tap, self.model
        tap.add("input_ids", self.prompt.ids[None])
        if model.ngram is not None:
            tap.add("engram.token_map", model.token_map)
            tap.add("engram.multipliers", model.ngram.multipliers)
            tap.add("engram.primes", model.ngram.primes)
        if not self.images:
            return
        types = torch.full_like(self.prompt.ids, -1)
        starts = span_starts(self.prompt.ids, model.config.image_token_id, self.images)
        for n, (start, image) in enumerate(zip(starts, self.images, strict=True)):
            grid = image.grid
            types[start : start + grid.tokens] = image_token_types(grid)
            shape = [start, grid.patch_rows, grid.patch_cols, grid.rows, grid.cols]
            tap.add(f"image.{n}.grid", torch.tensor(shape))
            tap.add(f"image.{n}.patches", image.patches)
        tap.add("token_types", types[None])

    def _decode(self, sequence: Running, prefix: str, spec: bool) -> None:
        tap, model = self.tap, self.model
        stem = f"{prefix}decode_stale." if self.stale else f"{prefix}decode."
        if len(self.forced):
            tap.prefix = "decode."
            tap.add("ids", self.forced)
        for t in range(len(self.forced)):
            tap.prefix = stem
            output = sequence.append(self.forced[t : t + 1], tap=tap, stale_decode=self.stale)
            assert output.logits is not None
            following = self.forced[t + 1 : t + 2] if t + 1 < len(self.forced) else output.logits.argmax(-1)
            tap.add("argmax", output.logits.argmax(-1))
            if model.draft is None:
                continue
            tap.muted = True
            main_x = feed_draft(sequence, output, tap)
            tap.muted = False
            if spec:
                self._draft(sequence, main_x, following, f"{prefix}spec.", t)

    def _draft(self, sequence: Running, main_x: Tensor, following: Tensor, prefix: str, step: int) -> None:
        """One greedy proposal after the step's already-sampled next token."""
        tap = self.tap
        tap.prefix, tap.stacked = prefix, True
        tap.skip = None if step < SPEC_DETAIL_STEPS else SPEC_DETAIL
        proposal = propose_after([sequence], following, lambda logits, _i: logits.argmax(-1), tap)
        tap.add("input_ids", following)
        tap.add("output_ids", torch.cat((following, proposal.ids_Bg[0]))[None])
        tap.add("logits", proposal.logits_BgV)
        tap.add("confidence", proposal.confidence_Bg)
        tap.add("main_x", main_x[None])
        tap.stacked, tap.skip = False, None

    def _seen(self) -> tuple[Tensor | None, dict[int, tuple[Tensor, Tensor]]]:
        """Compressed ids of the whole sequence, and the last m compressor input rows of every source with a tail."""
        pieces, model = self.tap.hidden_pieces, self.model
        compressed = torch.cat(pieces["engram_tokens"]) if model.ngram is not None else None
        tails = {}
        for source in model.config.kv_sources:
            m = source.ratio
            if m == 1:
                continue
            kv, score = (torch.cat(pieces[f"layers.{source.layer_id}.{t}"])[-m:] for t in ("tail_kv", "tail_score"))
            total = len(self.prompt) + len(self.forced)
            order = torch.argsort(torch.arange(total - kv.shape[0], total) % m)
            tails[source.layer_id] = (kv[order], score[order])
        return compressed, tails

    def tensors(self) -> dict[str, Tensor]:
        """Recorded tensors, joined over chunks and steps; after a truncated prefill only its last W rows."""
        found = self.tap.tensors(join_pieces)
        for name, value in found.items():
            if name.startswith(("ced.", "hit")) and is_row_tensor(name) and value.shape[0] > 0:
                rows = len(self.prompt) - self.first_row
                found[name] = value[-rows:] if rows < value.shape[0] else value
        return found
