"""What cache formats, CED, prefix hits, the candidate pool and quantised weights cost in loss, and what drafts gain.

One set of weights is loaded in several ways; each reads the same held-out windows, and every difference is taken prompt
by prompt. Losses are teacher-forced nats a token of the tokens after prompts of each length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rorqual.analysis.drafts import follow, plain_greedy, speculate
from rorqual.analysis.fingerprint import fingerprint
from rorqual.analysis.quality_pass import window_losses
from rorqual.analysis.quality_report import (
    ALL,
    JsonRow,
    difference,
    draft_row,
    losses_by_variant,
    merged,
    repeated,
    variant_row,
)
from rorqual.analysis.quality_store import Store
from rorqual.analysis.quality_variants import Loading, Variant, comparisons, hit_tokens, variants
from rorqual.analysis.quality_windows import Document, Windows, cut_windows
from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.layout import PAGE_TOKENS
from rorqual.model.load import load
from rorqual.model.numerics import Numerics
from rorqual.model.transformer import Transformer

Progress = Callable[[float, float], None]
"""Called with (seconds passed, seconds expected in all)."""

OWN_TEXT = "drafts on its own greedy text"
GIVEN_TEXT = "drafts on held-out text"
DRAFT_STEP_TOKENS = 100
"""A verification with its proposal takes about as long as this many tokens of a prefill: for the time left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """lengths: tokens of the prompts, the begin token included. prompts: windows, each with a prompt of every length.
    drafts: prompts whose continuation is drafted, `draft_tokens` each, after the shortest length. scored: tokens whose
    loss is taken after a prompt."""

    lengths: tuple[int, ...] = (512, 2048, 3968)
    scored: int = 128
    prompts: int = 100
    drafts: int = 24
    draft_tokens: int = 128
    chunk: int = 512
    numerics: str = "fp32"
    kernels: str = "auto"
    page_tokens: int = PAGE_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InputError naming the option and the legal values."""
        if not self.lengths or any(b <= a for a, b in zip((0, *self.lengths), self.lengths, strict=False)):
            raise InputError(f"lengths: {list(self.lengths)} is not legal; legal: ascending counts, 1 or more")
        # One prompt has no standard error.
        for name, least in (("prompts", 2), ("drafts", 0), ("draft_tokens", 1), ("chunk", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}: {getattr(self, name)} is not legal; legal: at least {least}")

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.lengths[-1] + self.scored


@dataclass(slots=True, kw_only=True)
class Job:
    """One pass over one window. cost: in tokens through every layer, for the time left."""

    loading: Loading
    window: int
    variants: list[Variant] = field(default_factory=list)
    drafts: bool = False
    cost: float


def run_quality(
    folder: Path,
    documents: Sequence[Document],
    settings: Settings,
    out: Path,
    *,
    plain: Path | None = None,
    progress: Progress = lambda _passed, _expected: None,
) -> JsonRow:
    """The study of one checkpoint, ready for JSON. What is measured is kept in `out`, window by window: after a stop
    the same call goes on.

    Args:
        folder: checkpoint; plain: the same model exported unquantised, for the cost of the weights' formats.
        documents: held-out texts in the model's ids.

    Raises:
        InputError: documents too short, lengths past the model's positions, `out` of another run.
    """
    Numerics(name=settings.numerics)  # refused before anything is written
    config = ModelConfig.from_json(folder)
    if settings.window > config.max_position_embeddings:
        raise InputError(
            f"lengths: {settings.lengths[-1]:,} tokens and the {settings.scored} after them are past the model's "
            f"{config.max_position_embeddings:,} positions"
        )
    windows = cut_windows(
        documents,
        settings.window,
        settings.prompts,
        scored=settings.scored,
        bos=config.bos_token_id,
        seed=settings.seed,
    )
    study = Study(folder, plain, config, windows, settings, out)
    study.measure(progress)
    return study.document()


class Study:
    """One run: what is to be measured, what has been."""

    def __init__(
        self, folder: Path, plain: Path | None, config: ModelConfig, windows: Windows, settings: Settings, out: Path
    ) -> None:
        self.folder, self.plain, self.config, self.windows, self.settings = folder, plain, config, windows, settings
        self.variants = variants(config, plain=plain is not None)
        self.identity = {
            "model": fingerprint(folder, "model"),
            "plain": None if plain is None else fingerprint(plain, "plain"),
            "data": windows.fingerprint(),
            "lengths": settings.lengths,
            "scored": settings.scored,
            "draft_tokens": settings.draft_tokens,
            "chunk": settings.chunk,
            "numerics": settings.numerics,
            "kernels": settings.kernels,
            "page_tokens": settings.page_tokens,
        }
        self.store = Store(out, self.identity)

    def measure(self, progress: Progress) -> None:
        """Everything that the store does not hold yet."""
        jobs = list(self._jobs())
        total, done, start = sum(job.cost for job in jobs), 0.0, time.monotonic()
        loaded: tuple[Loading, Transformer] | None = None
        for job in jobs:
            if loaded is None or loaded[0] != job.loading:
                loaded = job.loading, self._load(job.loading)
            began = time.monotonic()
            rows = self._draft(loaded[1], job.window) if job.drafts else self._losses(loaded[1], job)
            share = (time.monotonic() - began) / len(rows)
            self.store.add({key: {**row, "seconds": share} for key, row in rows.items()})
            done += job.cost
            passed = time.monotonic() - start
            progress(passed, passed / done * total)

    def _jobs(self) -> Iterator[Job]:
        """Passes still to do, those of one loading together; the drafts follow the released way's."""
        for loading in dict.fromkeys(v.loading for v in self.variants):
            for window in range(len(self.windows)):
                wanted = [v for v in self.variants if v.loading == loading and (v.name, window) not in self.store]
                if wanted:
                    yield Job(loading=loading, window=window, variants=wanted, cost=self._cost(wanted))
            if loading == Loading() and self.config.num_nextn_predict_layers:
                cost = 2.0 * self.settings.draft_tokens * DRAFT_STEP_TOKENS
                for window in range(min(self.settings.drafts, len(self.windows))):
                    if (OWN_TEXT, window) not in self.store:
                        yield Job(loading=loading, window=window, drafts=True, cost=cost)

    def _cost(self, wanted: Sequence[Variant]) -> float:
        """Tokens through every layer, about."""
        lengths, window, scored = self.settings.lengths, self.config.sliding_window, self.settings.scored
        encoder = self.config.decoder_start / self.config.num_hidden_layers
        full = any(v.prefill == "full" for v in wanted)
        cost = lengths[-1] * (1 if full else encoder) + len(lengths) * (window + scored * (2 if full else 1))
        for variant in wanted:
            for tokens, end in zip(lengths, self._hits(variant) or (), strict=False):
                cost += 0 if end is None else (tokens - end + window) * encoder + window + scored
        return cost

    def _hits(self, variant: Variant) -> list[int | None] | None:
        """Tokens of its hit before a prompt of each length."""
        if variant.hit is None:
            return None
        window, page = self.config.sliding_window, self.settings.page_tokens
        return [hit_tokens(variant.hit, tokens, window, page) for tokens in self.settings.lengths]

    def _load(self, loading: Loading) -> Transformer:
        folder = self.plain if loading.plain else self.folder
        assert folder is not None
        settings, own = self.settings, ModelConfig.from_json(folder)
        model = load(
            folder,
            numerics=settings.numerics,
            kernels=settings.kernels,
            page_tokens=settings.page_tokens,
            config=loading.config(own),
        )
        # Twins until the kernels are compiled, as `auto` has it, would round the first windows otherwise.
        model.backend.warm()
        return model

    def _losses(self, model: Transformer, job: Job) -> dict[tuple[str, int], JsonRow]:
        settings = self.settings
        found = window_losses(
            model,
            self.windows.ids[job.window],
            settings.lengths,
            job.variants,
            scored=settings.scored,
            chunk=settings.chunk,
        )
        return {(name, job.window): {"loss": losses} for name, losses in found.items()}

    def _draft(self, model: Transformer, window: int) -> dict[tuple[str, int], JsonRow]:
        ids, tokens, count = self.windows.ids[window], self.settings.lengths[0], self.settings.draft_tokens
        prompt, chunk = ids[:tokens], self.settings.chunk
        own = speculate(model, prompt, count, chunk=chunk)
        given = follow(model, prompt, ids[tokens : tokens + count], chunk=chunk)
        row = {"tokens": len(own.ids), "repeated": repeated(own.ids)}
        if window == 0:
            row["as_plain_decoding"] = own.ids == plain_greedy(model, prompt, count, chunk=chunk)
        return {(OWN_TEXT, window): {**asdict(own.tally), **row}, (GIVEN_TEXT, window): asdict(given)}

    def document(self) -> JsonRow:
        """What the store holds, as means, differences and verdicts."""
        settings, windows = self.settings, self.windows
        losses = losses_by_variant(self.variants, {v.name: self.store.of(v.name) for v in self.variants})
        return {
            "what": "quality",
            "model": {"name": self.folder.name, "fingerprint": self.identity["model"]},
            "plain": None if self.plain is None else {"name": self.plain.name, "fingerprint": self.identity["plain"]},
            "seed": settings.seed,
            "lengths": list(settings.lengths),
            "scored": settings.scored,
            "chunk": settings.chunk,
            "numerics": settings.numerics,
            "kernels": settings.kernels,
            "prompts": {str(n): len(windows) for n in settings.lengths} | {ALL: len(windows) * len(settings.lengths)},
            "windows": {
                "count": len(windows),
                "tokens": settings.window,
                "stride": windows.stride,
                "fingerprint": windows.fingerprint(),
                "documents": sorted({name for name, _ in windows.sources}),
            },
            "seconds": sum(row["seconds"] for what in self._kinds() for row in self.store.of(what).values()),
            "variants": [variant_row(v, losses[v.name], settings.lengths, self._hits(v)) for v in self.variants],
            "differences": [difference(losses, one, settings.lengths) for one in comparisons(self.variants)],
            "drafts": self._drafts(),
            "notes": self._notes(),
        }

    def _kinds(self) -> list[str]:
        return [*(v.name for v in self.variants), OWN_TEXT, GIVEN_TEXT]

    def _drafts(self) -> list[JsonRow]:
        own, given = self.store.of(OWN_TEXT), self.store.of(GIVEN_TEXT)
        if not own:
            return []
        extra = {
            "prompts": len(own),
            "tokens": sum(row["tokens"] for row in own.values()),
            "repeated": sum(row["repeated"] for row in own.values()) / len(own),
        }
        return [
            draft_row(OWN_TEXT, merged(own), bar=True, as_plain=own[0]["as_plain_decoding"], extra=extra),
            draft_row(GIVEN_TEXT, merged(given), bar=False, extra={"prompts": len(given)}),
        ]

    def _notes(self) -> list[str]:
        settings, windows = self.settings, self.windows
        found = [
            f"{v.name}: {', '.join('none' if end is None else f'{end:,}' for end in hits)} tokens, {v.replay} replay."
            for v in self.variants
            if (hits := self._hits(v)) is not None
        ]
        if len(windows) < settings.prompts:
            found.append(f"The texts hold {len(windows)} windows of the {settings.prompts} asked for.")
        if windows.stride < settings.window - 1:
            found.append(
                f"Windows begin {windows.stride:,} tokens apart and overlap; what is scored after prompts of one length"
                " does not. Standard errors, taken as if windows were independent, are somewhat too small."
            )
        if windows.short:
            found.append(f"{windows.short} documents are shorter than a window of {settings.window:,} tokens.")
        if self.plain is None:
            found.append("Quantised weights are not compared: no plain export was given (--plain DIR).")
        if not self.config.num_nextn_predict_layers:
            found.append("No drafts: the model has no draft layers.")
        elif drafts := self._drafts():
            found.append(
                f"{drafts[0]['repeated']:.0%} of the 8-token runs of the model's own greedy text stand in it already; "
                "such circles flatter a draft, held-out text does not."
            )
        return found
