"""`rorqual.analysis.quality`: relations that hold whatever the weights are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rorqual.analysis.drafts import Tally
from rorqual.analysis.quality import OWN_TEXT, Settings, run_quality
from rorqual.analysis.quality_pass import WindowPass, window_losses
from rorqual.analysis.quality_report import difference, draft_row, log_text, summary, tables, verdict
from rorqual.analysis.quality_variants import (
    BASELINE,
    HITS,
    RELEASED,
    Comparison,
    Loading,
    Variant,
    comparisons,
    hit_tokens,
    variants,
)
from rorqual.analysis.quality_windows import Document, cut_windows
from rorqual.checkpoint.random import write_random
from rorqual.config import ModelConfig, presets
from rorqual.engine.sequence import Prompt, Sequence, new_cache
from rorqual.errors import CheckpointError, InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

PAGE = WINDOW = 16
LENGTHS = (32, 48, 80)
SCORED = 5
BOS = 9_999
CLOSE = 1e-4
FULL, CED = Variant(name="full", prefill="full"), Variant(name="ced")
REPLAYED = [Variant(name=f"{hit} {replay}", hit=hit, replay=replay) for hit in HITS for replay in ("exact", "bounded")]

Rows = dict[str, list[float | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random `tiny` checkpoint without vision."""
    out = tmp_path_factory.mktemp("quality") / "tiny"
    write_random(presets.load("tiny").without("vision"), out, seed=7)
    return out


def opened(folder: Path, changed: ModelConfig | None = None) -> Transformer:
    return load(folder, page_tokens=PAGE, kernels="fast", config=changed)


@pytest.fixture(scope="module")
def packed(folder: Path) -> Transformer:
    return opened(folder)


def some_ids(count: int = LENGTHS[-1] + SCORED, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(seed))


def losses(
    model: Transformer, *measured: Variant, lengths: tuple[int, ...] = LENGTHS, scored: int = SCORED, chunk: int = PAGE
) -> Rows:
    ids = some_ids(LENGTHS[-1] + 40)[: lengths[-1] + scored]
    return window_losses(model, ids, lengths, measured, scored=scored, chunk=chunk)


@pytest.fixture(scope="module")
def found(packed: Transformer) -> Rows:
    """Every way to run the first window."""
    return losses(packed, FULL, CED, *REPLAYED)


def by_hand(model: Transformer, tokens: int, prefill: str, scored: int = SCORED) -> float:
    """The slow way: one cold prefill, then one token a step."""
    ids = some_ids(LENGTHS[-1] + 40)
    sequence = Sequence(model, new_cache(model, len(ids)))
    logits = [sequence.prefill(Prompt(ids=ids[:tokens]), mode=prefill, chunk=PAGE)[-1].logits[-1:]]
    logits += [sequence.append(ids[t : t + 1]).logits for t in range(tokens, tokens + scored - 1)]
    return float(torch.nn.functional.cross_entropy(torch.cat(logits).double(), ids[tokens : tokens + scored]))


@pytest.mark.parametrize("prefill", ["full", "ced"])
def test_one_pass_gives_what_cold_prefills_and_decoding_give(packed: Transformer, found: Rows, prefill: str) -> None:
    """To the bit: chunks fall alike, and short rows do not depend on their neighbours."""
    assert found[prefill] == [by_hand(packed, n, prefill) for n in LENGTHS]


def test_full_in_one_pass_is_full_a_length_at_a_time(packed: Transformer, found: Rows) -> None:
    assert found["full"] == [losses(packed, FULL, lengths=(n,))["full"][0] for n in LENGTHS]


def test_many_tokens_read_at_once_are_near_decoding(folder: Path) -> None:
    """Above 32 rows they share products, whose last bits differ; fp32 caches keep that from flipping a code."""
    own = ModelConfig.from_json(folder)
    model = opened(folder, own.replace(cache=replace(own.cache, main="fp32", index_key="fp32", window="fp32")))
    (at_once,) = losses(model, CED, lengths=(48,), scored=36, chunk=512)["ced"]
    assert at_once == pytest.approx(by_hand(model, 48, "ced", scored=36), abs=CLOSE)


def test_ced_is_the_same_beside_full_and_without_it(packed: Transformer, found: Rows) -> None:
    assert losses(packed, CED)["ced"] == found["ced"]
    assert all(a != b for a, b in zip(found["full"], found["ced"], strict=True))


def test_exact_replay_equals_a_cold_run_and_bounded_replay_does_not(found: Rows) -> None:
    for variant in REPLAYED:
        gaps = [abs(a - b) for a, b in zip(found[variant.name], found["ced"], strict=True) if a is not None]
        assert gaps
        if variant.replay == "exact":
            assert max(gaps) == 0, variant.name
        else:
            assert 10 * CLOSE < max(gaps) < 5, variant.name


def test_a_hit_that_is_not_adopted_has_no_loss(packed: Transformer, found: Rows) -> None:
    assert found["half exact"][:2] == [None, None]
    assert [hit_tokens(hit, 96, WINDOW, PAGE) for hit in HITS] == [32, 48, 80, 96]
    assert [hit_tokens(hit, 20, WINDOW, PAGE) for hit in HITS] == [None] * 4


def test_a_hit_reads_only_what_a_hit_brings(packed: Transformer) -> None:
    """What the pass left past the hit, in pages and in private state, does not reach the loss."""
    one = WindowPass(packed, some_ids(), LENGTHS, SCORED, PAGE)
    with torch.inference_mode():
        one.cold(want_full=False)
        before = one.after_hit(80, "half", "bounded")
        one._hits.clear()
        one.running.cache.pages.pool[32 // PAGE :] ^= 0x5A
        assert one.after_hit(80, "half", "bounded") == before


def test_loadings_are_other_models_of_the_same_weights(folder: Path, packed: Transformer, found: Rows) -> None:
    own = packed.config
    for loading in (Loading(bf16=True), Loading(pool=False)):
        model = opened(folder, loading.config(own))
        assert model.config != own and torch.equal(model.backbone.embed, packed.backbone.embed)
        assert losses(model, CED)["ced"] != found["ced"]
    assert opened(folder, Loading(bf16=True).config(own)).layout.bytes_per_token > 2 * packed.layout.bytes_per_token
    assert Loading().config(own) == own


def test_a_config_of_other_tensors_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="mtp"):
        load(folder, config=ModelConfig.from_json(folder).without("drafts"))


def test_windows_lie_inside_documents_and_apart() -> None:
    documents = [Document(name=f"d{i}", ids=torch.arange(n) + 1000 * i) for i, n in enumerate((95, 30, 200))]
    found = cut_windows(documents, 40, 100, scored=10, bos=BOS)
    assert found.stride == 10 and found.short == 1 and len(found) == 6 + 17
    for row, (name, start) in zip(found.ids, found.sources, strict=True):
        assert torch.equal(row[1:], torch.arange(start, start + 39) + 1000 * int(name[1]))
    assert cut_windows(documents, 40, 5, scored=10, bos=BOS).stride == 39
    few, again = (cut_windows(documents, 40, 5, scored=10, bos=BOS, seed=3) for _ in range(2))
    assert few.sources == again.sources and few.fingerprint() == again.fingerprint()
    assert len(set(few.sources)) == 5
    with pytest.raises(InputError, match="no document has the 500 tokens of a window, the longest of 3 has 201"):
        cut_windows(documents, 500, 5, scored=10, bos=BOS)


def test_every_window_begins_with_the_begin_token_and_has_no_other() -> None:
    """Wherever it is cut, and whether or not the document brought one."""
    body = torch.arange(120)
    bare, whole = body, torch.cat((torch.tensor([BOS]), body))
    cut = [cut_windows([Document(name="d", ids=ids)], 40, 100, scored=7, bos=BOS) for ids in (bare, whole)]
    assert cut[0].fingerprint() == cut[1].fingerprint() and cut[0].sources == cut[1].sources
    for found in cut:
        assert (found.ids[:, 0] == BOS).all() and (found.ids == BOS).sum() == len(found) == 12
        assert sorted(start for _, start in found.sources) == list(range(0, 82, 7))
        # What is scored after prompts of one length is scored once.
        scored = found.ids[:, 33:].flatten().tolist()
        assert len(scored) == len(set(scored)) == 12 * 7
    # The longest document that is one window.
    assert len(cut_windows([Document(name="d", ids=whole)], 121, 9, scored=7, bos=BOS)) == 1
    with pytest.raises(InputError, match="the longest of 1 has 121"):
        cut_windows([Document(name="d", ids=whole)], 122, 9, scored=7, bos=BOS)


def test_identical_variants_differ_by_nothing() -> None:
    rows = {w: [1.0 + w, 2.0 + w] for w in range(5)}
    one = Comparison(variant="a", against="b", at_most=0.0, both=True)
    found = difference({"a": rows, "b": dict(rows)}, one, (1, 2))
    assert found["largest"] == 0 and found["bar"]["reached"]
    assert all(s["mean"] == 0 and s["se"] == 0 for s in found["nats"].values())


def test_differences_are_paired_and_their_error_is_of_windows() -> None:
    ours = {0: [1.0, 5.0], 1: [2.0, None], 2: [4.0, 1.0]}
    theirs = {0: [0.5, 4.0], 1: [1.0, 9.0], 3: [0.0, 0.0]}
    found = difference({"a": ours, "b": theirs}, Comparison(variant="a", against="b", at_most=0.5), (1, 2))["nats"]
    assert found["1"] == summary([0.5, 1.0])
    assert found["2"] == {"mean": 1.0, "se": None, "prompts": 1}
    assert found["all"] | {"prompts": 2} == summary([0.75, 1.0]) and found["all"]["prompts"] == 3
    assert summary([1.0, 2.0, 3.0]) == {"mean": 2.0, "se": pytest.approx(1 / math.sqrt(3)), "prompts": 3}


def test_a_bar_over_nothing_is_not_reached() -> None:
    one = Comparison(variant="a", against="b", at_most=0.01)
    found = difference({"a": {0: [None], 1: [None]}, "b": {0: [1.0], 1: [2.0]}}, one, (8,))
    assert found["bar"]["reached"] is None and verdict(found) == "<= 0.01 + 2 se: not measured"
    # Where some length has prompts, those decide.
    rows = {"a": {0: [None, 3.0], 1: [None, 3.0]}, "b": {0: [1.0, 1.0], 1: [1.0, 1.0]}}
    found = difference(rows, one, (8, 9))
    assert found["bar"]["reached"] is False and verdict(found) == "<= 0.01 + 2 se: MISSED"


@pytest.mark.parametrize(
    ("as_plain", "emitted", "verifications", "reached"),
    [(True, 20, 10, True), (None, 20, 10, True), (False, 50, 10, False), (True, 19, 10, False), (True, 0, 0, None)],
)
def test_drafts_that_change_the_text_miss_their_bar(
    as_plain: bool | None, emitted: int, verifications: int, reached: bool | None
) -> None:
    tally = Tally(verifications=verifications, accepted=[5], emitted=emitted)
    row = draft_row("drafts", tally, bar=True, as_plain=as_plain)
    assert row["bar"]["reached"] is reached and row["first_prompt_as_plain_decoding"] is as_plain


@pytest.mark.parametrize(("mean", "spread", "reached"), [(0.02, 0.1, True), (0.02, 0.0, False), (-1.0, 0.0, True)])
def test_a_bar_allows_two_standard_errors(mean: float, spread: float, reached: bool) -> None:
    ours = {w: [mean + spread * (-1) ** w] for w in range(10)}
    none = {w: [0.0] for w in range(10)}
    one = Comparison(variant="a", against="b", at_most=0.01)
    assert difference({"a": ours, "b": none}, one, (8,))["bar"]["reached"] is reached


def test_every_row_is_compared_with_the_baseline() -> None:
    for config in (presets.load("tiny"), presets.load("tiny").without("compression")):
        rows = variants(config, plain=True)
        against = [c.variant for c in comparisons(rows) if c.against == BASELINE]
        assert sorted(against) == sorted(v.name for v in rows if v.name != BASELINE)
        asked = {(c.variant, c.against) for c in comparisons(rows)}
        assert (RELEASED, "plain weights") in asked
        assert ((RELEASED, "no candidate pool") in asked) == (config.candidate_source_layer_id >= 0)


SMALL = Settings(
    lengths=(32, 48),
    scored=SCORED,
    prompts=3,
    drafts=0,
    draft_tokens=4,
    chunk=PAGE,
    kernels="fast",
    page_tokens=PAGE,
)
TEXTS = [Document(name="one", ids=some_ids(400, seed=6))]
STAMP = {"date": "2026-01-02T03:04:05+00:00", "command": "rorqual lab quality"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Losses out of the ids alone, and which were asked for."""
    asked: list[tuple[int, list[str]]] = []

    def fake(model: Transformer, ids: torch.Tensor, lengths: tuple[int, ...], measured: list, **_: object) -> Rows:
        assert ids[0] == model.config.bos_token_id
        asked.append((int(ids[1]), [v.name for v in measured]))
        return {v.name: [(int(ids[n]) + len(v.name)) / 500 for n in lengths] for v in measured}

    monkeypatch.setattr("rorqual.analysis.quality.window_losses", fake)
    return asked


def test_a_study_of_a_model_and_its_plain_export(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_random(ModelConfig.from_json(folder), plain, seed=7, weights="plain")
    settings = replace(SMALL, lengths=(48,), prompts=2, drafts=1)
    document = run_quality(folder, TEXTS, settings, tmp_path / "out", plain=plain)
    json.dumps(document, allow_nan=False)
    rows = {row["name"]: row for row in document["variants"]}
    assert next(iter(rows)) == BASELINE and rows[BASELINE]["loss"]["all"]["prompts"] == 2
    assert rows["hit: half"]["loss"]["all"] == {"mean": None, "se": None, "prompts": 0}
    differences = {(d["variant"], d["against"]): d for d in document["differences"]}
    exact = differences["exact replay", RELEASED]
    assert exact["largest"] == 0 and exact["bar"]["reached"]
    assert 0 < differences[RELEASED, "plain weights"]["largest"] < 1
    (own, given) = document["drafts"]
    assert own["name"] == OWN_TEXT and own["first_prompt_as_plain_decoding"]
    assert own["tokens_a_verification"] == (own["tokens"] - 1) / own["verifications"]
    assert given["verifications"] == 4 and "bar" not in given
    assert document["prompts"] == {"48": 2, "all": 2} and document["kernels"] == "fast"
    text = log_text(document | STAMP)
    assert text.startswith("## 2026-01-02: quality of tiny\n")
    assert "`rorqual lab quality`: 2 windows, 2 prompts" in text and "fast kernels" in text
    assert "| first prompt as plain decoding |" in text
    for _, columns, lines in tables(document):
        assert all(len(line) == len(columns) and line[0] in text for line in lines)


def test_a_stopped_study_goes_on(folder: Path, tmp_path: Path, quick: list[tuple[int, list[str]]]) -> None:
    whole = run_quality(folder, TEXTS, SMALL, tmp_path / "whole")
    passes, out = list(quick), tmp_path / "out"
    quick.clear()

    def stop(passed: float, expected: float) -> None:
        assert 0 <= passed <= expected * (1 + 1e-9)
        if len(quick) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_quality(folder, TEXTS, SMALL, out, progress=stop)
    with (out / "partial.jsonl").open("a") as file:
        file.write('{"what": "bf16 caches, full", "num')  # what a kill in the middle of a line leaves
    document = run_quality(folder, TEXTS, SMALL, out)
    assert quick == passes, "each pass ran once"
    quick.clear()
    again = run_quality(folder, TEXTS, SMALL, out)
    assert not quick
    for key in whole.keys() - {"seconds"}:
        assert document[key] == again[key] == whole[key], key
    loss = {row["name"]: row["loss"] for row in document["variants"]}
    assert document["prompts"] == {"32": 3, "48": 3, "all": 6}
    assert loss[BASELINE]["all"]["prompts"] == 6 and loss["no candidate pool"]["all"]["prompts"] == 6
    assert "no plain export was given" in log_text(document | STAMP)


def test_a_folder_of_another_run_is_refused(folder: Path, tmp_path: Path, quick: list[tuple[int, list[str]]]) -> None:
    run_quality(folder, TEXTS, SMALL, tmp_path)
    kept = (tmp_path / "partial.jsonl").read_text()
    quick.clear()
    with pytest.raises(InputError, match="holds results of another run \\(its data differs\\); give a new folder"):
        run_quality(folder, [Document(name="one", ids=some_ids(400, seed=9))], SMALL, tmp_path)
    with pytest.raises(InputError, match="holds results of another run \\(its kernels differs\\)"):
        run_quality(folder, TEXTS, replace(SMALL, kernels="plain"), tmp_path)
    assert (tmp_path / "partial.jsonl").read_text() == kept and not quick


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (64, 32)}, "lengths: \\[64, 32\\] is not legal; legal: ascending"),
        ({"lengths": ()}, "lengths: \\[\\] is not legal"),
        ({"prompts": 1}, "prompts: 1 is not legal; legal: at least 2"),
        ({"chunk": 0}, "chunk: 0 is not legal"),
        ({"lengths": (1020,)}, "lengths: 1,020 tokens and the 5 after them are past the model's 1,024 positions"),
    ],
)
def test_illegal_settings_are_named(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_quality(folder, TEXTS, replace(SMALL, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
