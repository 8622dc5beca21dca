"""`LLM`: a model to call from Python, in batches or streaming, over one engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rorqual.engine.engine import Engine
from rorqual.engine.images import ImageSource
from rorqual.engine.output import Delta, RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput
from rorqual.engine.storing import StoreOptions
from rorqual.errors import InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.store.interface import PageStore

Prompts = PromptInput | Sequence[str | Tensor | Sequence[int]]


class LLM:
    """A loaded model behind an engine of its own.

    Args:
        model: a checkpoint folder, a loaded model, or None for the shipped one.
        store: where pages of global KV are kept beyond this process: a folder, `StoreOptions`, or an open store, which
            the caller closes. None for nowhere.
        speculative: propose tokens with the model's drafts; the text is the same without. False for a model that has
            none.
        numerics, kernels: of `rorqual.load`; not for a model that is loaded already.
        options: of `Engine`: memory, slots, prefill, replay, draft_tokens, ...

    Raises:
        InputError: an option that cannot be honoured.
        CheckpointError: a checkpoint that cannot be read.

        llm = LLM()
        llm.generate("The whale", SamplingParams(max_tokens=20))[0].text

    With a store, `close` it or leave it as a context: what is kept is then where the next process finds it. The end of
    the interpreter does so too.
    """

    def __init__(
        self,
        model: str | Path | Transformer | None = None,
        *,
        store: PageStore | StoreOptions | Path | str | None = None,
        speculative: bool = True,
        numerics: str | None = None,
        kernels: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, Transformer):
            for name, value in (("numerics", numerics), ("kernels", kernels)):
                if value is not None:
                    raise InputError(f"{name}: not legal with a loaded model; give it to rorqual.load")
            loaded = model
        else:
            loaded = load(
                None if model is None else Path(model), numerics=numerics or "fp32", kernels=kernels or "auto"
            )
        given = StoreOptions(folder=store) if isinstance(store, str | Path) else store
        opened = given.open(loaded) if isinstance(given, StoreOptions) else given
        self._finalizer: Callable[[], Any] = lambda: None
        if opened is not None and opened is not given:
            self._finalizer = weakref.finalize(self, opened.close)
        try:
            self.engine = Engine(loaded, store=opened, speculative=speculative, **options)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store that this one opened; calls after it go on without."""
        self._finalizer()

    @property
    def model(self) -> Transformer:
        return self.engine.model

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Sequence[Sequence[ImageSource]] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The outputs of one or more prompts, in their order.

        Args:
            prompts: a text, its token ids, or a list of such.
            params: for all of them, or one each.
            images: a list for each prompt.
            options: of `Engine.submit`: priority, salt, speculative, prefill.

        Raises:
            InputError: a prompt or parameter that is not legal; nothing of the batch runs.
        """
        names = self._submit(prompts, params, images, options)
        outputs = [self.engine.output(name) for name in names]
        try:
            while not all(output.finished for output in outputs):
                self.engine.step()
        finally:
            self._abort(names)
        return outputs

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Sequence[Sequence[ImageSource]] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Delta]]:
        """(which prompt, what it got) as it comes. Whoever stops reading ends what is left.

        Prompts and parameters are checked when this is called, as by `generate`.
        """
        names = self._submit(prompts, params, images, options)
        outputs = [self.engine.output(name) for name in names]
        return self._deltas({name: at for at, name in enumerate(names)}, outputs)

    def _deltas(self, places: dict[str, int], outputs: list[RequestOutput]) -> Iterator[tuple[int, Delta]]:
        try:
            while not all(output.finished for output in outputs):
                for delta in self.engine.step():
                    if delta.request in places:
                        yield places[delta.request], delta
        finally:
            self._abort(list(places))

    def _submit(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        images: Sequence[Sequence[ImageSource]] | None,
        options: dict[str, Any],
    ) -> list[str]:
        asked, names = as_asked(prompts, params, images), list[str]()
        try:
            for prompt, own, shown in asked:
                names.append(self.engine.submit(prompt, own, images=shown, **options))
        except BaseException:
            self._abort(names)
            raise
        return names

    def _abort(self, names: list[str]) -> None:
        for name in names:
            if name in self.engine:
                self.engine.abort(name)


def as_asked(
    prompts: Prompts,
    params: SamplingParams | Sequence[SamplingParams] | None,
    images: Sequence[Sequence[ImageSource]] | None,
) -> list[tuple[PromptInput, SamplingParams | None, Sequence[ImageSource]]]:
    """Each prompt with its parameters and its images. Raises InputError where their numbers differ."""
    given = as_prompts(prompts)
    each = [params] * len(given) if params is None or isinstance(params, SamplingParams) else list(params)
    pictures: list[Sequence[ImageSource]] = [()] * len(given) if images is None else list(images)
    for name, found in (("params", each), ("images", pictures)):
        if len(found) != len(given):
            raise InputError(f"{name}: {len(found)} for {len(given)} prompts; legal: one for each, or none")
    return list(zip(given, each, pictures, strict=True))


def as_prompts(prompts: Prompts) -> list[PromptInput]:
    """One or more prompts as a list.

    >>> as_prompts("a"), as_prompts([1, 2]), as_prompts(["a", [1, 2]])
    (['a'], [[1, 2]], ['a', [1, 2]])

    Raises:
        InputError: neither texts nor ids.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor):
        return [prompts] if prompts.dim() == 1 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise InputError(f"prompts: {type(prompts).__name__} is not legal; legal: a text, token ids, or a list of them")
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
