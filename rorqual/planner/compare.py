"""Caches of several models side by side: each as its own makers store it, and all of them in bf16.

Two comparisons, since one alone flatters somebody: native storage mixes what the attention saves with what the number
format saves; bf16 on both sides shows the attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rorqual.errors import InputError
from rorqual.planner.families import BF16, Family
from rorqual.planner.table import Cell, Table
from rorqual.planner.units import plain_number

CONTEXTS = (4096, 32_768, 131_072, 1_048_576)
"""Tokens, where the caller names none: those of them that some model reaches."""

RATIO_COLUMNS = ("native / first [1]", "first / native [1]", "bf16 / first [1]", "first / bf16 [1]")
LEFT_OUT = (
    "Left out for every model alike: draft layers, rows of unfinished groups, n-gram history, page rounding, and rows "
    "that an engine keeps beyond a window."
)


def size(family: Family, tokens: int | None = None, storage: str | None = None) -> Fraction:
    """Bytes of one sequence at a context, or bytes a token in the long run where `tokens` is None.

    Source: `Family.token_bytes` and `Family.bytes_at`.

    storage: as `Family.storage`, None for native.

    >>> from rorqual.planner.families import load
    >>> size(load("v4.1-flash")), size(load("v4.1-flash"), 1_000_000)
    (Fraction(890, 1), Fraction(892703360, 1))
    """
    return family.token_bytes(storage) if tokens is None else Fraction(family.bytes_at(tokens, storage))


def ratio(family: Family, first: Family, tokens: int | None = None, storage: str | None = None) -> Fraction | None:
    """How many times `first`'s bytes `family` takes, exact; `size` says of what. Unit: 1. Source: `size`.

    Antisymmetric: swapped, it is the exact inverse. None where either takes no bytes, which nothing is a multiple of
    (a model whose every layer slides has none a token).

    >>> from rorqual.planner.families import load
    >>> ratio(load("deepseek-v3.2"), load("v4.1-flash")), ratio(load("v4.1-flash"), load("deepseek-v3.2"))
    (Fraction(24034, 445), Fraction(445, 24034))
    """
    ours, theirs = size(family, tokens, storage), size(first, tokens, storage)
    return ours / theirs if ours and theirs else None


def compare(families: Sequence[Family], contexts: Sequence[int] | None = None) -> tuple[Table, ...]:
    """Five tables: bytes a token and fixed bytes; their ratios; totals at a context; groups by formula; storages.

    Source: each family's own config; who stores it so, and where its config is from, is in the last table.

    contexts: tokens; None for `default_contexts`. Ratios are to the first family. A context beyond a model's positions
    leaves its row empty.

    >>> from rorqual.planner.families import load
    >>> summary, ratios, totals, groups, storages = compare([load("v4.1-flash"), load("deepseek-v4-flash")], [4096])
    >>> summary.records()[1]["native [B a token]"], round(ratios.records()[1]["native / first [1]"], 2)
    (3514.25, 3.95)

    Raises:
        InputError: no family, no context, one that is no integer of 1 or more, or one beyond every family's positions.
    """
    if not families:
        raise InputError("compare needs one model or more; got none")
    contexts = default_contexts(families) if contexts is None else contexts
    _check(families, contexts)
    tables = _summary(families), _token_ratios(families), _totals(families, contexts)
    return (*tables, _groups(families), _storages(families))


def fits(family: Family, tokens: int) -> bool:
    """Whether the model's config allows a context of so many tokens; one that states no limit allows all.

    Source: the config's `max_position_embeddings`.

    >>> from rorqual.planner.families import load
    >>> fits(load("deepseek-llm-67b"), 4096), fits(load("deepseek-llm-67b"), 4097)
    (True, False)
    """
    return family.max_tokens is None or tokens <= family.max_tokens


def default_contexts(families: Sequence[Family]) -> tuple[int, ...]:
    """Tokens: of `CONTEXTS` those that some model reaches, or all positions of the longest when it reaches none.

    Source: the configs' `max_position_embeddings`.

    >>> from rorqual.planner.families import load
    >>> default_contexts([load("deepseek-llm-67b"), load("deepseek-v3")]), default_contexts([load("tiny")])
    ((4096, 32768, 131072), (1024,))
    """
    reached = tuple(tokens for tokens in CONTEXTS if any(fits(family, tokens) for family in families))
    return reached or (max(family.max_tokens or 0 for family in families),)


def _check(families: Sequence[Family], contexts: Sequence[int]) -> None:
    if not contexts:
        raise InputError("contexts must be one number of tokens or more; got none")
    for tokens in contexts:
        if type(tokens) is not int or tokens < 1:
            raise InputError(f"contexts must be integers of 1 or more; got {tokens!r}")
        if not any(fits(family, tokens) for family in families):
            longest = max(families, key=lambda family: family.max_tokens or 0)
            limit = f"max_position_embeddings of {longest.name}, the largest here, is {longest.max_tokens:,}"
            raise InputError(f"contexts must be within some model's positions ({limit}); got {tokens:,}")


def _summary(families: Sequence[Family]) -> Table:
    rows = []
    for family in families:
        grows = (plain_number(family.token_bytes(storage)) for storage in (None, BF16))
        fixed = (family.fixed_bytes(storage) for storage in (None, BF16))
        rows.append((family.name, family.attention, family.native, *grows, *fixed, family.max_tokens))
    return Table(
        name="compare",
        title="KV cache of one sequence: what every token adds, and what does not grow (full windows)",
        columns=(
            *("model", "attention", "native storage", "native [B a token]", "bf16 [B a token]"),
            *("native fixed [B]", "bf16 fixed [B]", "positions [tokens]"),
        ),
        rows=tuple(rows),
        note=f"native: as the model's makers store it. bf16: the same elements, 2 B each. {LEFT_OUT}",
    )


def _token_ratios(families: Sequence[Family]) -> Table:
    first = families[0]
    return Table(
        name="ratios",
        title=f"Bytes a token against {first.name} (first), and the inverse",
        columns=("model", *RATIO_COLUMNS),
        rows=tuple((family.name, *_ratios(family, first, None)) for family in families),
        note="Blank where one of the two adds nothing a token." if not all(map(size, families)) else "",
    )


def _totals(families: Sequence[Family], contexts: Sequence[int]) -> Table:
    first = families[0]
    rows: list[tuple[Cell, ...]] = []
    for tokens in contexts:
        for family in families:
            if not fits(family, tokens):
                rows.append((tokens, family.name, *[None] * 6))
                continue
            sizes = (family.bytes_at(tokens), family.bytes_at(tokens, BF16))
            rows.append((tokens, family.name, *sizes, *_ratios(family, first, tokens)))
    return Table(
        name="totals",
        title=f"KV cache of one sequence of a length, windows included; first: {first.name}",
        columns=("context [tokens]", "model", "native [B]", "bf16 [B]", *RATIO_COLUMNS),
        rows=tuple(rows),
        note=_beyond(families, contexts),
    )


def _ratios(family: Family, first: Family, tokens: int | None) -> tuple[Cell, ...]:
    """Native and bf16, each with its inverse; blank where the first model has no such context."""
    if tokens is not None and not fits(first, tokens):
        return (None,) * 4
    cells: list[Cell] = []
    for storage in (None, BF16):
        exact = ratio(family, first, tokens, storage)
        cells += [None, None] if exact is None else [float(exact), float(1 / exact)]
    return tuple(cells)


def _beyond(families: Sequence[Family], contexts: Sequence[int]) -> str:
    """Which models' rows are empty, and why."""
    short = [family for family in families if not all(fits(family, tokens) for tokens in contexts)]
    limits = ", ".join(f"{family.name} {family.max_tokens:,}" for family in short)
    return f"Blank beyond a model's own max_position_embeddings: {limits}." if short else ""


def _groups(families: Sequence[Family]) -> Table:
    return Table(
        name="groups",
        title="Layers that cache alike, and the formula of each",
        columns=(
            *("model", "storage", "group", "layers", "entry [B]", "entry [tokens]", "window [tokens]"),
            *("grows [B a token]", "fixed [B]", "formula"),
        ),
        rows=tuple(
            (
                *(family.name, storage, group.name, group.layers, group.entry_bytes, group.entry_tokens, group.window),
                *(plain_number(group.token_bytes), group.fixed_bytes, group.formula),
            )
            for family in families
            for storage in dict.fromkeys((family.native, BF16))
            for group in family.groups(storage)
        ),
    )


def _storages(families: Sequence[Family]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for family in families:
        for storage in family.storages:
            sizes = (plain_number(family.token_bytes(storage.name)), family.fixed_bytes(storage.name))
            rows.append((family.name, family.model_type, storage.name, *sizes, storage.source, family.source or None))
    return Table(
        name="storages",
        title="Every way that each is stored, its own first, and where it is described",
        columns=("model", "model_type", "storage", "grows [B a token]", "fixed [B]", "stored so by", "config from"),
        rows=tuple(rows),
    )
