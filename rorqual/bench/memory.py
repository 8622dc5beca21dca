"""What a model keeps resident: `rorqual bench memory`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rorqual.bench.checkpoints import checkpoint, stored_bytes
from rorqual.bench.fresh import fresh_process
from rorqual.bench.report import Bar, JsonRow
from rorqual.config import ModelConfig
from rorqual.inventory.names import expected_tensors
from rorqual.inventory.parameters import parameter_count
from rorqual.model.numerics import MODES
from rorqual.ops.dispatch import Backend, Progress

REPEATS = 3
BAR_PRESET = "real-pair"
"""The checkpoint that the bar is set for: the release's widths, random."""
BAR = Bar(at_most=2e9)

NOTES = (
    "each run is a fresh process with the fast ops, prefill full; peak_rss_bytes is the worst peak (VmHWM) of all runs",
    "weights are mapped from the file: their pages count as resident once read (end_rss_file_bytes)",
    "fp32_weight_bytes is what the same parameters would take expanded",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one run."""

    prompt: int = 256
    decoded: int = 8
    chunk: int = 256


FULL = Lengths()
QUICK = Lengths(prompt=24, decoded=2, chunk=24)


def run_memory(
    *,
    model: Path | None = None,
    random: str | None = None,
    repeats: int = REPEATS,
    quick: bool = False,
    progress: Progress | None = None,
) -> list[JsonRow]:
    """One row of either numerics: peaks of fresh processes, and what the checkpoint holds.

    Raises:
        InputError, CheckpointError, ConfigError: a checkpoint that cannot be loaded or has too few positions.
    """
    lengths = QUICK if quick else FULL
    # Compiled here once, so that a fresh process measures the model and not the compiler.
    Backend("fast").warm()
    runs: dict[str, list[JsonRow]] = {numerics: [] for numerics in MODES}
    done, total = 0, repeats * len(MODES)
    with checkpoint(model, random) as folder:
        config = ModelConfig.from_json(folder)
        for _, numerics in product(range(repeats), MODES):
            runs[numerics].append(fresh_run(folder, numerics, lengths))
            done += 1
            if progress is not None:
                progress(done, total)
    name = model.name if model is not None else random or "shipped"
    bar = BAR if random == BAR_PRESET else None
    return [_row(config, lengths, numerics, taken, name, bar) for numerics, taken in runs.items()]


def fresh_run(folder: Path, numerics: str, lengths: Lengths) -> JsonRow:
    """One run of `resident` in a process of its own. Raises InputError with its one line of complaint."""
    return fresh_process("rorqual.bench.resident", folder, numerics, lengths.prompt, lengths.decoded, lengths.chunk)


def _row(
    config: ModelConfig, lengths: Lengths, numerics: str, runs: list[JsonRow], name: str, bar: Bar | None
) -> JsonRow:
    worst = max(runs, key=_peak)
    peak = _peak(worst)
    return {
        "name": name,
        "shape": f"prefill {lengths.prompt} tokens, decode {lengths.decoded}",
        "numerics": numerics,
        **worst,
        "peaks_of_runs_bytes": [_peak(run) for run in runs],
        "weight_bytes": stored_bytes(config),
        "fp32_weight_bytes": 4 * sum(parameter_count(spec) for spec in expected_tensors(config).values()),
        "bar": bar.as_json(peak) if bar is not None and peak else None,
    }


def _peak(run: JsonRow) -> int:
    peak = run["peak_rss_bytes"]
    return peak if isinstance(peak, int) else 0
