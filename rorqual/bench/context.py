"""What a long context costs: `rorqual bench context`, in three parts that can be run alone.

decode    a token at 1,048,576 tokens against one at 4,096: the release's layer plan on the weights of `real-pair`
memory    peaks of prefills of `mid` in fresh processes: 16K and 64K in both modes, 256K
prefill   `ced` against `full` on `mid`, 8K and 32K tokens, in one process and in turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rorqual.bench import long_decode
from rorqual.bench.checkpoints import checkpoint
from rorqual.bench.fresh import fresh_process
from rorqual.bench.long_decode import Contexts, decode_rows
from rorqual.bench.model import Lengths, ced_against_full
from rorqual.bench.report import Bar, JsonRow, TimeRow
from rorqual.bench.workspaces import judge_growth, workspace_bytes, workspace_row
from rorqual.checkpoint.random import write_random
from rorqual.config import ModelConfig, presets
from rorqual.model.load import load
from rorqual.ops.dispatch import Backend, Progress

PARTS = ("decode", "memory", "prefill")
REPEATS = {"decode": 9, "memory": 5, "prefill": 3}
WORKSPACE_BAR, GROWTH_BAR = Bar(at_most=512e6), Bar(at_most=1.1)
CED_BARS = {8192: Bar(at_most=0.55), 32_768: Bar(at_most=0.52)}

NOTES = (
    "decode: a whole step of forty layers with the release's roles, which take turns with the weights of two (row's "
    "composition); no Engram, no drafts, a vocabulary of 4,096; the cache is filled with random packed bytes",
    "decode: ops holds the seconds of ops in one more step, each call clocked; the step itself is slower for it",
    "memory: fresh processes with the fast ops; workspace_bytes = peak_rss_bytes - imported_bytes (kernels loaded) - "
    "mapped_weight_bytes - copied_weight_bytes - cache_bytes; a row is the worst of its runs, growth is of medians",
    "memory: mid has 65,536 positions; a longer prompt gives it as many as it needs",
    "prefill: both with the fast ops; layer_tokens is rows x layers run, the work that ced saves",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Tokens of every part. `workspaces`: (short, long) to compare, in both modes; `longest`: in `ced` alone."""

    contexts: Contexts = long_decode.FULL
    workspaces: tuple[int, int] = (16_384, 65_536)
    longest: int = 262_144
    prefills: tuple[int, ...] = tuple(CED_BARS)
    chunk: int = 512
    preset: str = "mid"


FULL = Sizes()
QUICK = Sizes(contexts=long_decode.QUICK, workspaces=(64, 128), longest=192, prefills=(40, 56), chunk=32, preset="tiny")


def run_context(
    *,
    parts: Sequence[str] = PARTS,
    repeats: int | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> list[TimeRow | JsonRow]:
    """Rows of the parts asked for, in the order of `PARTS`. `repeats` replaces every part's own number of samples."""
    sizes = QUICK if quick else FULL
    counts = {part: repeats or REPEATS[part] for part in PARTS if part in parts}
    total, done = sum(_turns(part, count, sizes) for part, count in counts.items()), 0

    def stepped() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    # Compiled here once, so that fresh processes measure the model and not the compiler.
    Backend("fast").warm()
    rows: list[TimeRow | JsonRow] = []
    if "decode" in counts:
        with _pair(quick) as folder:
            rows += decode_rows(folder, sizes.contexts, counts["decode"], not quick, stepped)
    if counts.keys() & {"memory", "prefill"}:
        with checkpoint(None, sizes.preset) as folder:
            if "memory" in counts:
                rows += memory_rows(folder, sizes, counts["memory"], stepped)
            if "prefill" in counts:
                rows += prefill_rows(folder, sizes, counts["prefill"], stepped)
    return rows


def memory_rows(folder: Path, sizes: Sizes, repeats: int, stepped: Callable[[], None]) -> list[JsonRow]:
    """Peaks and workspaces; the longer prompt's row has the growth over the shorter's, the longest its own bar.

    The longest runs once: its bar is that of a single process, far from it, and each takes ten minutes.
    """
    wanted = [("ced", tokens) for tokens in (*sizes.workspaces, sizes.longest)]
    wanted += [("full", tokens) for tokens in sizes.workspaces]
    rows: dict[tuple[str, int], JsonRow] = {}
    for mode, tokens in wanted:

        def process(mode: str = mode, tokens: int = tokens) -> JsonRow:
            run = fresh_process("rorqual.bench.workspace", folder, mode, tokens, sizes.chunk)
            stepped()
            return run

        shape = f"prefill {mode} of {tokens:,} tokens, chunk {sizes.chunk}"
        count = 1 if tokens == sizes.longest else repeats
        rows[mode, tokens] = workspace_row(sizes.preset, shape, count, process)
    short, long = sizes.workspaces
    for mode in ("ced", "full"):
        judge_growth(rows[mode, short], rows[mode, long], GROWTH_BAR)
    longest = rows["ced", sizes.longest]
    longest["bar"] = WORKSPACE_BAR.as_json(workspace_bytes(longest))
    return list(rows.values())


def prefill_rows(folder: Path, sizes: Sizes, repeats: int, stepped: Callable[[], None]) -> list[TimeRow]:
    """`ced` against `full`, a row a length."""
    model, rows = load(folder, kernels="fast"), []
    for tokens in sizes.prefills:
        row = ced_against_full(model, Lengths(long=tokens, chunk=sizes.chunk), repeats)
        rows.append(replace(row, name=f"{sizes.preset} ced/full", bar=CED_BARS.get(tokens)))
        stepped()
    return rows


@contextmanager
def _pair(quick: bool) -> Iterator[Path]:
    """A random checkpoint of two layers: `real-pair`, or the like of it at the widths of `tiny`."""
    if not quick:
        with checkpoint(None, "real-pair") as folder:
            yield folder
        return
    with TemporaryDirectory(prefix="rorqual-bench-") as parent:
        folder = Path(parent) / "pair"
        write_random(tiny_pair(), folder, seed=0)
        yield folder


def tiny_pair() -> ModelConfig:
    """Two layers as those of `real-pair`, at the widths of `tiny`."""
    return (
        presets.load("tiny")
        .without("engram", "drafts", "vision")
        .replace(
            num_hidden_layers=2,
            compress_ratios=(1, 1),
            kv_source_layer_ids=(0,),
            index_source_layer_ids=(0,),
            candidate_source_layer_id=0,
        )
    )


def _turns(part: str, repeats: int, sizes: Sizes) -> int:
    if part == "decode":
        return repeats + long_decode.WARM + long_decode.CLOCKED
    return repeats * 2 * len(sizes.workspaces) + 1 if part == "memory" else len(sizes.prefills)
