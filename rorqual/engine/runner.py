"""Step plans become tensors: one forward over the rows of all requests in a plan.

The runner knows slots, not requests. Of a slot it keeps the block table, which grows by what plans name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rorqual.cache.kv_cache import KVCache
from rorqual.engine.handed import Handed, put_in
from rorqual.engine.plan import SequencePlan, StepPlan
from rorqual.engine.sequence import compressed_before
from rorqual.engine.tokens import Tokens
from rorqual.model.forward import forward
from rorqual.model.step import SequenceOutput, SequenceStep
from rorqual.model.transformer import Transformer
from rorqual.pool.manager import Fork

_NOTHING = SequenceOutput(first=0, end=0, logits=None, main_hidden=None)


class Runner:
    """One model over one cache.

    layer_tokens: rows x layers run so far, the work that CED saves (SPEC 11).
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.layer_tokens = 0
        self._encoder = model.config.decoder_start
        self._decoder = model.config.num_hidden_layers - self._encoder
        nothing = torch.empty(0, dtype=torch.int64, device=model.device)
        self._tables = [nothing for _ in cache.slots.states]

    def run(
        self,
        plan: StepPlan,
        tokens: Mapping[str, Tokens],
        drafts: Mapping[str, Sequence[int]] | None = None,
        handed: Mapping[str, Handed] | None = None,
    ) -> list[SequenceOutput]:
        """The outputs of a step's sequences, in their order.

        Args:
            plan: not empty.
            tokens: of every request in it.
            drafts: the proposals that its verification rows take; at least as many as they are.
            handed: what requests begin with whose plan says so.
        """
        steps, at, outputs = [], [], [_NOTHING] * len(plan.sequences)
        for i, own in enumerate(plan.sequences):
            given = (handed or {})[own.request] if own.handed else None
            if own.reset:
                self._begin(own, tokens[own.request], given)
            if own.handed == "rings":
                assert given is not None and given.logits_V is not None
                logits = given.logits_V.to(self.model.device)[None]
                outputs[i] = SequenceOutput(first=own.end, end=own.end, logits=logits, main_hidden=None)
                continue
            at.append(i)
            steps.append(self._step(own, tokens[own.request], (drafts or {}).get(own.request, ())))
        for i, output in zip(at, forward(self.model, self.cache, steps) if steps else (), strict=True):
            outputs[i] = output
        self.layer_tokens += sum(
            self.layers_run(own, output) for own, output in zip(plan.sequences, outputs, strict=True)
        )
        return outputs

    def layers_run(self, plan: SequencePlan, output: SequenceOutput) -> int:
        """Rows x layers that ran for one sequence of a step."""
        return plan.encoder_rows * self._encoder + (output.end - output.first) * self._decoder

    def fork(self, made: Fork, pages: Sequence[int]) -> None:
        """Copy private state, and a last page that is not full. pages: the child's block table."""
        source, target = made.slot
        self.cache.slots.copy(source, target)
        if made.page is not None:
            self.cache.pages.copy(*made.page)
        self._tables[target] = torch.tensor(pages, dtype=torch.int64, device=self.model.device)

    def rewind(self, slot: int, position: int) -> None:
        """Forget a slot's positions >= `position`: rejected drafts."""
        self.cache.slots.states[slot].rewind(position)

    def _begin(self, plan: SequencePlan, tokens: Tokens, given: Handed | None) -> None:
        """Let a slot stand where its plan starts, or where what was handed over ends."""
        if plan.encoder_rows:
            before = compressed_before(self.model, tokens.known(plan.start), plan.start)
            self.cache.slots.begin(plan.slot, plan.start, before)
        if given is not None:
            prompt = tokens.known(plan.end)
            put_in(given, self.model, self.cache, plan.slot, self._table(plan), prompt, plan.shared)

    def _step(self, plan: SequencePlan, tokens: Tokens, drafts: Sequence[int]) -> SequenceStep:
        start = plan.end - plan.encoder_rows
        fed = tokens.cut(start, plan.end, drafts[: plan.drafts])
        assert len(fed) == plan.encoder_rows, f"{plan.request}: {len(fed)} tokens for {plan.encoder_rows} rows"
        return SequenceStep(
            tokens_n=fed.ids,
            start=start,
            slot=plan.slot,
            block_table=self._table(plan),
            image_n=fed.image,
            image_embeds=fed.embeds,
            write_floor=plan.write_floor,
            window_floor=plan.window_floor,
            decoder_floor=plan.decoder_floor,
            run_decoder=plan.run_decoder,
            logits_from=plan.logits_from,
        )

    def _table(self, plan: SequencePlan) -> Tensor:
        if plan.reset or plan.new_pages:
            grown = torch.tensor(plan.new_pages, dtype=torch.int64, device=self.model.device)
            self._tables[plan.slot] = grown if plan.reset else torch.cat((self._tables[plan.slot], grown))
        return self._tables[plan.slot]
