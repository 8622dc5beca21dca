"""What a page is about, and how its devices' memory is cut for each context, or why it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rorqual.errors import CapacityError
from rorqual.layout import KVLayout
from rorqual.planner.capacity import MemoryPlan, session_bytes
from rorqual.planner.deployment import Deployment, plan
from rorqual.planner.mix import Mix
from rorqual.planner.traffic_tables import TrafficCase


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """All that a page is made from: equal subjects make equal pages.

    model: as its user named it. layout: of the whole model. contexts: tokens, one or more, each 1 or more, of the
    sequences in the ledger. deployment: devices, and the model as they load it. mixes: contexts, one or more, that
    sessions are counted for. case: one kind of request. date: printed as it is; empty leaves it out.
    """

    model: str
    layout: KVLayout
    contexts: tuple[int, ...]
    deployment: Deployment
    mixes: tuple[Mix, ...]
    case: TrafficCase
    date: str = ""

    def __post_init__(self) -> None:
        assert self.contexts and min(self.contexts) > 0 and self.mixes, self


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A rank's memory for one mix. plan: None where not one session fits; complaint then says so in a line, and
    shortage is what weights, workspace and one session lack, in bytes."""

    mix: Mix
    plan: MemoryPlan | None
    shortage: int = 0
    complaint: str = ""


def cuts(deployment: Deployment, mixes: Sequence[Mix]) -> tuple[Cut, ...]:
    """The memory plan of each mix.

    >>> from rorqual.config import presets
    >>> from rorqual.planner.deployment import deploy
    >>> from rorqual.planner.devices import find_device
    >>> from rorqual.planner.mix import one_context
    >>> small = deploy(presets.load("v4.1-flash"), find_device("h200"), count=1)
    >>> (cut,) = cuts(small, [one_context(4096)])
    >>> cut.plan, cut.shortage == 385_764_193_368 + 3_085_504 + 32 * 113_920
    (None, True)

    Unit: bytes. Source: `deployment.plan`; the shortage of the weights and the workspace, a slot, and 32 pages.
    Raises InputError for a context above the model's positions.
    """
    return tuple(_cut(deployment, mix) for mix in mixes)


def _cut(deployment: Deployment, mix: Mix) -> Cut:
    try:
        return Cut(mix=mix, plan=plan(deployment, mix))
    except CapacityError as error:
        one = session_bytes(deployment.layout, mix, 1, deployment.rows)
        need = sum(deployment.weights.values()) + deployment.workspace + one
        return Cut(mix=mix, plan=None, shortage=need - deployment.budget, complaint=str(error))
