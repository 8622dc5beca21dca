"""The waterfall: the issue's six numbers, any config, and the chart as PNG and SVG."""

from __future__ import annotations

import re
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.config import CacheFormats, ModelConfig, presets
from rorqual.config.depth import TECHNIQUES as SWITCHES
from rorqual.errors import InputError
from rorqual.layout import KVLayout
from rorqual.planner.explain import Step, waterfall, waterfall_table
from rorqual.planner.explain.draw import bar_label, save, waterfall_figure

RELEASE = presets.load("v4.1-flash")
SVG = "{http://www.w3.org/2000/svg}"


def after(config: ModelConfig) -> list[int | Fraction]:
    return [step.after for step in waterfall(config)]


def test_waterfall_of_the_release() -> None:
    steps = waterfall(RELEASE)
    assert after(RELEASE) == [5_242_880, 40_960, 4_096, 2_560, 720, 890]
    assert [step.before for step in steps] == [0, 5_242_880, 40_960, 4_096, 2_560, 720]
    assert [step.factor for step in steps] == [None, 128, 10, Fraction(8, 5), Fraction(32, 9), Fraction(72, 89)]
    assert [step.saved for step in steps[4:]] == [1_840, -170]
    assert [step.name for step in steps] == [
        "MHA: 64 heads x 512, K and V, 40 layers, bf16",
        "one shared latent, 40 layers",
        "4 sources of 40 layers",
        "ratios 2, 2, 2, 1",
        "main KV in FP4 with scales",
        "index keys in FP4 with scales",
    ]
    row = waterfall_table(RELEASE).rows[1]
    assert row[1:] == (5_242_880, 40_960, 5_201_920, 128, "40 x 512 x 2 = 40,960")
    assert waterfall_table(RELEASE).rows[0][3:5] == (None, None)


def test_waterfall_of_other_configs() -> None:
    # 8 layers, 4 heads of 64, sources of ratios 2 and 1: 1.5 entries; 64/2 + 64/16 = 36; 32/2 + 32/32 = 17
    demo = [2 * 8 * 4 * 64 * 2, 8 * 128, 2 * 128, 192, 54, Fraction(159, 2)]
    assert after(presets.load("demo")) == demo
    assert after(presets.load("real-pair")) == [2 * 2 * 64 * 512 * 2, 2 * 1_024, 1_024, 1_024, 288, 356]
    wide = RELEASE.replace(cache=CacheFormats(main="bf16", index_key="bf16"))
    assert after(wide)[3:] == [2_560, 2_560, 3_200]
    assert waterfall(wide)[4].name == "main KV in bf16"
    unscaled = RELEASE.replace(cache=CacheFormats(main="e2m1_unscaled"))
    assert after(unscaled)[3:] == [2_560, 640, 810]
    assert waterfall(unscaled)[4].name == "main KV in FP4 without scales"
    eight = RELEASE.replace(cache=CacheFormats(main="e4m3_e8m0_32"))
    assert after(eight)[4:] == [2.5 * 528, 2.5 * (528 + 68)]
    none = waterfall(RELEASE.without("compression"))
    assert [step.after for step in none] == [5_242_880, 40_960, 0, 0, 0, 0]
    assert [step.name for step in none[2:4]] == ["0 sources of 40 layers", "no ratios"]
    assert none[2].factor is None


@pytest.mark.parametrize("switch", SWITCHES)
def test_only_compression_changes_global_kv(switch: str) -> None:
    changed = after(RELEASE.without(switch)) != after(RELEASE)
    assert changed == (switch == "compression")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    ratios=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=12),
    heads=st.integers(1, 128),
    main=st.sampled_from(["e2m1_e4m3_16", "e2m1_e8m0_32", "e4m3_e8m0_32", "bf16", "fp32"]),
)
def test_waterfall_ends_at_the_layout(ratios: list[int], heads: int, main: str) -> None:
    # Every layer a source of its own ratio.
    layers = tuple(range(len(ratios)))
    config = RELEASE.without("drafts", "engram", "candidates").replace(
        num_hidden_layers=len(ratios),
        compress_ratios=tuple(ratios),
        kv_source_layer_ids=layers,
        index_source_layer_ids=layers,
        num_attention_heads=heads,
        o_groups=1,
        cache=CacheFormats(main=main),
    )
    steps = waterfall(config)
    assert steps[0].after == 2 * len(ratios) * heads * 512 * 2
    assert steps[2].after == steps[1].after  # nothing is shared
    assert steps[-1].after == KVLayout(config).bytes_per_token
    assert all(step.before == previous.after for previous, step in pairwise(steps))
    assert sum(step.saved for step in steps[1:]) == steps[0].after - steps[-1].after
    for step in steps:
        text = re.sub(r"(?<=\d),(?=\d{3})", "", step.expression).replace(" x ", " * ")
        assert eval(text, {"__builtins__": {}}) == pytest.approx(float(step.after), rel=1e-12)
        for ratio in re.findall(r"(\d+) of (\d)", step.name if step.name.startswith("ratios: ") else ""):
            assert ratios.count(int(ratio[1])) == int(ratio[0])


def test_labels() -> None:
    labels = [bar_label(step) for step in waterfall(RELEASE)]
    assert labels == [
        "5,242,880 B",
        "40,960 B  (÷ 128)",
        "4,096 B  (÷ 10)",
        "2,560 B  (÷ 1.6)",
        "720 B  (÷ 3.56)",
        "890 B  (+ 170 B)",
    ]
    assert [bar_label(step) for step in waterfall(RELEASE.without("compression"))][2:4] == ["0 B  (all saved)", "0 B"]
    assert bar_label(Step(name="", before=64, after=64, formula="", expression="")) == "64 B"


def texts(path: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ElementTree.parse(path).getroot().iter(f"{SVG}text")]


def test_svg_holds_the_labels_and_is_deterministic(tmp_path: Path) -> None:
    steps = waterfall(RELEASE)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    save(steps, first)
    save(steps, second)
    assert first.read_bytes() == second.read_bytes()
    assert b"<dc:date>" not in first.read_bytes()
    found = texts(first)
    assert {step.name for step in steps} <= set(found)
    # Runs of spaces are one space in an SVG's text.
    assert {" ".join(bar_label(step).split()) for step in steps} <= {" ".join(text.split()) for text in found}
    assert {"global KV, bytes a token (logarithmic)", "stored", "saved", "added"} <= set(found)


def test_png(tmp_path: Path) -> None:
    # Without a source every step from the third on has nothing left to draw on a logarithmic axis.
    steps = waterfall(RELEASE.without("compression"))
    first, second = tmp_path / "first.PNG", tmp_path / "second.png"
    save(steps, first)
    save(steps, second)
    assert first.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert first.read_bytes() == second.read_bytes()
    assert b"Software" not in first.read_bytes()


def test_bars_are_where_the_bytes_are() -> None:
    axes = waterfall_figure(waterfall(RELEASE)).axes[0]
    assert axes.get_xscale() == "log"
    ends = [round(patch.get_x() + patch.get_width()) for patch in axes.patches]
    # Each row: up to what is stored, then what was saved or added.
    assert ends == [5_242_880, 40_960, 5_242_880, 4_096, 40_960, 2_560, 4_096, 720, 2_560, 720, 890]
    assert axes.yaxis_inverted()


def test_drawing_leaves_no_settings_behind(tmp_path: Path) -> None:
    import matplotlib

    # A plain dict of them would ask for the backend, and thereby import pyplot.
    before, imported = matplotlib.rcParams.copy(), "matplotlib.pyplot" in sys.modules
    save(waterfall(RELEASE), tmp_path / "w.svg")
    assert matplotlib.rcParams.copy() == before
    assert ("matplotlib.pyplot" in sys.modules) == imported


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = waterfall(RELEASE)
    with pytest.raises(InputError, match=r"must end in \.png or \.svg; got .*w\.pdf"):
        save(steps, tmp_path / "w.pdf")
    with pytest.raises(InputError, match=r"folder that exists; .*nowhere does not"):
        save(steps, tmp_path / "nowhere" / "w.png")
    (tmp_path / "w.svg").mkdir()
    with pytest.raises(InputError, match=r"must be a file; .*w\.svg is a folder"):
        save(steps, tmp_path / "w.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"needs matplotlib, which the `plots` extra installs"):
        save(steps, tmp_path / "w.png")
    assert not (tmp_path / "w.png").exists()
