"""The curve of a run as a PNG: training loss smoothed, held-out loss, and where the phases begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rorqual.training.metrics import Record
from rorqual.training.recipe import Recipe

PLOT = "loss.png"


def smoothed(values: Sequence[float], memory: int) -> list[float]:
    """Exponential mean over about `memory` values, without the start's bias towards the first."""
    keep = 1 - 1 / max(1, memory)
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight)
    return found


def phase_marks(recipe: Recipe) -> list[tuple[int, str]]:
    """(first step, what begins) of everything that begins after the first step and before the last, in order."""
    steps = recipe.run.steps
    phases = recipe.phases
    begins = [
        (phases.sparse_from, "sparse"),
        (phases.quantise_from, "quantised caches"),
        (phases.quantise_weights_from, "quantised weights"),
    ]
    if recipe.model.num_nextn_predict_layers:
        begins.append((phases.draft_from, "drafts"))
    if recipe.data.long_seq_len:
        begins.append((recipe.data.long_from, f"{recipe.data.long_seq_len:,} tokens"))
    marks = [(math.ceil(fraction * steps), what) for fraction, what in begins]
    return sorted((step, what) for step, what in marks if 0 < step < steps)


def draw(records: Sequence[Record], recipe: Recipe, path: Path) -> bool:
    """Write the PNG. False when there is nothing to draw or matplotlib is not installed."""
    steps = [record for record in records if record["kind"] == "step" and record["loss"] is not None]
    evaluations = [record for record in records if record["kind"] == "eval" and record["loss"] is not None]
    try:
        # By name: the extra comes with types or is not there at all, and both must pass the type check.
        figures = import_module("matplotlib.figure")
    except ImportError:
        return False
    if not steps:
        return False
    # No pyplot: it would choose a backend and keep the figure for the whole process.
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    axes: Any = figure.subplots()
    at, losses = [record["step"] for record in steps], [record["loss"] for record in steps]
    axes.plot(at, losses, color="tab:blue", alpha=0.2, linewidth=0.8)
    memory = max(1, len(losses) // 50)
    axes.plot(at, smoothed(losses, memory), color="tab:blue", label=f"training, mean of about {memory} steps")
    if evaluations:
        axes.plot(
            [record["step"] for record in evaluations],
            [record["loss"] for record in evaluations],
            "o-",
            color="tab:orange",
            markersize=3,
            label="held out",
        )
    for step, what in phase_marks(recipe):
        axes.axvline(step, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(
            f" {what}", (step, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="left", fontsize=8
        )
    axes.set(xlabel="step", ylabel="next-token loss (nats)", title=recipe.name)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True
