"""The decode side: a parcel becomes a request of an engine, which then runs it as any other.

What does not come, comes late, damaged or from another model is no failure: this side has all weights, and computes the
prompt itself, unless it is told to say so instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rorqual.disagg.packing import unpack
from rorqual.disagg.parcel import Parcel
from rorqual.disagg.transport import Ticket, Transport
from rorqual.engine.engine import Engine
from rorqual.engine.identity import fingerprint
from rorqual.engine.images import ImageSource, read_images
from rorqual.engine.params import SamplingParams
from rorqual.engine.prompts import PromptInput, read_prompt
from rorqual.errors import HandoverError
from rorqual.log import logger

PULL_S = 10.0
"""Seconds that a pull may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that the engine has now. handed: with the state that came; if not, `error` says what was wrong."""

    request: str
    handed: bool
    error: str | None = None


class DecodeWorker:
    """Receives for an engine.

    Args:
        engine: with a whole model. One thread calls it and this.
        recompute: compute a prompt here whose hand-over failed; False raises instead.
        pull_s: `PULL_S`.
    """

    def __init__(self, engine: Engine, *, recompute: bool = True, pull_s: float = PULL_S) -> None:
        self.engine, self.recompute, self.pull_s = engine, recompute, pull_s
        self.fingerprint, self._whole = engine.fingerprint, fingerprint(engine.model, decoder=True)

    def fetch(
        self,
        transport: Transport,
        ticket: Ticket,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        images: Sequence[ImageSource] = (),
        **options: Any,
    ) -> Arrival:
        """Pull a parcel and let its request wait in the engine; without it, the request computes its prompt.

        The sender is told that it may let go, whatever came.

        Args:
            transport: the ticket's.
            prompt, params, images, options: of `Engine.submit`, as the request was made.

        Raises:
            HandoverError: only with `recompute` off.
            InputError, CapacityError: as `Engine.submit`.
        """
        try:
            try:
                data = transport.pull(ticket, self.pull_s)
            finally:
                transport.done(ticket)
            name = self.receive(data, params, prompt=prompt, images=images, **options)
        except HandoverError as error:
            return self.without(error, prompt, params, images=images, **options)
        return Arrival(request=name, handed=True)

    def without(
        self,
        error: HandoverError,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        images: Sequence[ImageSource] = (),
        **options: Any,
    ) -> Arrival:
        """A request whose hand-over failed: computed here, or the error is raised."""
        if not self.recompute:
            raise error
        logger.warning("%s; the prompt is computed again", error)
        name = self.engine.submit(prompt, params, images=images, **options)
        return Arrival(request=name, handed=False, error=str(error))

    def receive(
        self,
        data: bytes | bytearray | memoryview,
        params: SamplingParams | None = None,
        *,
        prompt: PromptInput | None = None,
        images: Sequence[ImageSource] = (),
        **options: Any,
    ) -> str:
        """Let the request of a message that came wait in the engine; its id, which is not the sender's unless given.

        Args:
            prompt: what it must be of; None takes the parcel's word for it.
            images: the prompt's, in order: needed if the prompt has to be computed again.

        Raises:
            HandoverError: it is damaged, of another model or another prompt; nothing is queued.
            InputError, CapacityError: as `Engine.submit`.
        """
        parcel = Parcel.from_bytes(data)
        header, model = parcel.header, self.engine.model
        whose = f"hand-over of {header.request!r}"
        if header.fingerprint != (self._whole if header.mode == "rings" else self.fingerprint):
            raise HandoverError(f"{whose}: it is of another model, or of other numerics")
        if header.page_tokens != model.layout.page_tokens:
            raise HandoverError(f"{whose}: pages of {header.page_tokens} tokens; legal: {model.layout.page_tokens}")
        pictures = read_images(model, images)
        made, spans, _ = read_prompt(model, list(header.ids) if prompt is None else prompt, pictures, lazy=True)
        if made.ids.tolist() != list(header.ids) or tuple(spans) != header.images:
            raise HandoverError(f"{whose}: it is of another prompt")
        handed = unpack(parcel, model)
        return self.engine.submit(made.ids, params, images=pictures, handed=handed, **options)
