"""An engine from its user's side: `rorqual bench engine`, in six parts that can be run alone.

load      short requests, so many at once, with drafts and without: tokens a second, waits, what bookkeeping takes
single    one request's decode against the bare loop over the model
prefix    the first token behind a long prefix that is there already, against one that is not
restore   the same across a restart: a prefix that an earlier process has stored on disk
trace     a request trace replayed on the clock, with shared prefixes and without
memory    peaks of long prompts in fresh processes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rorqual.bench import engine_load, engine_restore, engine_single, engine_trace
from rorqual.bench.checkpoints import check_positions, checkpoint
from rorqual.bench.engine_load import Load, load_rows, profile_row, settings
from rorqual.bench.engine_restore import Restore, restore_row
from rorqual.bench.engine_single import Single, decode_row, prefix_row
from rorqual.bench.engine_trace import PREFIXES, Replay, trace_rows
from rorqual.bench.fresh import fresh_process
from rorqual.bench.report import Bar, JsonRow, TimeRow
from rorqual.bench.workspaces import judge_growth, workspace_row
from rorqual.config import ModelConfig
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.ops.dispatch import Backend, Progress

PARTS = ("load", "single", "prefix", "restore", "trace", "memory")
REPEATS = {"load": 3, "single": 3, "prefix": 3, "restore": 3, "trace": 1, "memory": 5}
SHIPPED = "shipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """speedup: tokens a second at the judged concurrency over those of one request. share: bookkeeping of a step.
    single: seconds a token over the bare loop's. prefix: seconds to the first token, shared over cold. restore: the
    same, restored after a restart over cold. growth: workspace of the long prompt over the short one's."""

    speedup: Bar | None = None
    share: Bar | None = None
    single: Bar | None = None
    prefix: Bar | None = None
    restore: Bar | None = None
    growth: Bar | None = None


BARS: dict[str, Bars] = {
    SHIPPED: Bars(
        speedup=Bar(at_least=4), share=Bar(at_most=0.05), single=Bar(at_most=1.1), restore=Bar(at_most=1 / 6)
    ),
    "mid": Bars(speedup=Bar(at_least=4), single=Bar(at_most=1.1), prefix=Bar(at_most=0.1), growth=Bar(at_most=1.1)),
}
"""Of the shipped model and by random preset. Other checkpoints are measured and not judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of every part. workspaces: tokens of the prompts whose memory is compared, (short, long)."""

    load: Load = field(default_factory=Load)
    single: Single = field(default_factory=Single)
    restore: Restore = field(default_factory=Restore)
    replay: Replay = field(default_factory=Replay)
    workspaces: tuple[int, int] = (16_384, 131_072)


FULL = Sizes(load=engine_load.FULL, single=engine_single.FULL, restore=engine_restore.FULL, replay=engine_trace.FULL)
QUICK = Sizes(
    load=engine_load.QUICK,
    single=engine_single.QUICK,
    restore=engine_restore.QUICK,
    replay=engine_trace.QUICK,
    workspaces=(64, 192),
)

NOTES = (
    "fp32 numerics, the fast ops, ced prefill; drafts are used where a row says so, in the trace where the model has "
    "them",
    "load: as many requests in flight as the row says, a new one for each that ends, twice as many in all; greedy, eos "
    "is a token like any other; tokens_per_s counts new tokens over the time from the first arrival to the last token",
    "load: first_token_s from a request's arrival, per_token_s the mean of its tokens after the first; p95 is the "
    "smallest wait that 95 % of the requests stayed within; speedup is over the first row of the same setting",
    "bookkeeping: steps in which every place decodes; plan_share is the scheduler, other_share the choice of tokens, "
    "their text and what is settled after it, model_share the forward (its inputs made of the plan included), "
    "draft_share feeding and proposing; bookkeeping_share is plan and other",
    "decode: the engine's step against Sequence.append of the same tokens, eight in turn, the first of which does not "
    "count; the engine also plans, chooses and makes text",
    "prefix: both requests are alone; cold: nobody has had the prefix; shared: the one before has",
    "restore: a process each, in turn, after a shorter prompt has settled it; restored: an earlier process has put the "
    "prefix into the store, on disk without a memory tier (the system may have the file in its cache); cold: the store "
    "is empty, and written to",
    "trace: prompts, answers and blocks scaled to at most 4,096 tokens, block ids made random tokens; waits are from "
    "when a request was due; apart: every request is a tenant of its own and finds nothing; one replay each",
    "memory: fresh processes; workspace_bytes = peak_rss_bytes - imported_bytes (kernels loaded) - "
    "mapped_weight_bytes - copied_weight_bytes - cache_bytes; a row is the worst of its runs, growth is of medians; a "
    "model of fewer positions is given as many as it needs",
)


def run_engine(
    *,
    model: Path | None = None,
    random: str | None = None,
    parts: Sequence[str] = PARTS,
    repeats: int | None = None,
    quick: bool = False,
    profile: bool = False,
    trace: Path | None = None,
    time_scale: float | None = None,
    progress: Progress | None = None,
) -> list[TimeRow | JsonRow]:
    """Rows of the parts asked for, in the order of `PARTS`: of a checkpoint, a random one of a preset, or the shipped
    model.

    Args:
        repeats: samples of every part instead of its own number; the trace is replayed once.
        profile: also where a step of the load goes, op by op.
        trace: a file to replay instead of the synthetic trace.
        time_scale: seconds of the replay for a second of the trace; None for the default.

    Raises:
        InputError, CheckpointError, ConfigError: a checkpoint that cannot be loaded or has too few positions, a trace
            that cannot be read.
    """
    sizes = QUICK if quick else FULL
    bars = Bars() if quick else bars_of(model, random)
    counts = {part: repeats or REPEATS[part] for part in PARTS if part in parts}
    # Compiled here once, so that fresh processes measure the engine and not the compiler.
    Backend("fast").warm()
    with checkpoint(model, random) as folder:
        check_positions(ModelConfig.from_json(folder), sizes.load.tokens)
        loaded = load(folder, kernels="fast")
        stepped = _counted(progress, _steps(loaded, sizes, counts))
        rows = _rows(loaded, folder, sizes, bars, counts, trace, time_scale, stepped)
        if profile:
            rows.append(profile_row(loaded, sizes.load))
        if "memory" in counts:
            rows += memory_rows(folder, sizes, counts["memory"], bars.growth, stepped)
    return rows


def bars_of(model: Path | None, random: str | None) -> Bars:
    """Those of the checkpoint that is measured; none of one that nobody set any for."""
    shipped = model is None and random is None
    return BARS.get(SHIPPED if shipped else random or "", Bars())


def _rows(
    model: Transformer,
    folder: Path,
    sizes: Sizes,
    bars: Bars,
    counts: Mapping[str, int],
    trace: Path | None,
    time_scale: float | None,
    stepped: Callable[[], None],
) -> list[TimeRow | JsonRow]:
    single = sizes.single.within(model.config.max_position_embeddings, model.layout.page_tokens)
    rows: list[TimeRow | JsonRow] = []
    if "load" in counts:
        rows += load_rows(
            model, sizes.load, counts["load"], speedup_bar=bars.speedup, share_bar=bars.share, stepped=stepped
        )
    for part, measure, bar in (("single", decode_row, bars.single), ("prefix", prefix_row, bars.prefix)):
        if part in counts:
            rows.append(measure(model, single, counts[part], bar))
            stepped()
    if "restore" in counts:
        restore = sizes.restore.within(model.config.max_position_embeddings, model.layout.page_tokens)
        rows.append(restore_row(folder, restore, counts["restore"], bars.restore, stepped))
    if "trace" in counts:
        rows += trace_rows(model, sizes.replay, trace, time_scale, stepped)
    return rows


def memory_rows(
    folder: Path, sizes: Sizes, repeats: int, growth_bar: Bar | None, stepped: Callable[[], None]
) -> list[JsonRow]:
    """Peaks and workspaces of two prompts; the longer one's row has the growth."""
    rows: list[JsonRow] = []
    chunk = sizes.single.chunk
    for tokens in sizes.workspaces:

        def process(tokens: int = tokens) -> JsonRow:
            run = fresh_process("rorqual.bench.engine_workspace", folder, tokens, chunk)
            stepped()
            return run

        rows.append(workspace_row("memory", f"a prompt of {tokens:,} tokens, chunk {chunk}", repeats, process))
    judge_growth(rows[0], rows[1], growth_bar)
    return rows


def _steps(model: Transformer, sizes: Sizes, counts: Mapping[str, int]) -> int:
    """Calls of `stepped` in a run of these parts, by their samples."""
    each = {"single": 1, "prefix": 1, "trace": len(PREFIXES)}
    each["load"] = counts.get("load", 0) * len(sizes.load.at_once) * len(settings(model))
    each["restore"] = 1 + 2 * counts.get("restore", 0)
    each["memory"] = counts.get("memory", 0) * len(sizes.workspaces)
    return sum(each[part] for part in counts)


def _counted(progress: Progress | None, total: int) -> Callable[[], None]:
    """To be called after each of `total` steps."""
    done = 0

    def stepped() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return stepped
