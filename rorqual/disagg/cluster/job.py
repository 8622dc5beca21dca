"""What travels between a front and its workers. Plain values: any of it may arrive twice, late, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.engine.output import Counts, Delta, TokenLogprob
from rorqual.engine.params import SamplingParams
from rorqual.engine.stats import EngineStats
from rorqual.model.vision.image import ImageInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a request. name: of the run; a second run of the same request has another.

    ids: the prompt, image spans and all. params: with a seed where anything is drawn, so that every run says the same.
    split: its prefill is somebody else's.
    """

    name: str
    ids: tuple[int, ...]
    params: SamplingParams
    images: tuple[ImageInput, ...] = ()
    salt: str = ""
    priority: int = 0
    speculative: bool | None = None
    prefill: str | None = None
    split: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What never changes while a worker's process lives. incarnation: of the process; a restart has another.

    config: its fingerprint. fingerprint, page_tokens, window: what page keys are made with. drafts: it can speculate.
    resident: bytes of the process when it was ready. node: the address of its machine.
    """

    name: str
    role: str
    incarnation: str
    pid: int
    node: str
    config: str
    fingerprint: str
    page_tokens: int
    window: int
    slots: int
    pages: int
    max_model_len: int
    drafts: bool
    resident: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A worker's answer to keys. held: leading ones whose pages it has. load: requests that it has."""

    held: int
    load: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one run has come to since the last report. counts: so far."""

    name: str
    deltas: tuple[Delta, ...]
    counts: Counts
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bulletin:
    """What a worker has to say to one front. live: runs of that front that go on there. stats: now and then."""

    incarnation: str
    reports: tuple[Report, ...]
    live: frozenset[str]
    stats: EngineStats | None
