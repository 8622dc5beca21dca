"""A caller's prompt and parameters become a request with its completions, or one clear error."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

from rorqual.engine.grammar import Grammars, Matcher
from rorqual.engine.handed import Handed
from rorqual.engine.identity import fingerprint
from rorqual.engine.images import ImageSource
from rorqual.engine.output import Counts, RequestOutput, Times, compact
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput, read_prompt
from rorqual.engine.request import Live, Request
from rorqual.engine.sampler import Sampler
from rorqual.engine.text import Detokenizer
from rorqual.engine.tokens import Tokens
from rorqual.errors import InputError
from rorqual.model.transformer import Transformer
from rorqual.pool.prefix import PrefixChain, root_key


class Intake:
    """Makes requests for one model.

    Args:
        model: its tokenizer, ids and positions.
        page_tokens: of the cache.
        max_model_len: tokens of a request, prompt and new ones.
        clock: of arrivals.
    """

    def __init__(self, model: Transformer, page_tokens: int, max_model_len: int, clock: Callable[[], float]) -> None:
        self.model, self.page_tokens, self.max_model_len = model, page_tokens, max_model_len
        self.fingerprint = fingerprint(model)
        self._clock = clock
        self._grammars: Grammars | None = None
        self._alone: dict[int, str] = {}

    def request(
        self,
        name: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        salt: str,
        images: Sequence[ImageSource],
        speculative: bool,
        prefill: str,
        priority: int,
        handed: Handed | None = None,
    ) -> Request:
        """A request of `params.n` completions.

        handed: what was computed of the prompt elsewhere; its images are then encoded only if they have to be.

        Raises:
            InputError: what is not legal, by name.
        """
        check_ids(params, self.model.config.vocab_size)
        made, images_at, features = read_prompt(self.model, prompt, images, lazy=handed is not None)
        ids = made.ids.numpy().data
        self._check_handed(handed, len(ids), params)
        chain = PrefixChain(root_key(self.fingerprint, self.page_tokens, salt), self.page_tokens, images_at)
        chain.extend(ids)
        own = Request(
            id=name,
            params=params,
            chain=chain,
            output=self._output(name, ids, params.prompt_logprobs is not None),
            budget=self.budget(len(ids), params),
            speculative=speculative,
            priority=priority,
            prefill="full" if params.prompt_logprobs is not None else prefill,
            ends=self._ends(params),
        )
        tokens, matcher = Tokens(made, features), self.matcher(params)
        for index in range(params.n):
            self._live(own, tokens.fork(), matcher if matcher is None else matcher.fork(), index)
        own.lives[0].handed = handed
        return own

    def check(self, prompt: PromptInput, params: SamplingParams, images: Sequence[ImageSource]) -> int:
        """Tokens of a prompt. Raises InputError as `request`, and encodes no image."""
        check_ids(params, self.model.config.vocab_size)
        made, _, _ = read_prompt(self.model, prompt, images, lazy=True)
        self.budget(len(made), params)
        self.matcher(params)
        return len(made)

    def fork(self, parent: Live, name: str, params: SamplingParams) -> Request:
        """A request whose prompt is all that a completion has had so far."""
        if params.n != 1 or params.prompt_logprobs is not None:
            raise InputError("fork: n and prompt_logprobs are not legal; legal: one completion")
        check_ids(params, self.model.config.vocab_size)
        request, tokens = parent.request, parent.tokens.fork()
        ids = compact([*request.output.prompt_ids, *parent.completion.token_ids])
        own = Request(
            id=name,
            params=params,
            chain=request.chain,
            output=self._output(name, ids, False),
            budget=self.budget(len(ids), params),
            speculative=request.speculative,
            priority=request.priority,
            prefill=request.prefill,
            ends=self._ends(params),
        )
        self._live(own, tokens, self.matcher(params), 0)
        return own

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """A fresh one of the constraint; None without."""
        if params.constraint is None:
            return None
        if self._grammars is None:
            config = self.model.config
            self._grammars = Grammars(self.model.tokenizer, config.vocab_size, config.eos_token_id)
        return self._grammars.matcher(params.constraint)

    def _live(self, own: Request, tokens: Tokens, matcher: Matcher | None, index: int) -> None:
        sampler = Sampler(own.params, prompt=own.output.prompt_ids, ends=own.ends, matcher=matcher, index=index)
        Live(own, f"{own.id}/{index}", tokens, sampler, partial(Detokenizer, self.model.tokenizer, self._alone))

    def _output(self, name: str, ids: array[int] | memoryview, logprobs: bool) -> RequestOutput:
        return RequestOutput(
            request=name,
            prompt_ids=ids,
            completions=[],
            counts=Counts(prompt=len(ids)),
            times=Times(arrived=self._clock()),
            prompt_logprobs=[None] * len(ids) if logprobs else None,
        )

    def budget(self, prompt: int, params: SamplingParams) -> int:
        """New tokens at most, after a prompt of so many. Raises InputError where there is room for none."""
        return new_tokens(prompt, params, self.max_model_len)

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else {self.model.config.eos_token_id})

    def _check_handed(self, handed: Handed | None, tokens: int, params: SamplingParams) -> None:
        if handed is None:
            return
        if params.prompt_logprobs is not None:
            raise InputError("prompt_logprobs: not legal for a prompt that was computed elsewhere; legal: None")
        if handed.tokens != tokens:
            raise InputError(f"handed: {handed.tokens} tokens for a prompt of {tokens}; legal: the prompt's own")


def new_tokens(prompt: int, params: SamplingParams, limit: int) -> int:
    """Tokens that a prompt of so many may have. limit: of both together. Raises InputError where there is no room."""
    if prompt >= limit:
        raise InputError(f"prompt: {prompt} tokens do not fit the model's {limit} positions with a new token")
    return min(params.max_tokens, limit - prompt)


def check_ids(params: SamplingParams, vocabulary: int) -> None:
    """Token ids among parameters are the vocabulary's. Raises InputError."""
    for name, ids in (("stop_ids", params.stop_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if not 0 <= token < vocabulary:
                raise InputError(f"{name}: id {token} is outside the vocabulary; legal: 0..{vocabulary - 1}")
