"""What `/stats` prints in a chat: the last reply, and the engine's pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rorqual.cli.output import Cell, bytes_text, print_table

if TYPE_CHECKING:
    from rorqual.cli.conversation import Conversation
    from rorqual.engine.output import RequestOutput
    from rorqual.engine.stats import EngineStats


def print_chat_stats(conversation: Conversation) -> None:
    """Both tables; without a reply, the pools alone."""
    if conversation.last is not None:
        print_table(("last reply", ""), reply_rows(conversation.last))
        print()
    stats = conversation.engine.stats()
    rows = [("history, tokens", len(conversation.ids)), ("limit, tokens", conversation.limit), *pool_rows(stats)]
    print_table(("context and pools", ""), rows)


def reply_rows(output: RequestOutput) -> list[tuple[str, Cell]]:
    """Tokens, rates and acceptance of one reply; a rate without two tokens is None."""
    counts, times = output.counts, output.times
    per_token = times.per_token(counts.new)
    first = times.to_first_token
    shares = " ".join(f"{count / counts.verifications:.0%}" for count in counts.accepted)
    return [
        ("prompt tokens", counts.prompt),
        ("of these hit", counts.hit),
        ("of these from the store", counts.restored),
        ("of these replayed", counts.replayed),
        ("rows computed", counts.computed),
        ("new tokens", counts.new),
        ("finish reason", output.finish_reason),
        ("ms to the first token", None if first is None else round(first * 1e3, 1)),
        ("tokens a second after it", 1 / per_token if per_token else None),
        ("tokens a verification", 1 + sum(counts.accepted) / counts.verifications if counts.verifications else None),
        ("acceptance by position", shares or None),
    ]


def pool_rows(stats: EngineStats) -> list[tuple[str, Cell]]:
    """Pages and slots by state, and what is allocated."""
    return [
        ("tokens a page", stats.page_tokens),
        ("pages used", stats.pages_used),
        ("pages cached", stats.pages_cached),
        ("pages free", stats.pages_free),
        ("slots free", f"{stats.slots_free} of {stats.slots}"),
        *([] if stats.store is None else [("pages in the store", stats.store.pages)]),
        *((f"{name}, allocated", bytes_text(count)) for name, count in stats.bytes_by_group.items()),
    ]
