"""One step of the engine: plan, run, choose tokens, propose drafts, settle what stands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rorqual.engine.draft import Fed
from rorqual.engine.output import Delta
from rorqual.engine.plan import SequencePlan, StepPlan
from rorqual.engine.request import Live, token_logprobs
from rorqual.engine.runner import Runner
from rorqual.engine.sampler import DAMAGED
from rorqual.engine.scheduler import Scheduler
from rorqual.engine.speculation import NO_DRAFTS, Ask, Drafts, Speculator, accept
from rorqual.engine.stats import Log, StepRecord
from rorqual.model.rows import SHORT_SEGMENT
from rorqual.model.step import SequenceOutput
from rorqual.ops.memory import HeapBound


@dataclass(slots=True, kw_only=True)
class Result:
    """What one sequence of a step came to. stands: positions in the cache now. deltas: of a prefill with n
    completions, one each; of a chunk, none."""

    plan: SequencePlan
    live: Live
    output: SequenceOutput
    stands: int
    deltas: list[Delta] = field(default_factory=list)
    drafts: Drafts = NO_DRAFTS

    @property
    def goes_on(self) -> bool:
        """It has a newest token to be computed next."""
        return bool(self.deltas) and not self.live.finished


class Stepper:
    """The loop's body.

    lives: completions that are in the scheduler, or become so with the first token of their request, by key.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        speculator: Speculator | None,
        lives: dict[str, Live],
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler, self.runner, self.speculator = scheduler, runner, speculator
        self._lives, self._log, self._clock = lives, log, clock
        self._heap = HeapBound()

    def step(self) -> list[Delta]:
        """Deltas in the order of service; none when there was nothing to do, or only prefill."""
        times = [self._clock()]
        plan = self.scheduler.step()
        for key in plan.preempted:
            self._lives[key].drafts, self._lives[key].handed = NO_DRAFTS, None
            self._lives[key].request.counts.preempted += 1
        if not plan:
            return []
        self._begin(plan, times[0])
        times.append(self._clock())
        outputs = self.runner.run(
            plan,
            {own.request: self._lives[own.request].tokens for own in plan.sequences},
            {own.request: self._lives[own.request].drafts.ids for own in plan.sequences},
            {own.request: given for own in plan.sequences if (given := self._lives[own.request].handed) is not None},
        )
        for own in plan.sequences:
            self._lives[own.request].handed = None
        times.append(self._clock())
        results = self._choose(plan, outputs, times[-1])
        times.append(self._clock())
        proposing = self._propose(results)
        times.append(self._clock())
        for result in results:
            self._settle(result)
        times.append(self._clock())
        deltas = [delta for result in results for delta in result.deltas]
        self._record(plan, results, times)
        self._measure(plan, times[-1] - times[0] - proposing, proposing)
        return deltas

    def _begin(self, plan: StepPlan, now: float) -> None:
        for own in plan.sequences:
            request = self._lives[own.request].request
            if own.reset:
                if self.speculator is not None:
                    self.speculator.begin(own.slot)
                if request.times.admitted is None:
                    request.times.admitted = now
                    request.counts.hit = 0 if own.handed else own.write_floor
                    request.counts.restored = own.restored
                    request.counts.handed = request.counts.prompt if own.handed else 0
                if own.encoder_rows:
                    request.counts.replayed += max(0, own.write_floor - own.start)

    def _choose(self, plan: StepPlan, outputs: list[SequenceOutput], now: float) -> list[Result]:
        results = [
            Result(plan=own, live=self._lives[own.request], output=output, stands=own.end)
            for own, output in zip(plan.sequences, outputs, strict=True)
        ]
        reached = [result for result in results if result.plan.end >= len(result.live.tokens)]
        if reached:
            # One look at all rows: greedy choices, and whether anything is NaN or Inf, which a maximum passes on.
            rows = torch.cat([_last(result) for result in reached])
            best, ids = rows.max(-1)
            finite, choices, at = [math.isfinite(value) for value in best.tolist()], ids.tolist(), 0
            for result in reached:
                count = result.plan.drafts + 1
                self._take(result, choices[at : at + count], all(finite[at : at + count]), now)
                at += count
        for result in results:
            counts, own = result.live.request.counts, result.plan
            counts.computed += own.encoder_rows
            counts.layer_tokens += self.runner.layers_run(own, result.output)
            counts.engram_rows += self.runner.engram_rows(own, result.output)
            if result.live.request.output.prompt_logprobs is not None:
                self._prompt_logprobs(result)
        return results

    def _take(self, result: Result, choices: list[int], finite: bool, now: float) -> None:
        """Choose tokens of one that reached its newest; with n completions, the first token of each."""
        live, own, request = result.live, result.plan, result.live.request
        drafts = live.drafts
        if len(drafts.ids) != own.drafts:
            drafts = replace(drafts, ids=drafts.ids[: own.drafts])
        lives = request.lives if not request.begun else [live]
        request.begun = True
        for each in lives:
            if not finite:
                result.deltas.append(each.end("error", DAMAGED))
                continue
            if each.sampler.plain:
                ids = _greedy(each, choices, drafts)
            else:
                ids = accept(each.sampler, _last(result).cpu(), drafts, request.ends)
            top = request.params.logprobs
            delta = each.add(ids, None if top is None else token_logprobs(_last(result), ids, top))
            request.counts.new += len(delta.token_ids)
            result.deltas.append(delta)
        if own.drafts and finite:
            kept = sum(a == b for a, b in zip(drafts.ids, result.deltas[0].token_ids, strict=False))
            request.counts.verified(own.drafts, kept)
            # At the end of a text the rest of the drafts was not looked at.
            if self.speculator is not None and not live.finished:
                self.speculator.worth.trust.judge(drafts.survivals[: own.drafts], kept)
        if finite:
            result.stands = len(live.tokens) + len(result.deltas[0].token_ids) - 1
            request.times.first_token = request.times.first_token or now
            request.times.last_token = now

    def _prompt_logprobs(self, result: Result) -> None:
        """Row p of the prompt's logits is about token p + 1."""
        found, request = result.live.request.output.prompt_logprobs, result.live.request
        logits, top = result.output.logits, request.params.prompt_logprobs
        if found is None or top is None or logits is None:
            return
        first = result.plan.end - len(logits)
        ids = request.output.prompt_ids[first + 1 : result.plan.end + 1].tolist()
        if ids:
            found[first + 1 : first + 1 + len(ids)] = token_logprobs(logits, ids, top)

    def _propose(self, results: list[Result]) -> float:
        """Feed the draft windows with what stands, and ask for drafts of those that go on; seconds of the latter."""
        if self.speculator is None:
            return 0.0
        window = self.runner.model.config.sliding_window
        speculative = [result for result in results if result.live.request.speculative]
        wanted = [result for result in speculative if not result.live.finished]
        fed = []
        # Completions that go on from the same prompt copy its windows, even where the first one has ended.
        for result in (one for one in speculative if len(one.deltas) > 1 or not one.live.finished):
            hidden, first = result.output.main_hidden, result.output.first
            # The windows reach no further back than this from the end of the prompt.
            if hidden is not None and result.stands > first and result.plan.end > len(result.live.tokens) - window:
                fed.append(Fed(slot=result.plan.slot, first=first, hidden=hidden[: result.stands - first]))
        self.speculator.feed(fed)
        asking = [result for result in wanted if result.deltas and result.live.left > 1]
        asks = [
            Ask(
                slot=result.plan.slot,
                token=result.live.completion.token_ids[-1],
                sampler=result.live.sampler,
                room=result.live.left - 1,
            )
            for result in asking
        ]
        going = sum(result.goes_on for result in results)
        if not self.speculator.wanted(asks, going):
            return 0.0
        began = self._clock()
        for result, drafts in zip(asking, self.speculator.propose(asks, going), strict=True):
            result.drafts = drafts
        return self._clock() - began

    def _settle(self, result: Result) -> None:
        """Tell the scheduler what stands."""
        own, live = result.plan, result.live
        if not result.deltas:
            self.scheduler.computed(own)
            return
        if len(result.deltas) > 1:
            children = (other for other in live.request.lives if other is not live)
            for child, delta in zip(children, result.deltas[1:], strict=True):
                self._start(child, own, list(delta.token_ids))
        ids = list(result.deltas[0].token_ids)
        live.drafts = result.drafts
        live.tokens.extend(ids)
        if not live.finished:
            self.scheduler.accepted(own, ids, proposed=len(live.drafts.ids))
            if own.end > result.stands:
                self.runner.rewind(own.slot, result.stands)
            return
        if ids:
            self.scheduler.accepted(own, ids)
        self.scheduler.finish(live.key)

    def _start(self, child: Live, plan: SequencePlan, ids: list[int]) -> None:
        """Let another completion of a request go on from the end of the prompt."""
        child.tokens.extend(ids)
        if child.finished:
            self.scheduler.drop_copy(plan.request)
            return
        made = self.scheduler.fork(plan.request, child.key, new_tokens=child.request.budget, plan=plan)
        if made is None:
            self.scheduler.track(child.key).chain.extend(ids)
            return
        self.runner.fork(made, self.scheduler.kv.block_table(child.key))
        if self.speculator is not None:
            self.speculator.fork(*made.slot)
        self.scheduler.accepted(replace(plan, request=child.key, slot=made.slot[1]), ids)

    def _record(self, plan: StepPlan, results: list[Result], times: list[float]) -> None:
        planned, ran, chose, proposed, settled = (b - a for a, b in itertools.pairwise(times))
        self._log.steps += 1
        self._log.recent.append(
            StepRecord(
                number=plan.number,
                at=times[-1],
                sequences=tuple((own.request, own.start, own.end, own.drafts) for own in plan.sequences),
                preempted=plan.preempted,
                tokens=sum(len(delta.token_ids) for result in results for delta in result.deltas),
                accepted=sum(result.stands - result.plan.end + result.plan.drafts for result in results),
                plan_seconds=planned,
                model_seconds=ran,
                draft_seconds=proposed,
                other_seconds=chose + settled,
            )
        )

    def _measure(self, plan: StepPlan, step_seconds: float, draft_seconds: float) -> None:
        """What steps and proposals cost, for the length of drafts. Steps with a long chunk say nothing about it."""
        if any(own.rows > SHORT_SEGMENT for own in plan.sequences):
            self._heap.check()
        elif self.speculator is not None:
            costs = self.speculator.worth.costs(len(plan.sequences))
            costs.steps.add(plan.rows, step_seconds)
            if self.speculator.drafted:
                costs.drafting.add(self.speculator.drafted, draft_seconds)


def _last(result: Result) -> Tensor:
    """The rows of the newest token and of its drafts."""
    logits = result.output.logits
    assert logits is not None
    count = result.plan.drafts + 1
    # A slice of a tensor costs as much as the rest of what a token is told: most steps have just these rows.
    return logits if len(logits) == count else logits[-count:]


def _greedy(live: Live, choices: list[int], drafts: Drafts) -> list[int]:
    """`accept` of a sampler that takes the largest logit."""
    found: list[int] = []
    for at, token in enumerate(choices):
        live.sampler.take(token)
        found.append(token)
        if at >= len(drafts.ids) or token != drafts.ids[at] or token in live.request.ends:
            break
    return found
