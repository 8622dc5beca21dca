"""A trace to measure with: Mooncake's format, prefixes shared by a Zipf law, the same bytes for the same arguments.

Requests are turns of conversations. A new conversation begins with one of a few system prompts, the r-th of them with
probability proportional to 1 / r; each turn extends the one before. Which conversation speaks next is log-uniform in
its place, so reuse distances spread over orders of magnitude. It is like no service in particular.
"""

from __future__ import annotations

import errno
import os
import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from rorqual.errors import InputError
from rorqual.planner.traces.mooncake import BLOCK_TOKENS
from rorqual.planner.traces.request import Progress
from rorqual.planner.whole_file import whole_file

SYSTEM_PROMPTS = 64
CONVERSATIONS = 1 << 14
MEAN_GAP_MS = 40.0
NEW = 0.3  # share of requests that begin a conversation
AGAIN = 0.03  # share that repeat the last prompt of one, partial block and all
REPORT_EVERY = 4096


def generate(requests: int, seed: int = 0) -> Iterator[tuple[int, int, int, list[int]]]:
    """(time in ms, input tokens, output tokens, block ids) of each request; 24 ids on average.

    Source: a generator of random numbers and its seed; no service.

    >>> [(time, tokens, len(ids)) for time, tokens, _, ids in generate(3)]
    [(74, 11014, 22), (135, 13777, 27), (148, 14801, 29)]
    """
    rng = random.Random(seed)
    draw = rng.random
    fresh = 0
    prompts: list[list[int]] = []
    for rank in range(SYSTEM_PROMPTS):
        size = 4 + 5 * rank % 17
        prompts.append(list(range(fresh, fresh + size)))
        fresh += size
    popularity = list(accumulate(1 / rank for rank in range(1, SYSTEM_PROMPTS + 1)))
    chats: list[list[int]] = []
    lasts: list[tuple[int, list[int]]] = []
    time = 0.0
    for _ in range(requests):
        time += rng.expovariate(1 / MEAN_GAP_MS)
        place = int(len(chats) ** draw()) - 1 if chats else 0
        choice = draw()
        if chats and choice < AGAIN:
            tokens, ids = lasts[place]
        else:
            if not chats or choice < AGAIN + NEW:
                chat = prompts[bisect(popularity, draw() * popularity[-1])]
                if len(chats) < CONVERSATIONS:
                    # The place is the newcomer's; who spoke there moves to the quiet end.
                    chats.append(chats[place] if chats else chat)
                    lasts.append(lasts[place] if lasts else (0, chat))
            else:
                chat = chats[place]
            added = 1 + int(7 * draw())
            chat = [*chat, *range(fresh, fresh + added)]
            fresh += added
            chats[place] = chat
            tokens = len(chat) * BLOCK_TOKENS + 1 + int((BLOCK_TOKENS - 1) * draw())
            ids = [*chat, fresh]
            fresh += 1
            lasts[place] = (tokens, ids)
        yield int(time), tokens, 16 + int(480 * draw() ** 2), ids


def write(path: str, requests: int, seed: int = 0, progress: Progress | None = None) -> None:
    """Write `requests` requests as Mooncake JSONL, about 200 bytes each. The file must be new, and appears when whole.

    Source: `generate`.

    Raises:
        InputError: fewer than 1 request, or a path that cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write(f"{folder}/trace", 100)
    ...     sum(1 for _ in open(f"{folder}/trace"))
    100
    """
    if requests < 1:
        raise InputError(f"a synthetic trace has 1 request or more; got {requests}")
    if os.path.lexists(path):
        raise InputError(f"{path}: {os.strerror(errno.EEXIST)}")
    try:
        with whole_file(Path(path)) as file:
            for number, (time, tokens, output, ids) in enumerate(generate(requests, seed), 1):
                line = f'"timestamp": {time}, "input_length": {tokens}, "output_length": {output}, "hash_ids": {ids}'
                file.write(f"{{{line}}}\n".encode())
                if progress is not None and number % REPORT_EVERY == 0:
                    progress(number, requests)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if progress is not None:
        progress(requests, requests)
