"""Stores against a dict: any order of calls, restarts and copies of what a dead process left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from stores import IDENTITY, PAGE_BYTES, copied, key, page, segments_of

from rorqual.store.disk import DiskStore
from rorqual.store.memory import MemoryStore
from rorqual.store.tiers import Tiers
from rorqual.store.writer import WriteBehind

EXAMPLES, EXAMPLES_FULL = 10, 400
BOUND = 70
NUMBERS = st.integers(0, 99)
RUNS = st.tuples(NUMBERS, st.integers(1, 40))


class Unbounded(RuleBasedStateMachine):
    """Every page is there that was put and not deleted."""

    pages: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.folder, self.moves = self.root / "0", 0
        self.model: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.open()

    def open(self) -> None:
        bound = None if self.pages is None else self.pages * PAGE_BYTES
        self.disk = DiskStore(self.folder, IDENTITY, disk_bytes=bound)
        self.store = self.disk

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    @rule(run=RUNS)
    def put(self, run: tuple[int, int]) -> None:
        for number in range(run[0], sum(run)):
            assert self.store.put(key(number), page(number))
            self.model[number] = page(number)

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        got = self.store.get(key(number))
        assert got == self.model.get(number) or self.may_be_lost(number, got)

    @rule(run=RUNS)
    def match(self, run: tuple[int, int]) -> None:
        numbers = list(range(run[0], sum(run)))
        found = self.store.match([key(number) for number in numbers])
        expected = next((i for i, number in enumerate(numbers) if number not in self.model), len(numbers))
        assert found == expected or (self.pages is not None and found < expected)

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        there = self.store.delete(key(number))
        assert there == (number in self.model) or (self.pages is not None and not there)
        self.model.pop(number, None)

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.committed = dict(self.model)

    @rule()
    def compact(self) -> None:
        self.disk.compact()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()
        assert self.store.stat().damaged == 0

    @rule()
    def die(self) -> None:
        """Go on with what a killed process would leave: all that was flushed, and nothing but pages that were put."""
        self.flush()
        self.put((95, 7))
        self.moves += 1
        folder = copied(self.folder, self.root / str(self.moves))
        self.store.close()
        self.folder = folder
        self.open()
        assert self.store.stat().damaged == 0
        for number in range(95, 102):
            if self.store.get(key(number)) is None and number not in self.committed:
                self.model.pop(number)

    @invariant()
    def counts_agree(self) -> None:
        stat = self.disk.stat()
        assert stat.pages == len(self.model) or (self.pages is not None and stat.pages <= len(self.model))
        assert stat.damaged == stat.dropped == 0

    def may_be_lost(self, number: int, got: bytes | None) -> bool:
        return self.pages is not None and got is None


class Bounded(Unbounded):
    """Any page may be gone, none is wrong, and the files never outgrow their bound."""

    pages = BOUND

    @invariant()
    def fits(self) -> None:
        assert sum(path.stat().st_size for path in segments_of(self.folder)) <= BOUND * PAGE_BYTES

    @rule()
    def compact(self) -> None:
        """Not here: for the time that it takes, the bound does not hold."""


class Tiered(Unbounded):
    """Memory over a queue over disk, seen as one store."""

    def open(self) -> None:
        self.disk = DiskStore(self.folder, IDENTITY, disk_bytes=None)
        memory = MemoryStore(IDENTITY, capacity=5 * PAGE_BYTES)
        self.store = Tiers(memory, WriteBehind(self.disk, queue_bytes=10**6))  # type: ignore[assignment]

    @rule()
    def die(self) -> None:
        """Not here: the thread would write to the files while they are copied."""

    @invariant()
    def counts_agree(self) -> None:
        assert self.disk.stat().pages <= 140


MACHINES = [Unbounded, Bounded, Tiered]


def run(machine: type[Unbounded], examples: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_calls(machine: type[Unbounded]) -> None:
    run(machine, EXAMPLES)


@pytest.mark.full
@pytest.mark.parametrize("machine", MACHINES)
def test_many_orders_of_calls(machine: type[Unbounded]) -> None:
    run(machine, EXAMPLES_FULL)
