"""A checkpoint end to end, kernels against plain torch: `rorqual bench model`.

Both contestants load the same files, run the same ids, and take turns; each keeps a cache of its own. The baseline is
`rorqual.bench.baseline`: its weights are fp32 tensors before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from rorqual.bench import first_token
from rorqual.bench.baseline import load_baseline
from rorqual.bench.checkpoints import active_bytes, check_positions, checkpoint, prefill_flops, random_ids
from rorqual.bench.profile import STEPS, WARM, profile_row
from rorqual.bench.report import Bar, JsonRow, TimeRow
from rorqual.bench.roofline import Work
from rorqual.bench.timing import Sample, elapsed, undisturbed
from rorqual.config import ModelConfig
from rorqual.engine.sequence import Prompt, new_cache
from rorqual.engine.sequence import Sequence as Running
from rorqual.inventory.parameters import active_parameters
from rorqual.model.load import load
from rorqual.model.numerics import MODES
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import Progress

REPEATS = 3
KINDS = ("plain", "fast")
TURN = 8
"""Tokens that one contestant decodes before the other does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Of one row: its ratio, the fast share of the roofline, and the share below which the baseline is not fair."""

    ratio: Bar | None = None
    share: Bar | None = None
    baseline: Bar | None = None


BARS: dict[str, dict[str, Bars]] = {
    "mid": {
        "decode": Bars(ratio=Bar(at_least=7.5), share=Bar(at_least=0.35)),
        "prefill full": Bars(ratio=Bar(at_least=5), share=Bar(at_least=0.40), baseline=Bar(at_least=0.07)),
        "ced/full": Bars(ratio=Bar(at_most=0.55)),
    },
    "real-pair": {
        "decode": Bars(ratio=Bar(at_least=3), share=Bar(at_least=0.45), baseline=Bar(at_least=0.60)),
        "prefill full": Bars(ratio=Bar(at_least=1.5), share=Bar(at_least=0.55)),
    },
}
"""By random preset and row, fp32 numerics. Other checkpoints, and native numerics, are measured and not judged."""

NOTES = (
    "plain: torch on weights expanded to fp32 at load, attention in batched products; a baseline below its own bar "
    "(baseline_roofline) is not fair, and no ratio over it counts",
    "decode: seconds a token, one sample a token, eight tokens in turn plain then fast, the first of which does not "
    "count; the bars are those of fp32",
    "prefill: seconds a prompt, prompts in turn plain then fast; both modes run in the same chunks",
    "roofline: products of weights only; attention, index scores, norms and mixing are not counted as needed work; "
    "packed weights for fast, the same weights in fp32 for plain",
    "ced/full: both with the fast ops; layer_tokens is rows x layers run, the work that ced saves",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one run of the model benchmark."""

    context: int = 2048
    decoded: int = 24
    chunk: int = 512
    long: int = 8192
    profiled: int = 0
    """Decode steps that are clocked op by op, after those that are timed."""

    @property
    def appended(self) -> int:
        """Positions of the prompt and of all decode steps."""
        return self.context + self.decoded + self.profiled

    def within(self, positions: int) -> Lengths:
        """The long prompt cut to what a model can hold."""
        return replace(self, long=min(self.long, positions))


FULL = Lengths()
QUICK = Lengths(context=24, decoded=2, chunk=12, long=40)


def run_model(
    *,
    model: Path | None = None,
    random: str | None = None,
    repeats: int = REPEATS,
    quick: bool = False,
    profile: bool = False,
    progress: Progress | None = None,
) -> list[TimeRow | JsonRow]:
    """Rows of decode, prefill and ced/full: of a checkpoint, a random one of a preset, or the shipped model.

    profile: also where a decode step goes, a row of either numerics. The shipped model also has rows of
    `rorqual.bench.first_token`.

    Raises:
        InputError, CheckpointError, ConfigError: a checkpoint that cannot be loaded or has too few positions.
    """
    lengths, shipped = (QUICK if quick else FULL), model is None and random is None
    done, steps = 0, 3 + first_token.STEPS * shipped

    def stepped() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, steps)

    if profile:
        lengths = replace(lengths, profiled=WARM + STEPS)
    rows: list[TimeRow | JsonRow] = []
    with checkpoint(model, random) as folder:
        for part in _parts(folder, lengths, repeats):
            rows += [judged(row, random) if isinstance(row, TimeRow) else row for row in part]
            stepped()
        if shipped:
            rows += first_token.shipped_rows(folder, repeats, quick, stepped)
    return rows


def judged(row: TimeRow, preset: str | None) -> TimeRow:
    """The row with the bars of its preset, if it has any."""
    bars = BARS.get(preset or "", {}).get(row.name)
    if bars is None or row.extra["numerics"] != "fp32":
        return row
    return replace(row, bar=bars.ratio, share_bar=bars.share, baseline_bar=bars.baseline)


def _parts(folder: Path, lengths: Lengths, repeats: int) -> Iterator[Sequence[TimeRow | JsonRow]]:
    config = ModelConfig.from_json(folder)
    check_positions(config, lengths.appended)
    lengths = lengths.within(config.max_position_embeddings)
    for numerics in MODES:
        yield twins(contestants(folder, numerics), lengths, repeats)
    yield [ced_against_full(load(folder, kernels="fast"), lengths, repeats)]


def contestants(folder: Path, numerics: str) -> dict[str, Transformer]:
    """The baseline and the model as it is served, by `KINDS`."""
    return {"plain": load_baseline(folder, numerics), "fast": load(folder, numerics=numerics, kernels="fast")}


def twins(models: dict[str, Transformer], lengths: Lengths, repeats: int) -> list[TimeRow | JsonRow]:
    """Prefill in both modes and decode after the full one: the same model twice; its profile, if there is to be one."""
    config = models["plain"].config
    numerics = models["plain"].numerics.name
    ids = random_ids(config, lengths.appended, seed=1)
    prompt = Prompt(ids=ids[: lengths.context])
    for model in models.values():
        warm_up(model, ids, lengths.chunk)
    seconds: dict[tuple[str, str], list[float]] = {}
    running: dict[str, Running] = {}
    with undisturbed():
        for _, mode, (kind, model) in product(range(repeats), ("ced", "full"), models.items()):
            running[kind] = Running(model, new_cache(model, len(ids)))
            taken = timed_prefill(running[kind], prompt, mode, lengths.chunk)
            seconds.setdefault((mode, kind), []).append(taken)
        decoded, profiled = ids[lengths.context :].split((lengths.decoded, lengths.profiled))
        rows: list[TimeRow | JsonRow] = [decode_row(running, decoded, numerics)]
    for mode in ("ced", "full"):
        flops = prefill_flops(config, lengths.context, mode)
        work = Work(bytes=0, flops=flops, formula=f"flops = {flops}: 2 x the weights each token is multiplied with")
        rows.append(
            TimeRow(
                name=f"prefill {mode}",
                shape=f"{lengths.context} tokens, chunk {lengths.chunk}",
                times={kind: Sample.of(seconds[mode, kind]) for kind in KINDS},
                work=work,
                baseline_work=work,
                extra={"numerics": numerics},
            )
        )
    if lengths.profiled:
        rows.append(profile_row(running, profiled, "decode"))
    return rows


def decode_row(running: dict[str, Running], ids: Tensor, numerics: str) -> TimeRow:
    """Forced tokens after the prompt, one a step."""
    config = running["plain"].model.config
    context = running["plain"].length
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for tokens, kind in product(ids.split(TURN), KINDS):
        taken = [elapsed(partial(running[kind].append, token[None])) for token in tokens]
        # The first of a turn finds the other's weights in the caches and the other's threads still waiting for work.
        seconds[kind] += taken[1:] or taken
    moved, active = active_bytes(config), active_parameters(config).decode_with_head
    return TimeRow(
        name="decode",
        shape=f"1 token at {context} tokens of context",
        times={kind: Sample.of(taken) for kind, taken in seconds.items()},
        work=Work(
            bytes=moved,
            flops=2 * active,
            formula=f"bytes = {moved} of packed weights met, flops = 2 x {active} of them",
        ),
        baseline_work=Work(
            bytes=4 * active, flops=2 * active, formula=f"bytes = 4 x {active} weights met, flops = 2 x {active}"
        ),
        extra={"numerics": numerics},
    )


def ced_against_full(model: Transformer, lengths: Lengths, repeats: int) -> TimeRow:
    """A long prompt in both prefill modes, in turn."""
    prompt = Prompt(ids=random_ids(model.config, lengths.long, seed=2))
    warm_up(model, prompt.ids, lengths.chunk)
    seconds: dict[str, list[float]] = {"ced": [], "full": []}
    layer_tokens = {}
    with undisturbed():
        for _, mode in product(range(repeats), seconds):
            running = Running(model, new_cache(model, lengths.long))
            seconds[mode].append(timed_prefill(running, prompt, mode, lengths.chunk))
            layer_tokens[mode] = running.layer_tokens
    return TimeRow(
        name="ced/full",
        shape=f"{lengths.long} tokens, chunk {lengths.chunk}, fast",
        times={mode: Sample.of(taken) for mode, taken in seconds.items()},
        ratio_of=("ced", "full"),
        extra={"numerics": model.numerics.name, "layer_tokens": layer_tokens},
    )


def timed_prefill(running: Running, prompt: Prompt, mode: str, chunk: int) -> float:
    """Seconds of one prefill."""
    return elapsed(lambda: running.prefill(prompt, mode=mode, chunk=chunk))


def warm_up(model: Transformer, ids: Tensor, chunk: int) -> None:
    """Compile what runs, read the weights once, and let allocators and threads settle: one chunk and one token."""
    model.backend.warm()
    for mode in ("ced", "full"):
        running = Running(model, new_cache(model, chunk + 1))
        running.prefill(Prompt(ids=ids[:chunk]), mode=mode)
        running.append(torch.tensor([int(ids[0])]))
