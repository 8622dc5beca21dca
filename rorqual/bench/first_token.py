"""What a user of the shipped model waits for: the first token after a start, and each one after it.

The first token is timed on processes of their own, as a user meets them: the interpreter's start and all imports count.
With a warm kernel cache the kernels are loaded from disk; with a cold one the plain ops serve while they compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rorqual.bench.fresh import environment
from rorqual.bench.report import Bar, JsonRow
from rorqual.bench.timing import Sample, undisturbed
from rorqual.checkpoint.shipped import passage
from rorqual.engine.generate import generate
from rorqual.engine.prompts import encode
from rorqual.model.load import load
from rorqual.model.numerics import MODES
from rorqual.ops.dispatch import Backend

CACHES = {"warm": Bar(at_most=4), "cold": Bar(at_most=10)}
"""Whether the kernels' machine code is on disk already, and the seconds within which the first token is there."""
RATE_BAR = Bar(at_least=150)
NEW_TOKENS, QUICK_TOKENS = 128, 4

NOTES = (
    "first token: wall time from the start of `rorqual generate` to its first output, the prompt (the shipped passage) "
    "read from standard input; warm: the machine code of the kernels is on disk; cold: in an empty folder",
    "generate: new tokens a second after the first, greedy, tokenizer and sampler included, fast ops",
)


def shipped_rows(folder: Path, repeats: int, quick: bool, stepped: Callable[[], None] = lambda: None) -> list[JsonRow]:
    """First token and rate of the checkpoint in `folder`; `stepped` is called after each of `STEPS`."""
    Backend("fast").warm()
    rows: list[JsonRow] = []
    for numerics in MODES:
        rows.append(rate_row(folder, numerics, repeats, QUICK_TOKENS if quick else NEW_TOKENS))
        stepped()
    for numerics in MODES:
        rows.append(first_token_row(folder, numerics, "warm", repeats))
        stepped()
    # A cold start compiles everything, and native numerics compile the same: once will do.
    rows.append(first_token_row(folder, "fp32", "cold", 1 if quick else repeats))
    stepped()
    return rows


STEPS = 2 * len(MODES) + 1


def first_token_row(folder: Path, numerics: str, cache: str, repeats: int) -> JsonRow:
    """Samples of the first token's time with a "warm" or a "cold" kernel cache."""
    if cache == "warm":
        first_token(folder, numerics)  # from a cold disk: not counted
    seconds = []
    for _ in range(repeats):
        if cache == "warm":
            seconds.append(first_token(folder, numerics))
            continue
        with tempfile.TemporaryDirectory(prefix="rorqual-cold-") as empty:
            seconds.append(first_token(folder, numerics, NUMBA_CACHE_DIR=empty))
    sample = Sample.of(seconds)
    return {
        "name": "first token",
        "shape": f"rorqual generate, {cache} kernel cache",
        "numerics": numerics,
        "first_token_s": asdict(sample),
        "bar": CACHES[cache].as_json(sample.median) if numerics == "fp32" else None,
    }


def first_token(folder: Path, numerics: str, **variables: str) -> float:
    """Seconds until a fresh `rorqual generate` has written something; RuntimeError if it ends before.

    It is asked for one token, so that it ends by itself soon after; kernels that compile are given up.
    """
    script = "import sys; from rorqual.cli.app import main; sys.exit(main())"
    asked = ["generate", "-", "--model", str(folder), "--numerics", numerics, "--max-tokens", "1"]
    with tempfile.TemporaryFile() as prompt, tempfile.TemporaryFile() as told:
        prompt.write(passage().encode())
        prompt.seek(0)
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", script, *asked],
            stdin=prompt,
            stdout=subprocess.PIPE,
            stderr=told,
            env=environment(**variables),
        )
        assert process.stdout is not None
        with process, process.stdout:
            written = os.read(process.stdout.fileno(), 1)
            taken = time.perf_counter() - start
            process.stdout.read()
        if process.returncode or not written:
            told.seek(0)
            raise RuntimeError(f"rorqual generate ended with {process.returncode}: {told.read().decode()}")
    return taken


def rate_row(folder: Path, numerics: str, repeats: int, tokens: int) -> JsonRow:
    """New tokens a second after the passage, of generations one after the other."""
    model = load(folder, numerics=numerics, kernels="fast")
    ids = encode(model, passage())
    rates = []
    with undisturbed():
        for turn in range(repeats + 1):
            result = generate(model, ids, max_tokens=tokens)
            for _ in result:
                pass
            if turn:
                rates.append(result.stats.decode_rate)
    sample = Sample.of(rates)
    return {
        "name": "generate",
        "shape": f"{result.stats.new_tokens} new tokens after {len(ids)}",
        "numerics": numerics,
        "tokens_per_s": asdict(sample),
        "bar": RATE_BAR.as_json(sample.median) if numerics == "fp32" else None,
    }
