"""All techniques in the order in which they build on each other, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.config import ModelConfig
from rorqual.errors import InputError
from rorqual.planner.explain.entries import FP4_INDEX, FP4_MAIN_KV, QAT, SHARED_LATENT
from rorqual.planner.explain.images import PIXEL_UNSHUFFLE
from rorqual.planner.explain.passes import BOUNDED_REPLAY, CED, DSPARK, ENGRAM, SINGLE_PASS_MHC
from rorqual.planner.explain.sharing import COMPRESSION, CROSS_LAYER_SHARING, HSI, SWA, TOPK_REUSE
from rorqual.planner.explain.technique import OFF, Technique
from rorqual.planner.figure import Figure
from rorqual.planner.table import Table
from rorqual.planner.units import plain_number

TECHNIQUES: tuple[Technique, ...] = (
    SHARED_LATENT,
    SWA,
    COMPRESSION,
    CROSS_LAYER_SHARING,
    TOPK_REUSE,
    FP4_MAIN_KV,
    FP4_INDEX,
    CED,
    HSI,
    BOUNDED_REPLAY,
    SINGLE_PASS_MHC,
    ENGRAM,
    DSPARK,
    PIXEL_UNSHUFFLE,
    QAT,
)
NAMES = tuple(technique.id for technique in TECHNIQUES)


def find(name: str) -> Technique:
    """The technique of this id or alias, in any case, spaces and underscores taken for hyphens.

    Without unit; source: `TECHNIQUES`.

    >>> find("mla").id, find("Bounded_Replay").id
    ('shared-latent', 'bounded-replay')

    Raises:
        InputError: none of them; the message names the ids.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    for technique in TECHNIQUES:
        if wanted == technique.id or wanted in technique.aliases:
            return technique
    raise InputError(f"technique must be one of {', '.join(NAMES)}; got {name!r}")


def overview(config: ModelConfig) -> Table:
    """One row a technique: the factor it moves and its first saving, exact and with its denominator in the unit.

    Source: each technique's figures, evaluated for the config.

    >>> from rorqual.config import presets
    >>> overview(presets.load("v4.1-flash")).rows[3]
    ('cross-layer-sharing', 'cross-layer sharing', 'number of layers', 9434, '9,434', 'B a token')
    """
    return Table(
        name="techniques",
        title="Techniques",
        columns=("technique", "name", "factor it moves", "saves", "in short", "unit"),
        rows=tuple(_overview_row(technique, config) for technique in TECHNIQUES),
        note="A saving is counted with all other techniques in place: they do not add up; the waterfall does.",
    )


def _overview_row(technique: Technique, config: ModelConfig) -> tuple[str | int | float | None, ...]:
    heading = (technique.id, technique.name, technique.factor)
    first = technique.headline(config)
    if first is None:
        return (*heading, None, None, OFF)
    return (*heading, plain_number(first.value), first.shown, first.unit)


def answers(technique: Technique, config: ModelConfig) -> tuple[Table, ...]:
    """The three answers of one technique in full; the table of savings is left out where it is off.

    Units are the figures' own; source: the technique's record.

    >>> from rorqual.config import presets
    >>> release = presets.load("v4.1-flash")
    >>> [table.name for table in answers(find("hsi"), release)]
    ['answers', 'saves']
    >>> answers(find("hsi"), release.without("candidates"))[0].rows[1]
    ('what it saves', 'nothing: off in this config')
    """
    savings = technique.savings(config)
    count = f"{len(savings)} figure{'s' if len(savings) > 1 else ''} below"
    answer = Table(
        name="answers",
        title=technique.name,
        columns=("question", "answer"),
        rows=(
            ("which factor it moves", f"{technique.factor}. {technique.moves}"),
            ("what it saves", count if savings else f"nothing: {OFF}"),
            ("what it pays: approximation", technique.approximation),
            ("what it pays: expressiveness", technique.expressiveness),
            ("what it pays: training", technique.training),
        ),
    )
    return (answer, _savings_table(savings)) if savings else (answer,)


def _savings_table(savings: Sequence[Figure]) -> Table:
    return Table(
        name="saves",
        title="What it saves in this config",
        columns=("figure", "saves", "in short", "unit", "formula", "evaluated", "note"),
        rows=tuple(
            (
                figure.id,
                plain_number(figure.value),
                figure.shown,
                figure.unit,
                figure.formula,
                figure.expression,
                figure.note,
            )
            for figure in savings
        ),
    )
