"""The waterfall as a chart, PNG or SVG. The only place of the planner that needs matplotlib (the `plots` extra)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

from rorqual.errors import InputError
from rorqual.planner.explain.text import exact
from rorqual.planner.explain.waterfall import Step
from rorqual.planner.whole_file import whole_file

SUFFIXES = (".png", ".svg")
KEPT, SAVED, ADDED = "#1f4e79", "#c9d9ea", "#c8641e"
# Ids of an SVG are hashes of this; text stays text, so labels can be searched and read aloud.
STYLE = {"svg.hashsalt": "rorqual", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10.0}


def waterfall_figure(steps: Sequence[Step]) -> Any:
    """The steps as horizontal bars on a logarithmic axis, in bytes a token: a `matplotlib.figure.Figure`.

    Source: the steps.

    Dark is what remains after a step, pale what the step saves, orange what it adds. A step to 0 has no bar, only its
    label. The release's six bars end at 5,242,880 B, 40,960 B, 4,096 B, 2,560 B, 720 B and 890 B:

    >>> from rorqual.config import presets
    >>> from rorqual.planner.explain.waterfall import waterfall
    >>> [bar_label(step) for step in waterfall(presets.load("v4.1-flash"))][1:3]
    ['40,960 B  (÷ 128)', '4,096 B  (÷ 10)']

    Raises:
        InputError: matplotlib is not installed; the message names the extra.
    """
    with _style():
        # No pyplot: it would choose a backend and keep the figure for the whole process.
        figure = import_module("matplotlib.figure").Figure(figsize=(10, 0.9 + 0.55 * len(steps)), layout="constrained")
        axes = figure.subplots()
        sizes = [size for step in steps for size in (step.before, step.after) if size > 0]
        floor = float(min(sizes, default=1)) / 4
        for row, step in enumerate(steps):
            _bar(axes, row, step, floor)
        axes.set_xscale("log")
        axes.set_xlim(floor, float(max(sizes, default=1)) * 20)
        axes.set_yticks(range(len(steps)), [step.name for step in steps])
        # The first step on top; a step to 0 draws nothing, so the limits cannot be left to the bars.
        axes.set_ylim(len(steps) - 0.5, -0.5)
        axes.set_xlabel("global KV, bytes a token (logarithmic)")
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        _legend(axes)
    return figure


def save(steps: Sequence[Step], path: Path) -> None:
    """Write the chart, whole or not at all. The same steps give the same file, byte for byte: no date, no random ids.

    Without unit; source: the steps.

    >>> save((), Path("waterfall.jpeg"))
    Traceback (most recent call last):
        ...
    rorqual.errors.InputError: --chart must end in .png or .svg; got waterfall.jpeg

    Raises:
        InputError: a suffix other than .png or .svg, a path that cannot be written, or no matplotlib.
    """
    check_path(path)
    figure = waterfall_figure(steps)
    with _style():
        # A PNG would carry the library's version, an SVG the date.
        form = path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        try:
            with whole_file(path) as file:
                figure.savefig(file, format=form, dpi=150, metadata=metadata)
        except OSError as error:
            raise InputError(f"--chart {path} cannot be written ({error.strerror})") from None


def check_path(path: Path) -> None:
    """Refuse what cannot be written before anything is computed. Without unit; source: the caller's path.

    >>> check_path(Path("waterfall.pdf"))
    Traceback (most recent call last):
        ...
    rorqual.errors.InputError: --chart must end in .png or .svg; got waterfall.pdf
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--chart must end in {' or '.join(SUFFIXES)}; got {path}")
    if not path.parent.is_dir():
        raise InputError(f"--chart must be in a folder that exists; {path.parent} does not")
    if path.is_dir():
        raise InputError(f"--chart must be a file; {path} is a folder")


def bar_label(step: Step) -> str:
    """What stands at the end of a bar: the bytes that remain, and by how much the step changed them.

    In bytes a token; source: the step.

    >>> bar_label(Step(name="index keys", before=720, after=890, formula="", expression=""))
    '890 B  (+ 170 B)'
    """
    size = f"{exact(step.after)} B"
    if not step.before or step.saved == 0:
        return size
    if step.saved < 0:
        return f"{size}  (+ {exact(-step.saved)} B)"
    return f"{size}  (÷ {_rounded(step.factor)})" if step.factor else f"{size}  (all saved)"


def _rounded(factor: Fraction) -> str:
    return exact(factor) if factor.denominator == 1 else f"{float(factor):.3g}"


def _bar(axes: Any, row: int, step: Step, floor: float) -> None:
    low, high = sorted((float(step.before or step.after), float(step.after)))
    if low > 0:
        axes.barh(row, low - floor, left=floor, height=0.62, color=KEPT)
    if high > low:
        start = max(low, floor)
        axes.barh(row, high - start, left=start, height=0.62, color=SAVED if step.saved > 0 else ADDED)
    axes.annotate(bar_label(step), (max(high, floor), row), xytext=(6, 0), textcoords="offset points", va="center")


def _legend(axes: Any) -> None:
    patch = import_module("matplotlib.patches").Patch
    handles = [patch(color=KEPT, label="stored"), patch(color=SAVED, label="saved"), patch(color=ADDED, label="added")]
    axes.legend(handles=handles, loc="lower right", frameon=False, ncols=1)


@contextmanager
def _style() -> Iterator[None]:
    """Settings for the time of drawing only; those of the process stay as they are."""
    try:
        # By name: the extra comes with types or is not there at all, and both must pass the type check.
        matplotlib: Any = import_module("matplotlib")
    except ImportError:
        raise InputError(
            "--chart needs matplotlib, which the `plots` extra installs: pip install 'rorqual[plots]'"
        ) from None
    with matplotlib.rc_context(STYLE):
        yield
