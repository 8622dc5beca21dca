"""This project's own words: what its modules, messages and tables mean by them. Figures are the release's."""

from __future__ import annotations

from rorqual.planner.glossary import works
from rorqual.planner.glossary.entry import Entry, Topic

_OWN: Topic = "this project's own words"

HOUSE: tuple[Entry, ...] = (
    Entry(
        term="global KV",
        expansion="main KV and index keys of every KV source",
        topic=_OWN,
        aliases=("main KV",),
        meaning="The part of the cache that grows with the context: 3 x 356/2 + 356 = 890 bytes a token. It alone is "
        "persisted, shared between requests and shipped between machines.",
    ),
    Entry(
        term="page",
        expansion="128 tokens of global KV",
        topic=_OWN,
        meaning="128 tokens of every KV source in one contiguous buffer of 113,920 bytes: the unit of allocation, "
        "prefix sharing, storage and transfer. All sources advance together, so one block table serves them all.",
        descends=(works.PAGED_ATTENTION,),
    ),
    Entry(
        term="slot",
        expansion="what is private to one sequence",
        topic=_OWN,
        meaning="The place of a sequence's rings, tails, n-gram history and draft windows. Its size does not depend on "
        "the sequence's length, and its content is gone with the sequence.",
    ),
    Entry(
        term="ring",
        expansion="the window KV of one layer and sequence",
        topic=_OWN,
        meaning="W rows addressed by position, and as many more as a block of drafts (133 in all), so that a rejected "
        "draft overwrites nothing that a rollback needs. A ring knows the interval it holds; reads outside are masked.",
    ),
    Entry(
        term="tail",
        expansion="the unfinished group of a KV source",
        topic=_OWN,
        meaning="The fp32 rows of tokens whose group of m is not complete: m - 1, and a block of drafts more. A ratio "
        "of 1 has none, and at a prefix hit every tail is empty because a page holds whole groups.",
    ),
    Entry(
        term="carry",
        expansion="what one forward hands from layer to layer",
        topic=_OWN,
        meaning="Streams, mixing coefficients, the Top-K and the candidates in force. It lives for one forward and is "
        "never stored.",
    ),
    Entry(
        term="write floor",
        expansion="the position below which global KV is already stored",
        topic=_OWN,
        meaning="Rows below it may be computed again, in a replay, but their global KV is not rewritten.",
    ),
    Entry(
        term="window floor",
        expansion="the position below which no window key exists",
        topic=_OWN,
        meaning="Queries see window keys from it on only. A request has one for the encoder and another for the "
        "decoder, whose prefill begins W tokens before the prompt's end.",
    ),
    Entry(
        term="prefix hit",
        expansion="the leading tokens of a prompt whose pages exist already",
        topic=_OWN,
        aliases=("hit",),
        meaning="Whole pages, found by token ids, image content, model fingerprint and tenant salt. A hit of W tokens "
        "or fewer is not adopted, since the replay would compute all of it again.",
        descends=(works.RADIX_ATTENTION, works.PAGED_ATTENTION),
    ),
    Entry(
        term="acceptance length",
        expansion="tokens that one verification emits",
        topic=_OWN,
        meaning="Accepted drafts and one more token: the bonus when all pass, else the resampled one. At an "
        "independent acceptance a and a block of g it is (1 - a^(g+1)) / (1 - a) on average: 3.69 at a = 0.8 and g = "
        "5, of which 2.69 are drafts. A widely read summary takes 3.69 for the drafts and 4.69 for the output, which "
        "counts the extra token twice.",
        descends=(works.SPECULATIVE_DECODING,),
    ),
)
