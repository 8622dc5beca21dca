"""The glossary: complete, in exact sentences, its figures the layout's, and the page made from the same data."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from rorqual.config import Mode, presets
from rorqual.config.image_grid import image_grid
from rorqual.errors import InputError
from rorqual.formats.spec import FORMATS
from rorqual.layout import KVLayout, mha_bytes
from rorqual.planner.glossary import ENTRIES, details, find, glossary, markdown
from rorqual.planner.glossary.entry import TOPICS
from rorqual.planner.speculation import tokens_per_step
from rorqual.planner.work import engram_read_bytes

RELEASE = presets.load("v4.1-flash")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"
SENTENCE_END = re.compile(r"[.](?= [A-Z]|$)")


def test_the_page_is_made_from_the_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "rorqual plan glossary --markdown > docs/glossary.md"


def test_every_term_is_there() -> None:
    attention = ("MLA", "MHA", "GQA", "MQA", "SWA", "CSA2", "CED", "Full", "Reindex", "Reuse", "HSI", "bounded replay")
    around = ("mHC", "Engram", "DSpark", "ViT", "pixel-unshuffle", "QAT")
    formats = ("E2M1/E4M3/16", "E2M1/E8M0/32", "NVFP4", "MXFP4", "MXFP8")
    own = ("page", "slot", "carry", "tail", "ring", "write floor", "window floor", "global KV", "prefix hit")
    for term in (*attention, *around, *formats, *own, "acceptance length"):
        found = find(term)
        assert term in (found.term, *found.aliases)
        assert f"**{found.term}**" in markdown()
    names = [re.sub(r"[\s_-]", "", name.lower()) for entry in ENTRIES for name in (entry.term, *entry.aliases)]
    assert len(names) == len(set(names))


def test_entries_are_one_to_three_sentences() -> None:
    for entry in ENTRIES:
        assert 1 <= len(SENTENCE_END.findall(entry.meaning)) <= 3, entry.term
        assert entry.meaning.endswith("."), entry.term
        assert entry.topic in TOPICS
        assert entry.expansion
        assert not entry.expansion.endswith(".")


def test_prior_work() -> None:
    cited = [work.citation() for entry in ENTRIES for work in entry.descends]
    for name in ("YOCO", "Cross-Layer", "IndexCache", "You Only Index Once", "HySparse", "HISA", "PowerAttention"):
        title = {"YOCO": "You Only Cache Once"}.get(name, name)
        assert any(title in citation for citation in cited), name
    for entry in ENTRIES:
        for work in entry.descends:
            # A work is known by year and author, or it says that it was not checked.
            assert not work.verified or (work.year and work.authors), work.title
            assert not work.reference or re.fullmatch(r"arXiv \d{4}\.\d{4,5}", work.reference)
            assert work.verified == ("not verified here" not in work.citation())
    assert {entry.term for entry in ENTRIES if entry.extrapolated} == {"CSA2", "QAT"}


def test_figures_are_the_layouts() -> None:
    layout, c = KVLayout(RELEASE), RELEASE
    vision = c.vision
    assert vision is not None
    modes = [sum(role.mode is mode for role in c.backbone_roles) for mode in (Mode.FULL, Mode.REINDEX, Mode.REUSE)]
    swa = sum(role.mode is Mode.SWA for role in c.backbone_roles)
    grid = image_grid(1_008, 1_008, vision)
    expected = {
        "MHA": [f"{mha_bytes(40, 64, 512):,} bytes", "64 heads of 512 in 40 layers"],
        "MLA": [f"{c.head_dim} elements", f"{2 * c.head_dim:,} bytes", f"{mha_bytes(1, 64, 512):,}", "last 64"],
        "SWA": [f"{c.sliding_window} in the release", f"{1 + c.decoder_start * (c.sliding_window - 1):,} tokens"],
        "CSA2": [f"{c.sliding_window} + {c.index_topk} entries", f"by {len(layout.sources)} layers", "read by 38"],
        "Reuse": ["{}, {} and {} of them, and {} layers".format(*modes, swa)],
        "CED": [f"{100 * layout.prefill_layer_tokens(32_768) / layout.prefill_layer_tokens(32_768, 'full'):.1f} %"],
        "HSI": [f"{c.candidate_topk_blocks:,} best blocks of {c.candidate_block_size}", f"{2_048 * 8:,} groups", "TLB"],
        "bounded replay": [f"20 x 127 = {layout.replay_tokens(8192, 'exact'):,} tokens"],
        "mHC": [f"({c.hc_mult} in the release)"],
        "Engram": [
            f"{c.engram_columns} rows",
            f"{engram_read_bytes(c):,} bytes",
            f"{sum(c.engram_num_embeddings) * c.engram_head_dim / 1e9:.1f} billion",
        ],
        "DSpark": [f"{c.num_nextn_predict_layers} window layers", f"block of {c.dspark_block_size} tokens"],
        "ViT": [f"{vision.patch_size} x {vision.patch_size} pixel", f"{vision.num_hidden_layers} layers"],
        "pixel-unshuffle": [f"{grid.patches:,} patches but {grid.features} features"],
        "NVFP4": [f"{FORMATS['e2m1_e4m3_16'].row_bytes(512)} bytes for 512", f"6 x 448 = {6 * 448:,}"],
        "MXFP4": [f"{FORMATS['e2m1_e8m0_32'].row_bytes(128)} bytes for 128"],
        "MXFP8": [f"{layout.window_row_bytes} bytes for 512"],
        "global KV": [f"{layout.bytes_per_token} bytes a token", "3 x 356/2 + 356"],
        "page": [f"{layout.page_bytes:,} bytes", f"{layout.page_tokens} tokens"],
        "ring": [f"({layout.ring_rows} in all)"],
        "acceptance length": [
            f"{float(tokens_per_step(Fraction(4, 5), 5)):.2f} at a = 0.8",
            f"{float(tokens_per_step(Fraction(4, 5), 5)) - 1:.2f} are drafts",
        ],
    }
    for term, quotes in expected.items():
        for quote in quotes:
            assert quote in find(term).meaning, (term, quote)


def test_find_refuses_by_name() -> None:
    with pytest.raises(InputError, match=r"must be one of MHA, MQA, .*; got 'FlashAttention'"):
        find("FlashAttention")


def test_tables() -> None:
    assert [row[0] for row in glossary().rows] == [entry.term for entry in ENTRIES]
    rows = details(find("csa2")).rows
    assert [row[0] for row in rows] == ["stands for", "meaning", *["descends from"] * 4, "extrapolated"]
    # Not a word of a work is lost, nor is one claimed that was not checked.
    assert details(find("hsi")).rows[2] == ("descends from", '"HISA" (not verified here)')


def test_the_page_is_clean_markdown() -> None:
    lines = markdown().splitlines()
    assert lines[0] == "# Glossary"
    assert [line[3:].lower() for line in lines if line.startswith("## ")] == list(TOPICS)
    assert markdown().endswith(".\n")
    assert not any(line.endswith(" ") for line in lines)
    # A line of text that began so would be a list.
    assert not any(re.match(r"[-+*] |\d+[.)] ", line) for line in lines)
