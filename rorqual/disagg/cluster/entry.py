"""A caller's prompt and parameters become a job, or one clear error, before any worker hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rorqual.disagg.cluster.job import Facts, Job
from rorqual.engine.grammar import Grammars
from rorqual.engine.images import ImageSource
from rorqual.engine.intake import check_ids, new_tokens
from rorqual.engine.output import Completion, Counts, RequestOutput, Times, compact
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput, place_prompt
from rorqual.engine.sequence import PREFILL_MODES, check_choice
from rorqual.engine.text_model import TextModel
from rorqual.errors import InputError
from rorqual.pool.prefix import PrefixChain, root_key


class Entry:
    """What an engine's intake and scheduler refuse, refused here.

    Args:
        model: configuration and tokenizer.
        facts: of the workers.
        clock: of arrivals.

    Raises:
        InputError: the workers run another configuration.
    """

    def __init__(self, model: TextModel, facts: Facts, clock: Callable[[], float]) -> None:
        if model.config.fingerprint() != facts.config:
            raise InputError("cluster: the workers run a model of another config.json than this one")
        self._model, self._facts, self._clock = model, facts, clock
        self._grammars: Grammars | None = None

    def job(
        self,
        name: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        priority: int,
        salt: str,
        images: Sequence[ImageSource],
        speculative: bool | None,
        prefill: str | None,
    ) -> tuple[Job, RequestOutput, tuple[bytes, ...]]:
        """A job, the output that it will fill, and the keys of its prompt's full pages.

        Raises:
            InputError: what is not legal, or could never run, by name.
        """
        check_choice("prefill", prefill or "ced", PREFILL_MODES)
        if speculative and not self._facts.drafts:
            raise InputError("speculative: these workers were made without; legal: False")
        config, facts = self._model.config, self._facts
        check_ids(params, config.vocab_size)
        made, pictures, spans = place_prompt(self._model, prompt, images)
        ids = tuple(made.ids.tolist())
        self._check_room(len(ids), params)
        self._check_constraint(params)
        chain = PrefixChain(root_key(facts.fingerprint, facts.page_tokens, salt), facts.page_tokens, spans)
        chain.extend(ids)
        whole = params.prompt_logprobs is not None or prefill == "full"
        job = Job(
            name=name,
            ids=ids,
            params=params,
            images=tuple(pictures),
            salt=salt,
            priority=priority,
            speculative=speculative,
            prefill=prefill,
            split=not whole,
        )
        return job, self._output(name, job.ids, params), tuple(chain.keys)

    def _output(self, name: str, ids: Sequence[int], params: SamplingParams) -> RequestOutput:
        logprobs = params.logprobs is not None
        return RequestOutput(
            request=name,
            prompt_ids=compact(ids),
            completions=[Completion(index=at, logprobs=[] if logprobs else None) for at in range(params.n)],
            counts=Counts(prompt=len(ids)),
            times=Times(arrived=self._clock()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(ids),
        )

    def _check_room(self, tokens: int, params: SamplingParams) -> None:
        """As `Scheduler.submit` of the workers would."""
        facts = self._facts
        new = new_tokens(tokens, params, facts.max_model_len)
        room = facts.pages * facts.page_tokens
        if tokens + new - 1 > room:
            raise InputError(f"prompt: {tokens} tokens with {new} new ones never fit a worker's cache of {room}")
        if params.n > facts.slots:
            raise InputError(f"n: {params.n} completions at once need as many slots; a worker has {facts.slots}")

    def _check_constraint(self, params: SamplingParams) -> None:
        if params.constraint is None:
            return
        if self._grammars is None:
            config = self._model.config
            self._grammars = Grammars(self._model.tokenizer, config.vocab_size, config.eos_token_id)
        self._grammars.matcher(params.constraint)
