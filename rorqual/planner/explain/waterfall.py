"""The waterfall: global KV bytes a token, from multi-head attention in bf16 down to what the config stores.

Each step takes one technique more, in the order in which they build on each other; the last step is exactly
`KVLayout.bytes_per_token`. Windows are not in it: they are fixed for a sequence, not paid by the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from rorqual.config import ModelConfig
from rorqual.formats.spec import NumberFormat
from rorqual.layout import BF16_BYTES, KVLayout, mha_bytes
from rorqual.planner.explain.entries import entries_per_token, entries_text, row_text
from rorqual.planner.explain.text import by_ratio, equals
from rorqual.planner.table import Table
from rorqual.planner.units import plain_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step. before, after: global KV in bytes a token; the first step begins at 0. formula in the config's names,
    expression with the numbers put in: it evaluates to `after`."""

    name: str
    before: int | Fraction
    after: int | Fraction
    formula: str
    expression: str

    @property
    def saved(self) -> int | Fraction:
        """Bytes a token that the step takes away; negative for what it adds.

        >>> Step(name="index keys", before=720, after=890, formula="", expression="").saved
        -170
        """
        return self.before - self.after

    @property
    def factor(self) -> Fraction | None:
        """Before over after, where both are above 0: 128 for the shared latent of the release."""
        return Fraction(self.before) / Fraction(self.after) if self.before and self.after else None


def waterfall(config: ModelConfig) -> tuple[Step, ...]:
    """Bytes of global KV a token, step by step (SPEC 11).

    >>> from rorqual.config import presets
    >>> [int(step.after) for step in waterfall(presets.load("v4.1-flash"))]
    [5242880, 40960, 4096, 2560, 720, 890]
    """
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.head_dim
    sources, layout = config.kv_sources, KVLayout(config)
    latent, entries = width * BF16_BYTES, entries_per_token(config)
    main = layout.main_format
    main_bytes = entries * main.row_bytes(width)
    counted = entries_text(config)
    main_text = f"({counted}) x ({row_text(main, width)})"
    return _chained(
        (
            f"MHA: {heads} heads x {width}, K and V, {layers} layers, bf16",
            mha_bytes(layers, heads, width),
            "2 x layers x heads x head_dim x 2",
            f"2 x {layers} x {heads} x {width:,} x 2",
        ),
        (
            f"one shared latent, {layers} layers",
            layers * latent,
            "layers x head_dim x 2",
            f"{layers} x {width:,} x 2",
        ),
        (
            f"{len(sources)} source{'' if len(sources) == 1 else 's'} of {layers} layers",
            len(sources) * latent,
            "KV sources x head_dim x 2",
            f"{len(sources)} x {width:,} x 2",
        ),
        (
            _ratios_name(config),
            entries * latent,
            "sum over KV sources of head_dim x 2 / ratio",
            f"({counted}) x {width:,} x 2",
        ),
        (
            f"main KV in {format_text(main)}",
            main_bytes,
            "sum over KV sources of main entry / ratio",
            main_text,
        ),
        (
            f"index keys in {format_text(layout.index_format)}",
            layout.bytes_per_token,
            "sum over KV sources of (main entry + index key) / ratio",
            f"{main_text} + ({counted}) x ({row_text(layout.index_format, config.index_head_dim)})"
            if sources
            else main_text,
        ),
    )


def waterfall_table(config: ModelConfig) -> Table:
    """The waterfall as rows, in bytes a token. Source: `waterfall`.

    >>> from rorqual.config import presets
    >>> waterfall_table(presets.load("v4.1-flash")).rows[-1][:4]
    ('index keys in FP4 with scales', 720, 890, -170)
    """
    return Table(
        name="waterfall",
        title="Global KV, step by step",
        columns=("step", "before [B a token]", "after [B a token]", "saved [B a token]", "divided by", "evaluated"),
        rows=tuple(
            (
                step.name,
                plain_number(step.before),
                plain_number(step.after),
                plain_number(step.saved) if step.before else None,
                None if step.factor is None else plain_number(step.factor),
                f"{step.expression} {equals(step.after)}",
            )
            for step in waterfall(config)
        ),
        note="Windows are not in it: they are fixed for a sequence, whatever its length.",
    )


def format_text(fmt: NumberFormat) -> str:
    """A format in two words; which FP4 it is, its name and the formula say. Without unit; source: the format.

    >>> from rorqual.formats.spec import FORMATS
    >>> [format_text(FORMATS[name]) for name in ("e2m1_e4m3_16", "e2m1_unscaled", "bf16")]
    ['FP4 with scales', 'FP4 without scales', 'bf16']
    """
    element = {"e2m1": "FP4", "e4m3": "FP8"}.get(fmt.value, fmt.value)
    if fmt.bits >= 16:
        return element
    return f"{element} {'with' if fmt.scale else 'without'} scales"


def _ratios_name(config: ModelConfig) -> str:
    ratios = [str(source.ratio) for source in config.kv_sources]
    if len(ratios) > 8:
        return "ratios: " + ", ".join(f"{count} of {ratio}" for count, ratio in by_ratio(config.kv_sources))
    return f"ratio{'' if len(ratios) == 1 else 's'} {', '.join(ratios)}" if ratios else "no ratios"


def _chained(*steps: tuple[str, int | Fraction, str, str]) -> tuple[Step, ...]:
    chained: list[Step] = []
    before: int | Fraction = 0
    for name, after, formula, expression in steps:
        chained.append(Step(name=name, before=before, after=after, formula=formula, expression=expression))
        before = after
    return tuple(chained)
