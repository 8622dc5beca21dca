"""A checkpoint end to end, kernels against plain twins: `rorqual bench model`.

Both contestants load the same files, run the same ids, and take turns; each keeps a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from rorqual.bench.checkpoints import active_bytes, check_positions, checkpoint, prefill_flops, random_ids
from rorqual.bench.report import Bar, TimeRow
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
BAR_PRESET = "mid"
"""The checkpoint that the bars are set for: twelve layers, random. Others are measured and not judged."""
DECODE_BAR, PREFILL_BAR, CED_BAR = Bar(at_least=3), Bar(at_least=2), Bar(at_most=0.58)

NOTES = (
    "decode: seconds a token, one sample a token, tokens in turn plain then fast; the bars are those of fp32",
    "prefill: seconds a prompt, prompts in turn plain then fast; both modes run in the same chunks",
    "roofline: products of weights only; attention, index scores, norms and mixing are not counted as needed work",
    "ced/full: both with the fast ops; layer_tokens is rows x layers run, the work that ced saves",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one run of the model benchmark."""

    context: int = 2048
    decoded: int = 24
    chunk: int = 512
    long: int = 8192

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
    progress: Progress | None = None,
) -> list[TimeRow]:
    """Rows of decode, prefill and ced/full: of a checkpoint, a random one of a preset, or the shipped model.

    Raises:
        InputError, CheckpointError, ConfigError: a checkpoint that cannot be loaded or has too few positions.
    """
    lengths, steps = (QUICK if quick else FULL), 3
    rows: list[TimeRow] = []
    with checkpoint(model, random) as folder:
        for done, part in enumerate(_parts(folder, lengths, repeats)):
            rows += part if random == BAR_PRESET else [replace(row, bar=None) for row in part]
            if progress is not None:
                progress(done + 1, steps)
    return rows


def _parts(folder: Path, lengths: Lengths, repeats: int) -> Iterator[list[TimeRow]]:
    config = ModelConfig.from_json(folder)
    check_positions(config, lengths.context + lengths.decoded)
    lengths = lengths.within(config.max_position_embeddings)
    for numerics in MODES:
        models = {kind: load(folder, numerics=numerics, kernels=kind) for kind in KINDS}
        yield twins(models, lengths, repeats)
    yield [ced_against_full(load(folder, kernels="fast"), lengths, repeats)]


def twins(models: dict[str, Transformer], lengths: Lengths, repeats: int) -> list[TimeRow]:
    """Prefill in both modes and decode after the full one, of models that differ in their kernels alone."""
    config = models["plain"].config
    numerics = models["plain"].numerics.name
    ids = random_ids(config, lengths.context + lengths.decoded, seed=1)
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
        rows = [decode_row(running, ids[lengths.context :], numerics)]
    for mode in ("ced", "full"):
        flops = prefill_flops(config, lengths.context, mode)
        rows.append(
            TimeRow(
                name=f"prefill {mode}",
                shape=f"{lengths.context} tokens, chunk {lengths.chunk}",
                times={kind: Sample.of(seconds[mode, kind]) for kind in KINDS},
                work=Work(
                    bytes=0, flops=flops, formula=f"flops = {flops}: 2 x the weights each token is multiplied with"
                ),
                bar=PREFILL_BAR if numerics == "fp32" else None,
                extra={"numerics": numerics},
            )
        )
    return rows


def decode_row(running: dict[str, Running], ids: Tensor, numerics: str) -> TimeRow:
    """Forced tokens after the prompt, one a step."""
    config = running["plain"].model.config
    context = running["plain"].length
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for token, kind in product(ids, KINDS):
        seconds[kind].append(elapsed(partial(running[kind].append, token[None])))
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
        bar=DECODE_BAR if numerics == "fp32" else None,
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
        bar=CED_BAR,
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
