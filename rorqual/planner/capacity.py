"""What a device's memory is cut into, and how many sessions that holds: the plan that an engine allocates from.

    budget = weights + workspace + slots x slot bytes + pages x page bytes + spare (less than a page)

Fixed bytes of a sequence and bytes of a token are two figures and stay two: a slot costs the same at 4K and at 1M, a
page the same whatever length is planned for. n sessions need n slots and n times the mean pages of their contexts,
rounded up to a whole page, and never fewer than the longest context takes: `session_bytes`. It grows with n, and
`sessions_that_fit` is its exact inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from rorqual.errors import CapacityError, InputError
from rorqual.layout import KVLayout
from rorqual.planner.mix import Mix, mean_pages
from rorqual.planner.storage import RowFormat, page_bytes, slot_bytes
from rorqual.planner.units import decimal_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """One rank's memory, in bytes and counts; host and disk beside it are the deployment's.

    With the `packed` rows, pages x page_bytes and slots x slot_bytes are what the cache's tensors take.

    >>> plan = MemoryPlan(budget=1000, weights=500, workspace=100, slots=2, slot_bytes=50, pages=5, page_bytes=48,
    ...                   page_tokens=128)
    >>> plan.total, plan.spare, plan.pool_tokens
    (940, 60, 640)
    """

    budget: int
    weights: int
    workspace: int
    slots: int
    slot_bytes: int
    pages: int
    page_bytes: int
    page_tokens: int
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def slots_bytes(self) -> int:
        """All slots."""
        return self.slots * self.slot_bytes

    @property
    def pages_bytes(self) -> int:
        """All pages: the pool of global KV."""
        return self.pages * self.page_bytes

    @property
    def pool_tokens(self) -> int:
        """Tokens of one sequence that the pages hold: whole pages."""
        return self.pages * self.page_tokens

    @property
    def total(self) -> int:
        """What is allocated; never above the budget."""
        return self.weights + self.workspace + self.slots_bytes + self.pages_bytes

    @property
    def spare(self) -> int:
        """What is left of the budget."""
        return self.budget - self.total


def session_bytes(layout: KVLayout, mix: Mix, sessions: int, rows: RowFormat | None = None) -> int:
    """Allocated bytes of `sessions` sessions of a mix: their slots, and whole pages.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.mix import one_context
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> session_bytes(layout, one_context(131_072), 10) == 10 * (3_085_504 + 1024 * 113_920)
    True
    >>> session_bytes(layout, one_context(1), 1)
    3199424

    Source: `KVLayout.sequence_bytes_allocated`, `KVLayout.pages` and `KVLayout.page_bytes`; in other rows,
    `storage.slot_bytes` and `storage.page_bytes`.
    """
    if not sessions:
        return 0
    page, slot = _page_and_slot(layout, rows)
    return sessions * slot + _pages_of(layout, mix, sessions) * page


def sessions_that_fit(layout: KVLayout, mix: Mix, available: int, rows: RowFormat | None = None) -> int:
    """The most sessions of a mix that `available` bytes hold: the inverse of `session_bytes`.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.mix import one_context
    >>> layout, context = KVLayout(presets.load("v4.1-flash")), one_context(131_072)
    >>> need = session_bytes(layout, context, 100)
    >>> sessions_that_fit(layout, context, need), sessions_that_fit(layout, context, need - 1)
    (100, 99)

    Unit: sessions. Source: as `session_bytes`.
    """
    page, slot = _page_and_slot(layout, rows)
    longest = layout.pages(mix.longest) * page
    # n slots and the longest context must fit, and so must n times the mean: the smaller n of the two, to a rounding.
    sessions = max(0, min((available - longest) // slot, int(available / (slot + mean_pages(layout, mix) * page))))
    while sessions and session_bytes(layout, mix, sessions, rows) > available:
        sessions -= 1
    return sessions


def plan_memory(
    layout: KVLayout,
    *,
    budget: int,
    weights: int,
    workspace: int,
    mix: Mix | None = None,
    sessions: int | None = None,
    rows: RowFormat | None = None,
    host_bytes: int = 0,
    disk_bytes: int = 0,
) -> MemoryPlan:
    """Cut a rank's budget into slots and pages; all that slots leave becomes pages.

    mix: contexts to serve. sessions: slots; None takes as many as fit. One of the two must be given; with both, the
    sessions must fit. rows: another storage than the layout's own.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.mix import one_context
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> plan = plan_memory(layout, budget=10**9, weights=0, workspace=0, mix=one_context(131_072))
    >>> plan.slots, plan.pages, plan.total, plan.spare
    (8, 8561, 999953152, 46848)

    Unit: bytes. Source: 8 x (3,085,504 + 1,024 x 113,920) = 957,916,672 fit in 10^9, 9 do not.
    Raises:
        CapacityError: weights, workspace or sessions do not fit; the message says by how much.
        InputError: neither mix nor sessions, or sessions below 1.
    """
    if mix is None and sessions is None:
        raise InputError("plan_memory needs contexts, a number of sessions, or both")
    if sessions is not None and sessions < 1:
        raise InputError(f"--sessions must be 1 or more; got {sessions}")
    page, slot = _page_and_slot(layout, rows)
    available = budget - weights - workspace
    if available < 0:
        raise _short(f"weights of {_exact(weights)} and a workspace of {_exact(workspace)}", budget, -available)
    wanted = sessions if sessions is not None else max(1, sessions_that_fit(layout, mix, available, rows) if mix else 1)
    # Without contexts to go by, slots without a single page would still be no cache.
    need = session_bytes(layout, mix, wanted, rows) if mix is not None else wanted * slot + page
    if need > available:
        contexts = f" of {mix.label} tokens" if mix is not None else ""
        what = f"weights of {_exact(weights)}, a workspace of {_exact(workspace)} and {wanted:,} session"
        raise _short(f"{what}{'s' if wanted > 1 else ''}{contexts} ({_exact(need)})", budget, need - available)
    return MemoryPlan(
        budget=budget,
        weights=weights,
        workspace=workspace,
        slots=wanted,
        slot_bytes=slot,
        pages=(available - wanted * slot) // page if page else 0,
        page_bytes=page,
        page_tokens=layout.page_tokens,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def longest_prompt(layout: KVLayout, plan: MemoryPlan) -> int:
    """Tokens of the longest sequence that can ever run under a plan: the pool's, or the model's positions if fewer.

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> longest_prompt(layout, plan_memory(layout, budget=10**8, weights=0, workspace=0, sessions=1))
    108800

    Source: (10^8 - 3,085,504) // 113,920 = 850 pages of 128; config `max_position_embeddings`.
    """
    positions = layout.config.max_position_embeddings
    return min(positions, plan.pool_tokens) if plan.page_bytes else positions


def check_prompt(layout: KVLayout, plan: MemoryPlan, tokens: int, new_tokens: int = 1) -> None:
    """Refuse a request that can never run, however long it waits (field case 7).

    >>> from rorqual.config import presets
    >>> layout = KVLayout(presets.load("v4.1-flash"))
    >>> plan = plan_memory(layout, budget=10**8, weights=0, workspace=0, sessions=1)
    >>> check_prompt(layout, plan, 108_799)
    >>> check_prompt(layout, plan, 108_800)
    Traceback (most recent call last):
    rorqual.errors.InputError: a prompt of 108,800 tokens and 1 new one can never fit: the limit is 108,800 tokens, \
the 850 pages of 128 that the pool has

    Unit: tokens. Source: `longest_prompt`. Raises InputError naming limit, prompt and what was asked.
    """
    if tokens < 1 or new_tokens < 0:
        raise InputError(f"a request has 1 prompt token or more and 0 new ones or more; got {tokens} and {new_tokens}")
    limit = longest_prompt(layout, plan)
    if tokens + new_tokens <= limit:
        return
    positions = layout.config.max_position_embeddings
    pool = f"the {plan.pages:,} pages of {plan.page_tokens} that the pool has"
    why = pool if limit < positions else "the model's max_position_embeddings"
    new = "1 new one" if new_tokens == 1 else f"{new_tokens:,} new ones"
    raise InputError(f"a prompt of {tokens:,} tokens and {new} can never fit: the limit is {limit:,} tokens, {why}")


def _page_and_slot(layout: KVLayout, rows: RowFormat | None) -> tuple[int, int]:
    if rows is None:
        return layout.page_bytes, layout.sequence_bytes_allocated
    return page_bytes(layout, rows), slot_bytes(layout, rows)


def _pages_of(layout: KVLayout, mix: Mix, sessions: int) -> int:
    return max(ceil(sessions * mean_pages(layout, mix)), layout.pages(mix.longest))


def _short(what: str, budget: int, shortage: int) -> CapacityError:
    return CapacityError(f"{what} do not fit a budget of {_exact(budget)} a rank: short by {_exact(shortage)} a rank")


def _exact(count: int) -> str:
    return f"{decimal_bytes(count)} ({count:,} B)"
