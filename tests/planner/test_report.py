"""The report: one page that stands alone, holds every number, draws true, and reads well without colours or a mouse."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from html import unescape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import presets
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.deployment import deploy
from rorqual.planner.devices import find_device
from rorqual.planner.explain import NAMES, TECHNIQUES
from rorqual.planner.glossary import ENTRIES
from rorqual.planner.mix import one_context
from rorqual.planner.numbers import IDS, numbers
from rorqual.planner.report import Subject, page, write
from rorqual.planner.report.axis import Axis, linear, logarithmic
from rorqual.planner.report.bars import stack
from rorqual.planner.report.example import example
from rorqual.planner.report.markup import tag, text
from rorqual.planner.report.style import CATEGORIES, DARK, LIGHT, stylesheet
from rorqual.planner.traffic_tables import TrafficCase
from tests.planner.html_page import Page

RELEASE = presets.load("v4.1-flash")
DRAWINGS = ["layer-map", "contexts", "waterfall", "memory", "sessions", "handover"]
THOROUGH = settings(max_examples=50, deadline=None, derandomize=True)


def release(count: int = 8) -> Subject:
    return Subject(
        model="v4.1-flash",
        layout=KVLayout(RELEASE),
        contexts=(4096, 10**6),
        deployment=deploy(RELEASE, find_device("h200"), count=count),
        mixes=(one_context(4096), one_context(131_072)),
        case=TrafficCase(),
    )


@pytest.fixture(scope="module")
def whole() -> Page:
    return Page(page(release()))


@pytest.fixture(scope="module")
def small() -> Page:
    return Page(page(example()))


def check(read: Page) -> None:
    """What holds for every page."""
    assert read.source.startswith('<!DOCTYPE html>\n<html lang="en">\n')
    assert len(read.ids) == len(set(read.ids))
    anchors = read.attributes("href")
    assert all(anchor.startswith("#") and anchor[1:] in read.ids for anchor in anchors)
    labels = [name for value in read.attributes("aria-labelledby") for name in value.split()]
    assert labels and set(labels) <= set(read.ids)
    levels = [level for level, _ in read.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    for sheet in read.sheets.values():
        assert sheet.caption and sheet.scopes == {"col", "row"}
        assert sheet.rows and all(len(row) == len(sheet.columns) for row in sheet.rows)
    assert list(read.svgs()) == DRAWINGS
    for tree in read.svgs().values():
        assert tree.attrib["role"] == "img" and tree.findtext("title") and tree.findtext("desc")
        assert_within(tree)


def assert_within(tree: ElementTree.Element) -> None:
    """No bar, line or point outside of the drawing, and none that is no number."""
    _, _, width, height = map(float, tree.attrib["viewBox"].split())
    for element in tree:
        for names, end in ((("x", "x1", "x2", "cx"), width), (("y", "y1", "y2", "cy"), height)):
            assert all(0 <= float(element.attrib[name]) <= end for name in names if name in element.attrib)
        if element.tag == "rect":
            assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 0.1
            assert float(element.attrib["width"]) >= 0
        for point in element.get("points", "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width and 0 <= y <= height


def test_structure_of_the_release(whole: Page) -> None:
    check(whole)
    assert [title for level, title in whole.headings if level == 2] == [
        "Contents",
        "In short",
        "Layers",
        "Ledger",
        "Bytes by context",
        "From multi-head attention to this cache",
        "Capacity",
        "A decode step at best",
        "Traffic",
        "All numbers",
        "Techniques",
        "Glossary",
    ]
    first_link = next(attributes for name, attributes in whole.tags if name == "a")
    assert (first_link["class"], first_link["href"]) == ("skip", "#content")
    boxes = [attributes for name, attributes in whole.tags if attributes.get("class") == "scroll" and name == "div"]
    assert len(boxes) == len(whole.sheets) + len(DRAWINGS)
    assert all(box["tabindex"] == "0" and box["role"] == "region" for box in boxes)


def test_it_needs_nothing_from_elsewhere(whole: Page) -> None:
    names = {name for name, _ in whole.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image"}
    assert not whole.attributes("src") and not whole.attributes("srcset")
    assert not re.search(r"https?:|url\(|@import|javascript:", whole.source)
    assert not [value for _, attributes in whole.tags for value in attributes.values() if "//" in (value or "")]
    assert not [key for _, attributes in whole.tags for key in attributes if key.startswith("on")]
    assert "default-src 'none'" in "".join(whole.attributes("content"))


def test_every_number_is_on_the_page(whole: Page) -> None:
    sheet = whole.sheets["numbers-figures"]
    assert sheet.columns == ["figure", "shown", "unrounded", "unit", "formula", "evaluated", "provenance", "note"]
    assert [row[0] for row in sheet.rows] == list(IDS)
    for row, figure in zip(sheet.rows, numbers(RELEASE).values(), strict=True):
        document = figure.document()
        value = document["value"]
        found = row[2].replace(",", "")
        assert [int(term) for term in found.split(" : ")] == value if isinstance(value, list) else float(found) == value
        told = [document.get(name, "") for name in ("shown", "unit", "formula", "expression", "provenance", "note")]
        assert [row[1], *row[3:7], row[7]] == [str(words).replace("`", "") for words in told]


def test_tables_hold_the_ledger(whole: Page) -> None:
    layers = whole.sheets["layers-table"]
    assert len(layers.rows) == 43
    assert sum(int(row[layers.columns.index("increment [B/token]")]) for row in layers.rows) == 890
    assert ["sum", "global KV", "720 + 170", "890"] in whole.sheets["ledger-token"].rows
    assert [row[0] for row in whole.sheets["contexts-table"].rows] == ["4,096", "1,000,000"]
    assert whole.sheets["contexts-table"].rows[1][1] == "890,000,000"
    assert whole.sheets["contexts-crossing"].rows[0][-1] == "3,037.5"
    assert [row[2] for row in whole.sheets["waterfall-table"].rows][-2:] == ["720", "890"]
    assert whole.sheets["capacity-weights"].rows[-1][-4] == "510,286,023,000"
    stored = [row[2] for row in whole.sheets["capacity-storage"].rows]
    assert stored == ["890", "1,490", "1,650", "1,630", "1,790", "3,200"]
    assert len(whole.sheets["decode-roofline"].rows) == 2 * 5
    assert whole.sheets["traffic-handover"].rows[1][-1] == "35,772,440"
    assert [row[0] for row in whole.sheets["techniques-overview"].rows] == list(NAMES)
    assert [row[0] for row in whole.sheets["techniques-pays"].rows] == [technique.name for technique in TECHNIQUES]
    assert all(f"{entry.term} ({entry.expansion})" in whole.text for entry in ENTRIES)
    assert whole.text.count("Descends from") == sum(bool(entry.descends) for entry in ENTRIES)


def test_a_rounded_cell_keeps_its_exact_value(whole: Page) -> None:
    assert any(name == "data" and float(a["value"] or 0) == 2_703_360 / 890 for name, a in whole.tags)


def test_the_header_says_what_it_was_made_from(whole: Page) -> None:
    assert RELEASE.fingerprint() in whole.text
    assert "8 x H200 SXM, tp 1, attention groups 8, ep 8, 0.9 of the memory" in whole.text
    for told in ("890 B", "2,703,360 B", "3,037.5 tokens", "15.47 B parameters", "29.18 MB", "3,376 sessions"):
        assert f"<strong>{told}</strong>" in whole.source


def test_drawings_say_their_values(whole: Page) -> None:
    layers = whole.described("layer-map")
    for told in (
        "Encoder: 0-19; decoder: 20-39; draft: 40-42.",
        "full: 2, 8, 14, 20; ",
        "reindex: 24, 28, 32, 36.",
        "KV of layer 20: read by 20-39, ratio 1, 356 B a token.",
        "Top-K of layer 36: read by 36-39.",
        "Candidates: made by 20, used by 24, 28, 32, 36.",
        "Engram table 1: layer 14.",
    ):
        assert told in layers
    waterfall = whole.described("waterfall")
    for size in ("5,242,880", "40,960", "4,096", "2,560", "720", "890"):
        assert f": {size} B" in waterfall
    assert "At 1,000,000 tokens: global KV 890,000,000 B, windows 2,703,360 B, together 892,703,360 B." in (
        whole.described("contexts")
    )
    # 422 x 3,085,504 and 433,151 x 113,920.
    assert "sessions of 131,072 tokens: 422 slots, 433,151 pages" in whole.described("memory")
    assert "slots 1,302,082,688 B; pages 49,344,561,920 B; spare 56,816 B" in whole.described("memory")
    assert "131,072 tokens: 3,376 sessions." in whole.described("sessions")
    assert "rings 1,351,680 B; streams 5,242,880 B" in whole.described("handover")


def bars(tree: ElementTree.Element) -> list[ElementTree.Element]:
    return [element for element in tree if element.tag == "rect"]


def test_the_layer_map_has_a_cell_a_layer(whole: Page) -> None:
    cells = [cell for cell in bars(whole.svgs()["layer-map"]) if cell.attrib["class"].startswith("cell ")]
    modes = [cell.attrib["class"].removeprefix("cell ") for cell in cells]
    assert modes == [str(role.mode) for role in RELEASE.roles]
    letters = [element.text for element in whole.svgs()["layer-map"] if element.text in {*"SFIR"}]
    assert "".join(filter(None, letters)).startswith("SSFRRRRRF")


def test_linear_bars_are_as_long_as_their_bytes(whole: Page) -> None:
    widths = {}
    for bar in bars(whole.svgs()["handover"]):
        _, size, _ = (bar.findtext("title") or "").split(" ")
        widths[float(size.replace(",", ""))] = float(bar.attrib["width"])
    scale = widths[29_163_520] / 29_163_520
    assert all(abs(width - size * scale) <= 0.2 for size, width in widths.items())
    assert abs(widths[5_242_880] - 548 * 5_242_880 / 35_772_440) <= 0.2


def test_logarithmic_bars_lose_as_much_for_as_large_a_factor(whole: Page) -> None:
    stored = [bar for bar in bars(whole.svgs()["waterfall"]) if bar.attrib["class"] == "part c1"]
    ends = [float(bar.attrib["width"]) for bar in stored]
    # From 5,242,880 to 40,960 is a factor of 128, to 4,096 one of 10, to 2,560 one of 1.6.
    per_doubling = (ends[0] - ends[1]) / 7
    assert ends[1] - ends[2] == pytest.approx(per_doubling * 3.3219, abs=0.3)
    assert ends[2] - ends[3] == pytest.approx(per_doubling * 0.678, abs=0.3)


def test_curves_cross_where_the_ring_is(whole: Page) -> None:
    tree = whole.svgs()["contexts"]
    ring = next(element for element in tree if element.get("class") == "ring")
    x, y = float(ring.attrib["cx"]), float(ring.attrib["cy"])
    for curve in [element for element in tree if element.tag == "polyline"][:2]:
        points = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
        (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if pair[0][0] <= x <= pair[1][0])
        assert y0 + (y1 - y0) * (x - x0) / (x1 - x0) == pytest.approx(y, abs=0.3)


def test_what_does_not_fit_is_said_not_refused() -> None:
    read = Page(page(release(count=1)))
    check(read)
    assert "Does not fit. 1 x H200 SXM: weights of 510.29 GB (510,286,023,000 B)" in read.text
    assert "short by 385.76 GB (385,764,193,368 B) a rank" in read.text
    assert read.source.count('class="warning"') == 1
    # ... and a slot and 32 pages: 385,764,193,368 + 3,085,504 + 3,645,440.
    assert read.sheets["capacity-sessions"].rows[0][-1] == "385,770,924,312"
    assert "4,096 tokens: none, short by 385.77 GB." in read.described("sessions")
    assert "one is short by 385.77 GB (routed experts 295,997,276,160 B;" in read.described("memory")
    assert not [name for name in read.sheets if name.startswith("capacity-memory")]
    budget = next(float(e.attrib["x1"]) for e in read.svgs()["memory"] if e.get("class") == "mark")
    assert budget < max(float(bar.attrib["x"]) for bar in bars(read.svgs()["memory"]))


def test_a_context_that_fits_beside_one_that_does_not() -> None:
    # Room for one slot and the four pages of 16 tokens that 64 take.
    generous = example().deployment
    need = sum(generous.weights.values()) + generous.workspace
    need += generous.layout.sequence_bytes_allocated + 4 * generous.layout.page_bytes
    read = Page(page(example(memory=need)))
    check(read)
    assert "64 tokens: 1 session." in read.described("sessions")
    assert "1,024 tokens: none, short by" in read.described("sessions")
    assert "capacity-memory-0" in read.sheets and "capacity-memory-1" not in read.sheets
    assert read.source.count('class="warning"') == 1


@pytest.mark.parametrize("off", ["drafts", "engram", "candidates", "compression", "vision", "routed_experts", "mhc"])
def test_configs_that_lack_a_technique(off: str) -> None:
    config = presets.load("tiny").without(off)
    read = Page(page(example(config)))
    check(read)
    assert [row[0] for row in read.sheets["numbers-figures"].rows] == list(numbers(config))
    assert config.fingerprint() in read.text


def test_a_config_that_lacks_them_all() -> None:
    config = presets.load("tiny").without("drafts", "engram", "compression", "vision", "routed_experts", "mhc")
    read = Page(page(example(config)))
    check(read)
    assert "No layer stores global KV: the cache does not grow with the context." in read.described("contexts")
    assert "contexts-crossing" not in read.sheets and "ledger-wrong-answers" not in read.sheets
    assert "<strong>0 B</strong>" in read.source
    assert "Engram none, drafts none, vision none" in read.text


def test_a_device_of_unknown_speed() -> None:
    subject = example()
    quiet = deploy(subject.layout.config, find_device("cpu", memory=1 << 26), page_tokens=16, chunk_tokens=64)
    read = Page(page(replace(subject, deployment=quiet)))
    check(read)
    assert "decode-roofline" not in read.sheets
    assert "No memory bandwidth is known for CPU" in read.text


def test_equal_subjects_make_equal_bytes(small: Page) -> None:
    check(small)
    script = (
        "import hashlib, sys; from rorqual.planner.report import page; "
        "from rorqual.planner.report.example import example; "
        "print(hashlib.sha256(page(example()).encode()).hexdigest(), "
        "sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == f"{hashlib.sha256(small.source.encode()).hexdigest()} []\n", done.stderr


def test_a_date_only_where_one_is_given(small: Page) -> None:
    assert "Date" not in [text.strip() for text in re.findall(r"<dt>(.*?)</dt>", small.source)]
    dated = page(example(date="2026-07-01"))
    assert dated.replace("<dt>Date</dt>\n<dd>2026-07-01</dd>\n", "") == small.source


def test_names_are_escaped() -> None:
    odd = "</title><script>alert('1')</script>&amp; \"q\" \x00\x1b\udc80"
    made = page(example(model=odd, date="<b>"))
    read = Page(made)
    check(read)
    made.encode()
    assert read.headings[0] == (1, "Plan of </title><script>alert('1')</script>&amp; \"q\" \ufffd\ufffd\ufffd")
    assert "<b>" not in made and "&lt;b&gt;" in made


LEGAL = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\ufffe\uffff"), max_size=40)


@THOROUGH
@given(LEGAL)
def test_text_comes_back_as_it_was(given_text: str) -> None:
    assert unescape(text(given_text)) == given_text
    element = ElementTree.fromstring(tag("p", given_text, class_=given_text))
    assert (element.text or "") == given_text
    assert element.attrib["class"] == given_text


@THOROUGH
@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8))
def test_axes_are_monotone_and_their_ticks_within(values: list[int]) -> None:
    for axis in (linear(max(values), str), logarithmic(values, str, above=2)):
        shares = [axis.share(value) for value in sorted(values)]
        assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
        assert all(axis.low <= tick <= axis.high for tick in axis.ticks())
        assert len(axis.ticks()) <= 9
    spans = stack([("part", "c1", value, "") for value in values])
    assert (spans[-1].end if spans else 0) == sum(values)
    assert len(spans) == sum(value > 0 for value in values)


def test_logarithmic_ticks_thin_out() -> None:
    assert Axis(low=1, high=10**16, logarithmic=True, text=str).ticks() == tuple(10**n for n in range(0, 17, 3))


def luminance(colour: str) -> float:
    """WCAG 2: relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(palette: Mapping[str, str], one: str, other: str) -> float:
    low, high = sorted((luminance(palette[one]), luminance(palette[other])))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(palette: Mapping[str, str]) -> None:
    for ink in ("ink", "muted", "link", "warn"):
        assert min(contrast(palette, ink, ground) for ground in ("paper", "panel")) >= 4.5, ink
    for cell in ("swa", "full", "reindex", "reuse"):
        assert contrast(palette, "ink", cell) >= 4.5, cell
    for graphic in ("line", *(f"c{number + 1}" for number in range(CATEGORIES))):
        assert contrast(palette, graphic, "paper") >= 3, graphic


def test_every_class_and_colour_of_the_page_has_a_rule(whole: Page) -> None:
    rules = stylesheet()
    assert set(re.findall(r"var\(--(\w+)\)", rules)) <= set(LIGHT) == set(DARK)
    used = {name for value in whole.attributes("class") for name in value.split()}
    assert all(re.search(rf"\.{name}\b", rules) for name in used)
    assert "@media print" in rules and "prefers-color-scheme: dark" in rules


def test_writing_replaces_a_page_by_a_whole_one(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    linked = tmp_path / "link.html"
    linked.symlink_to(out)
    assert write("<p>ü</p>", linked) == 9
    assert out.read_text(encoding="utf-8") == "<p>ü</p>" and linked.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "report.html"]


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "report.html"
    out.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"^--out .*report\.html cannot be written \(No space left on device\)$"):
        write("new", out)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be in a folder that exists"):
        write("", tmp_path / "no" / "report.html")
    with pytest.raises(InputError, match="must be an ordinary file"):
        write("", tmp_path)
    with pytest.raises(InputError, match="must be an ordinary file"):
        write("", Path(os.devnull))
    with pytest.raises(InputError, match="cannot be written"):
        write("", tmp_path / ("n" * 300))


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"a context must be at most 1,024 tokens"):
        page(replace(example(), mixes=(one_context(2048),)))


def test_requests_reach_the_page() -> None:
    subject = replace(example(), case=TrafficCase(prompt=256, hit_rate=Fraction(1, 4), disk=10**12))
    read = Page(page(subject))
    assert "256 tokens in, 1,024 out, 1 a second, 25 % of the prompt in the pool" in read.text
    assert "disk_residence" in [row[0] for row in read.sheets["traffic-figures"].rows]
