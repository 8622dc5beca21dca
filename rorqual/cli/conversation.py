"""A conversation over one engine, kept as the token ids that were fed and said.

    prompt of a turn = all turns before it, closed + <｜User｜>text + <｜Assistant｜></think>

So each prompt begins with the last one and its reply, token by token: nothing is tokenised again, positions stay what
they were, and the pages of what came before are hits. A reply is closed by exactly one eos, whether the model said it
or was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rorqual.engine.engine import Engine
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import checked_tokenizer
from rorqual.errors import CapacityError, InputError
from rorqual.training.data.chat import chat_ids
from rorqual.training.data.documents import Turn
from rorqual.training.data.tokens import EOS, token_id


class Conversation:
    """Turns, one at a time.

    Args:
        engine: nobody else steps it.
        params: of every reply; reply number n, from 0, has the seed `params.seed + n`.
        system: text of a system turn in front; empty for none.
        stepped: called after each step.

    Raises:
        InputError: a model without a tokenizer, or without the markers of the chat encoding.
    """

    def __init__(
        self, engine: Engine, params: SamplingParams, system: str = "", stepped: Callable[[], None] = lambda: None
    ) -> None:
        self.engine, self.params, self._stepped = engine, params, stepped
        self.tokenizer = checked_tokenizer(engine.model, system)
        self._head = [Turn("system", system)] if system else []
        chat_ids(self.tokenizer, [*self._head, Turn("user", "")], reply=True)  # all markers are there
        self._eos = token_id(self.tokenizer, EOS)
        self._replies = 0
        self._stop = False
        self.clear()

    @property
    def limit(self) -> int:
        """Tokens that a turn may have, with all before it and its reply."""
        return min(self.engine.max_model_len, self.engine.plan.pages * self.engine.plan.page_tokens)

    def clear(self) -> None:
        """Forget all turns but the system's. What the cache holds stays, for who says the same again."""
        self.ids: list[int] = chat_ids(self.tokenizer, self._head)
        """Of the closed turns."""
        self.last: RequestOutput | None = None
        """The last reply, finished or not, with what it cost."""

    def ask(self, text: str) -> Iterator[str]:
        """Take a user's turn; the reply in pieces. It joins the history when it has ended, however it ends.

        Raises:
            InputError: a text that is not valid.
            CapacityError: it does not fit; the history is as before.
        """
        checked_tokenizer(self.engine.model, text)
        opened = chat_ids(self.tokenizer, [Turn("user", text)], reply=True)
        return self._say([*self.ids, *opened[1:]])  # without its bos

    def again(self) -> Iterator[str]:
        """Another reply to the last turn in the place of the one it got. The prompt finds its own pages.

        Raises:
            InputError: there is none.
        """
        if self.last is None:
            raise InputError("/regenerate: there is no reply yet")
        return self._say(self.last.prompt_token_ids)

    def stop(self) -> None:
        """End the reply that is being said after the step that runs now; what was said stays."""
        self._stop = True

    def _say(self, prompt: list[int]) -> Iterator[str]:
        self._stop = False
        room = self.limit - len(prompt)
        if room < 1:
            raise CapacityError(
                f"context: {len(prompt):,} tokens with this turn leave no room for a reply; the limit is "
                f"{self.limit:,} tokens, and the history of {len(self.ids):,} is kept; /clear begins anew"
            )
        seed = None if self.params.seed is None else (self.params.seed + self._replies) % 2**63
        params = replace(self.params, max_tokens=min(self.params.max_tokens, room), seed=seed)
        request = self.engine.submit(prompt, params)
        self.last = self.engine.output(request)
        self._replies += 1
        return self._pieces(request, self.last)

    def _pieces(self, request: str, output: RequestOutput) -> Iterator[str]:
        try:
            while not output.finished and not self._stop:
                for delta in self.engine.step():
                    yield delta.text
                self._stepped()
        except GeneratorExit:  # the reader has had enough
            self._close(request, output)
            raise
        self._close(request, output)

    def _close(self, request: str, output: RequestOutput) -> None:
        if request in self.engine:
            self.engine.abort(request)
        if output.finish_reason == "error":
            return
        said = list(output.token_ids)
        if output.finish_reason == "stop" and isinstance(output.completions[0].stopped_by, int):
            said.pop()  # the token that ended it
        self.ids = [*output.prompt_token_ids, *said, self._eos]
