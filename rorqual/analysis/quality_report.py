"""From losses to means, paired differences with standard errors, verdicts, and a text for the log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rorqual.analysis.drafts import Tally
from rorqual.analysis.means import mean_and_error
from rorqual.analysis.quality_variants import Comparison, Variant

JsonRow = dict[str, Any]

ALL = "all"
DRAFT_TOKENS = 2.0
"""Tokens a verification that greedy drafts are to reach, the bonus included."""
VERDICTS: Mapping[bool | None, str] = MappingProxyType({True: "reached", False: "MISSED", None: "not measured"})
AS_PLAIN: Mapping[bool | None, str] = MappingProxyType({True: "yes", False: "NO", None: ""})


def summary(values: Sequence[float]) -> JsonRow:
    """Mean, its standard error (None of a single value), count; all None of nothing."""
    if not values:
        return {"mean": None, "se": None, "prompts": 0}
    mean, error = mean_and_error(values)
    return {"mean": mean, "se": error, "prompts": len(values)}


def by_length(rows: Sequence[Sequence[float | None]], lengths: Sequence[int]) -> JsonRow:
    """Summaries by prompt length, and over all: there a window counts once, as the mean of its prompts.

    The prompts of a window are prefixes of each other, so they are not independent. Windows are not quite either where
    the stride is below their length: after prompts of one length no token is scored twice, but neighbours share most of
    what precedes, and what one scores after its longest prompt another may after a shorter. So standard errors, taken
    as if windows were independent, are somewhat too small there.
    """
    found = {
        str(length): summary([row[i] for row in rows if row[i] is not None])  # type: ignore[misc]
        for i, length in enumerate(lengths)
    }
    held = [[value for value in row if value is not None] for row in rows]
    found[ALL] = summary([statistics.fmean(row) for row in held if row])
    found[ALL]["prompts"] = sum(map(len, held))
    return found


def difference(
    losses: Mapping[str, Mapping[int, Sequence[float | None]]], one: Comparison, lengths: Sequence[int]
) -> JsonRow:
    """`variant` - `against` over the prompts that both have, as JSON; "reached" is None of a bar over no prompt."""
    ours, theirs = losses[one.variant], losses[one.against]
    rows = [
        [None if a is None or b is None else a - b for a, b in zip(ours[w], theirs[w], strict=True)]
        for w in ours
        if w in theirs
    ]
    found: JsonRow = {"variant": one.variant, "against": one.against, "nats": by_length(rows, lengths)}
    found["largest"] = max((abs(value) for row in rows for value in row if value is not None), default=None)
    if one.at_most is not None:
        measured = [part for part in found["nats"].values() if part["prompts"]]
        found["bar"] = {
            "at_most": one.at_most,
            "either_way": one.both,
            "reached": all(_within(part, one) for part in measured) if measured else None,
        }
    return found


def _within(found: Mapping[str, Any], one: Comparison) -> bool:
    assert one.at_most is not None
    mean = abs(found["mean"]) if one.both else found["mean"]
    return bool(mean <= one.at_most + 2 * (found["se"] or 0.0))


def variant_row(
    variant: Variant,
    losses: Mapping[int, Sequence[float | None]],
    lengths: Sequence[int],
    hits: Sequence[int | None] | None,
) -> JsonRow:
    """One variant as JSON. hits: tokens of its prefix hit before a prompt of each length."""
    return {
        "name": variant.name,
        "caches": "bf16" if variant.loading.bf16 else "packed",
        "prefill": variant.prefill,
        "candidate_pool": variant.loading.pool,
        "weights": "plain" if variant.loading.plain else "as stored",
        "hit": variant.hit,
        "hit_tokens": None if hits is None else dict(zip(map(str, lengths), hits, strict=True)),
        "replay": variant.replay if variant.hit else None,
        "loss": by_length([losses[w] for w in sorted(losses)], lengths),
    }


def draft_row(
    name: str, tally: Tally, *, bar: bool, as_plain: bool | None = None, extra: Mapping[str, Any] | None = None
) -> JsonRow:
    """One way to measure drafts as JSON.

    as_plain: whether the first prompt's text was that of plain decoding, None where it was not compared. Where it was
        not, the bar is missed, however many tokens a verification yields.
    """
    row: JsonRow = {
        "name": name,
        "verifications": tally.verifications,
        "tokens_a_verification": tally.tokens_a_verification,
        "accepted_by_position": tally.by_position,
        "accepted_after_accepted": tally.conditional,
        "first_prompt_as_plain_decoding": as_plain,
        **(extra or {}),
    }
    if bar:
        enough = tally.tokens_a_verification >= DRAFT_TOKENS if tally.verifications else None
        row["bar"] = {"at_least": DRAFT_TOKENS, "reached": False if as_plain is False else enough}
    return row


def repeated(ids: Sequence[int], run: int = 8) -> float:
    """Share of the text's `run`-token runs that stand in it already: how much of it goes in circles.

    >>> repeated([1, 2, 3, 4], 2), repeated([1, 2, 1, 2, 1, 2], 2)
    (0.0, 0.6)
    """
    runs = [tuple(ids[i : i + run]) for i in range(len(ids) - run + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def losses_by_variant(
    measured: Sequence[Variant], rows: Mapping[str, Mapping[int, JsonRow]]
) -> dict[str, dict[int, Sequence[float | None]]]:
    """Variant -> window -> losses, of the store's rows."""
    return {v.name: {w: row["loss"] for w, row in rows.get(v.name, {}).items()} for v in measured}


def figure(found: Mapping[str, Any], sign: bool = False) -> str:
    """`2.3456 ± 0.0123`, or `-` of nothing."""
    if found["mean"] is None:
        return "-"
    text = f"{found['mean']:+.4f}" if sign else f"{found['mean']:.4f}"
    return text if found["se"] is None else f"{text} ± {found['se']:.4f}"


def verdict(row: Mapping[str, Any]) -> str:
    """`<= 0.01 + 2 se: reached`, MISSED or not measured; nothing where there is no bar."""
    bar = row.get("bar")
    if bar is None:
        return ""
    if "at_least" in bar:
        text = f">= {bar['at_least']:g}"
    else:
        text = f"{'+-' if bar['either_way'] else '<='} {bar['at_most']:g} + 2 se"
    return f"{text}: {VERDICTS[bar['reached']]}"


def tables(document: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, columns, rows) of a study's document, for a screen and for the log."""
    keys = [str(length) for length in document["lengths"]] + [ALL]
    named = tuple(f"{int(key):,}" if key != ALL else ALL for key in keys)
    losses = [
        (row["name"], *(figure(row["loss"][key]) for key in keys), f"{row['loss'][ALL]['prompts']:,}")
        for row in document["variants"]
    ]
    differences = [
        (f"{row['variant']} - {row['against']}", *(figure(row["nats"][key], sign=True) for key in keys), verdict(row))
        for row in document["differences"]
    ]
    scored = document["scored"]
    found = [
        (f"nats a token, {scored} tokens after prompts of", ("variant", *named, "prompts"), losses),
        ("paired differences, nats a token", ("difference", *named, "bar"), differences),
    ]
    if document["drafts"]:
        rows = [
            (
                row["name"],
                f"{row['tokens_a_verification']:.2f}",
                f"{row['verifications']:,}",
                " ".join(f"{share:.2f}" for share in row["accepted_by_position"]),
                AS_PLAIN[row["first_prompt_as_plain_decoding"]],
                verdict(row),
            )
            for row in document["drafts"]
        ]
        columns = (
            "drafts, greedy",
            "tokens a verification",
            "verifications",
            "kept by position",
            "first prompt as plain decoding",
            "bar",
        )
        found.append(("", columns, rows))
    return found


def log_text(document: Mapping[str, Any]) -> str:
    """A section for LOG.md: what was run, the tables, the notes."""
    lines = [
        f"## {document['date'][:10]}: quality of {document['model']['name']}",
        "",
        f"- `{document['command']}`: {document['windows']['count']:,} windows, {document['prompts'][ALL]:,} prompts "
        f"(one of every length a window), seed {document['seed']}, {document['numerics']} numerics, "
        f"{document['kernels']} kernels, {document['seconds'] / 60:.0f} minutes.",
        *(f"- {note}" for note in document["notes"]),
    ]
    for title, columns, rows in tables(document):
        lines += ["", *([f"{title[0].upper()}{title[1:]}:", ""] if title else [])]
        lines += [_row(columns), _row(["---"] * len(columns)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def merged(rows: Mapping[int, JsonRow]) -> Tally:
    """The tally of every prompt together."""
    tally = Tally()
    for row in rows.values():
        tally.merge(row["verifications"], row["accepted"], row["emitted"])
    return tally
