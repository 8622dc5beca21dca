"""A store as its user asks for it: options, `LLM`, who closes what, and what a folder of somebody else is."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
from engine_stores import DictStore
from models import golden, random_ids, tiny

from rorqual.engine.generate import generate
from rorqual.engine.identity import store_identity
from rorqual.engine.llm import LLM
from rorqual.engine.params import SamplingParams
from rorqual.engine.storing import StoreOptions
from rorqual.errors import CapacityError, InputError
from rorqual.store.opener import open_store

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
IDS = random_ids(70, seed=4)


def restored(llm: LLM) -> int:
    return llm.generate(IDS, GREEDY)[0].counts.restored


def test_nothing_is_opened_where_nothing_is_asked_for(tmp_path: Path) -> None:
    model = tiny("fast")
    assert StoreOptions().open(model) is None
    with StoreOptions().opened(model) as store:
        assert store is None
    for options, name in (
        (StoreOptions(disk="1GiB"), "disk"),
        (StoreOptions(ttl=3.0), "ttl"),
        (StoreOptions(fsync=True), "fsync"),
    ):
        with pytest.raises(InputError, match=f"{name}: there is no store; legal: with a folder, or memory"):
            options.open(model)
    with pytest.raises(InputError, match="memory must be a number of bytes"):
        StoreOptions(memory="much").open(model)
    with pytest.raises(InputError, match="ttl: 0 is not legal"):
        StoreOptions(folder=tmp_path, ttl=0).open(model)
    with pytest.raises(InputError, match="fsync: there is no folder for it"):
        StoreOptions(memory="1MiB", fsync=True).open(model)


def test_bounds_are_those_of_the_tiers(tmp_path: Path) -> None:
    model = tiny("fast")
    size = store_identity(model).page_bytes
    with StoreOptions(folder=str(tmp_path), memory=7 * size, disk="1MiB", ttl=60, fsync=True).opened(model) as store:
        assert store is not None and store.stat().capacity is not None
        assert 7 * size < store.stat().capacity <= 7 * size + 2**20
        assert store.put(b"k" * 32, bytes(size)) and store.get(b"k" * 32) == bytes(size)
    assert store.get(b"k" * 32) is None, "it is closed"


def test_an_llm_closes_the_store_that_it_opened(tmp_path: Path) -> None:
    model = tiny("fast")
    with LLM(model, store=tmp_path, pages=16, slots=1) as llm:
        assert restored(llm) == 0
        with pytest.raises(InputError, match="open"):
            LLM(model, store=str(tmp_path), pages=16, slots=1)
    assert restored(llm) == 0, "it goes on without"
    with LLM(model, store=StoreOptions(folder=tmp_path, memory="1MiB"), pages=16, slots=1) as llm:
        assert restored(llm) == 64
    llm.close()


def test_an_llm_that_nobody_closes_or_that_cannot_be_made_lets_go_of_its_store(tmp_path: Path) -> None:
    model = tiny("fast")
    llm = LLM(model, store=tmp_path, pages=16, slots=1)
    restored(llm)
    del llm
    gc.collect()
    with pytest.raises(CapacityError):
        LLM(model, store=tmp_path, memory="1B", slots=1)
    with LLM(model, store=tmp_path, pages=16, slots=1) as llm:
        assert restored(llm) == 64


def test_a_store_of_the_callers_stays_open() -> None:
    store = DictStore(tiny("fast"))
    with LLM(tiny("fast"), store=store, pages=16, slots=1) as llm:
        restored(llm)
    assert len(store.pages) == 4
    assert restored(LLM(tiny("fast"), store=store, pages=16, slots=1)) == 64


def test_pages_of_another_model_are_told_of_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, told = [], "also holds pages of other models or formats, left alone"
    for model in (golden("fp32-text", "fast"), tiny("fast"), golden("fp32-text", "fast")):
        with (
            caplog.at_level(logging.INFO, logger="rorqual"),
            LLM(model, store=tmp_path, pages=16, slots=1, speculative=False) as llm,
        ):
            found.append((restored(llm), told in caplog.text))
    assert found == [(0, False), (0, True), (64, True)]


def test_one_generation_over_a_store(tmp_path: Path) -> None:
    model, texts = tiny("fast"), []
    for _ in range(2):
        store = open_store(tmp_path, store_identity(model))
        result = generate(model, IDS, max_tokens=4, store=store)
        texts.append("".join(result))
        hits = store.stat().hits
        store.close()
    assert hits == 4 and len(result.ids) == 4 and result.stats.layer_tokens < 70 * model.config.num_hidden_layers // 2
