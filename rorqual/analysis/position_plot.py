"""The figure of loss by position: as it is, and with what the text says there taken out."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rorqual.analysis.positions import PositionLosses, curve, residuals
from rorqual.errors import InputError


def require_matplotlib() -> None:
    """InputError where figures cannot be drawn: to be known before the hours that a figure takes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("plot: matplotlib is not installed; pip install 'rorqual[plots]'")


def draw_positions(scores: PositionLosses, bounds: Mapping[str, int], path: Path) -> Path:
    """Write a PNG with the bounds marked.

    Raises:
        InputError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 1, sharex=True)
    parts = ((scores.losses, "next-token loss (nats)"), (residuals(scores), "less the same token's, late"))
    for axis, (rows, label) in zip(axes, parts, strict=True):
        middle, mean, error = curve(rows)
        axis.fill_between(middle, mean - 2 * error, mean + 2 * error, color="tab:blue", alpha=0.2, linewidth=0)
        axis.plot(middle, mean, color="tab:blue", linewidth=1)
        axis.set(ylabel=label, xscale="log")
        axis.set_xlim(middle[0], scores.length)
        for bound in bounds.values():
            axis.axvline(bound, color="grey", linewidth=0.8, linestyle=":")
    # Bounds at one position share a line of text.
    names: dict[int, list[str]] = {}
    for name, bound in bounds.items():
        names.setdefault(bound, []).append(name)
    for bound, shared in names.items():
        axes[0].annotate(
            f" {', '.join(shared)}",
            (bound, 1),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="left",
            fontsize=8,
        )
    ticks = [2**k for k in range(4, scores.length.bit_length()) if 2**k <= scores.length]
    axes[1].set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axes[1].minorticks_off()
    axes[1].set(xlabel=f"position; mean of runs of 32 over {len(scores.losses)} windows, band of 2 standard errors")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path
