"""A model on devices: the release where it fits and where it does not, and what lies beside the devices."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from rorqual.config import presets
from rorqual.errors import CapacityError, ConfigError, InputError
from rorqual.planner import capacity_tables as tables
from rorqual.planner.deployment import Deployment, deploy, outside, plan
from rorqual.planner.devices import find_device
from rorqual.planner.mix import one_context, parse_mix
from rorqual.planner.placement import Placement

RELEASE = presets.load("v4.1-flash")
WHOLE = 510_286_023_000
SLOT, PAGE = 3_085_504, 113_920


def on_h200(count: int = 8, **options: Any) -> Deployment:
    return deploy(RELEASE, find_device("h200"), count=count, **options)


def test_the_release_does_not_fit_one_h200() -> None:
    """The refusal names the shortage: weights + workspace - 0.9 x 141 GB."""
    one = on_h200(1)
    short = WHOLE + one.workspace - 126_900_000_000
    message = (
        rf"^1 x H200 SXM: weights of 510.29 GB .*short by .*\({short:,} B\) a rank; --engram host or disk would free"
    )
    with pytest.raises(CapacityError, match=message):
        plan(one, one_context(4096))
    host = on_h200(1, placement=Placement(engram="host"))
    with pytest.raises(CapacityError, match=rf"\({short - 202_758_032_400:,} B\) a rank$"):
        plan(host, one_context(4096))


def test_the_release_on_eight_h200() -> None:
    eight = on_h200()
    cut = plan(eight, one_context(131_072))
    available = 126_900_000_000 - sum(eight.weights.values()) - eight.workspace
    assert cut.slots == available // (SLOT + 1024 * PAGE) == 422
    assert cut.pages == (available - 422 * SLOT) // PAGE
    assert cut.total + cut.spare == cut.budget == 126_900_000_000
    # Sessions of the replica are shared out over eight groups.
    assert plan(eight, one_context(131_072), 8 * 422).slots == 422
    with pytest.raises(CapacityError, match=r"^8 x H200 SXM: .* 423 sessions of 131,072 tokens"):
        plan(eight, one_context(131_072), 8 * 422 + 1)


def test_kv_bytes_a_rank_do_not_fall_with_tensor_parallelism() -> None:
    """One KV head: the ranks of a group store the same pages, so eight of them hold one set of sessions."""
    split, apart = on_h200(tp=8), on_h200()
    context = one_context(131_072)
    one, eight = plan(split, context), plan(apart, context)
    assert (one.slot_bytes, one.page_bytes) == (eight.slot_bytes, eight.page_bytes) == (SLOT, PAGE)
    sessions = {name: row[7] for name, row in zip("sa", _rows(split, apart), strict=True)}
    assert sessions == {"s": one.slots, "a": 8 * eight.slots}
    # Split attention frees a little for cache, nothing like a factor of eight.
    assert eight.slots < one.slots < 2 * eight.slots


def _rows(*deployments: Deployment) -> list[tuple[Any, ...]]:
    return [tables.sessions_table(deployment, [one_context(131_072)]).rows[0] for deployment in deployments]


def test_pools_splits_and_offloading_take_no_device_bytes() -> None:
    """Field case 3."""
    plain = plan(on_h200(), one_context(131_072))
    for options in ({"pool_host": 10**12}, {"pool_disk": 10**13}, {"split": True}):
        more = plan(on_h200(**options), one_context(131_072))
        assert (more.total, more.slots, more.pages) == (plain.total, plain.slots, plain.pages)
        assert more.host_bytes + more.disk_bytes > plain.host_bytes + plain.disk_bytes


def test_host_and_disk_are_planned_beside() -> None:
    """Field case 6."""
    hosted = on_h200(placement=Placement(engram="host"), pool_host=10**12, pool_disk=10**13, hosts=2)
    beside = {(item.name, item.home): item.nbytes for item in outside(hosted)}
    assert beside == {
        ("Engram tables", "host"): 202_758_032_400,
        ("KV pool", "host"): 10**12,
        ("staging", "host"): 2 * 64 * PAGE * 4,  # a chunk of 8,192 tokens is 64 pages; four ranks a host
        ("checkpoint", "disk"): WHOLE,
        ("KV pool", "disk"): 10**13,
    }
    cut = plan(hosted, one_context(4096))
    assert cut.host_bytes == 202_758_032_400 + 10**12 + 2 * 64 * PAGE * 4
    assert cut.disk_bytes == WHOLE + 10**13
    assert "engram_tables" not in hosted.weights
    disk = outside(on_h200(placement=Placement(engram="disk")))
    assert [(item.name, item.home) for item in disk] == [("checkpoint", "disk")]
    assert "read from it in place" in disk[0].meaning
    without = outside(on_h200(placement=Placement(engram="off", drafts=False)))
    assert without[0].nbytes == WHOLE - 202_758_032_400 - 315_043_840 - 713_428_872 - 7_219_445_760


def test_drafts_cost_rows_and_weights() -> None:
    plain = on_h200(placement=Placement(drafts=False))
    assert plain.layout.draft_rows == 0
    cut = plan(plain, one_context(4096))
    assert cut.slot_bytes == 2_703_360 + 12_288 + 24
    assert sum(on_h200().weights.values()) - cut.weights == 713_428_872 + 7_219_445_760 // 8


def test_settings_that_cannot_be_honoured_are_refused() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("m3ultra", {"placement": Placement(engram="host")}, r"^--engram must be device, disk or off on m3ultra"),
        ("m3ultra", {"pool_host": 1}, r"^--pool-host must be 0 on m3ultra"),
        ("h200", {"utilisation": Fraction(0)}, r"^--utilisation must be above 0 and at most 1; got 0"),
        ("h200", {"utilisation": Fraction(11, 10)}, r"^--utilisation must be .* got 1.1"),
        ("h200", {"count": 8, "hosts": 3}, r"^--hosts must be a divisor of --count \(8\); got 3"),
        ("h200", {"hosts": 0}, r"^--hosts must be a divisor"),
        ("h200", {"storage": "fp4"}, r"^--storage must be one of"),
    ]
    for device, options, message in cases:
        with pytest.raises(InputError, match=message):
            deploy(RELEASE, find_device(device), **options)
    with pytest.raises(ConfigError, match=r"^page_tokens must be a multiple of 8"):
        on_h200(page_tokens=12)
    with pytest.raises(InputError, match=r"^a context must be at most 1,048,576 tokens .*; got 1,048,577"):
        plan(on_h200(), one_context(1_048_577))
    with pytest.raises(InputError, match=r"^--sessions must be 1 or more; got 0"):
        plan(on_h200(), one_context(1), 0)


def test_a_shortage_is_shown_where_contexts_were_not_asked_for() -> None:
    small = on_h200(utilisation=Fraction(545, 1000))
    available = 76_845_000_000 - sum(small.weights.values()) - small.workspace
    short, long = one_context(4096), one_context(2**20)
    rows = tables.sessions_table(small, [short, long]).rows
    assert (rows[0][6], rows[0][-1]) == (available // (SLOT + 32 * PAGE), None)
    assert (rows[1][6], rows[1][-1]) == (0, SLOT + 8192 * PAGE - available)
    tables.must_fit(small, [short])
    message = rf"1 session of 1,048,576 tokens .*\({SLOT + 8192 * PAGE - available:,} B\) a rank"
    with pytest.raises(CapacityError, match=message):
        tables.must_fit(small, [short, long])


def test_tables_say_their_units_and_add_up() -> None:
    eight, mix = on_h200(), parse_mix("4Ki:70,128Ki:25,1Mi:5")
    cut = plan(eight, mix)
    memory = {row[0]: row[1] for row in tables.memory_table(eight, cut, mix).rows}
    parts = ("weights", "workspace", "slots", "pages", "spare")
    assert sum(memory[part] for part in parts) == memory["budget"] == cut.budget  # type: ignore[misc]
    weights = tables.weights_table(eight)
    assert weights.rows[-1][6] == WHOLE
    assert sum(row[-1] for row in weights.rows[:-1]) == cut.weights  # type: ignore[misc]
    sessions = tables.sessions_table(eight, [mix])
    assert sessions.rows[0][4] == SLOT + 688 * PAGE
    roofline = tables.roofline_table(eight, (131_072,), (1, 4096))
    assert [row[2] for row in roofline.rows] == [True, False]
