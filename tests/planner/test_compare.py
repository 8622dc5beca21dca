"""Models side by side: exact sizes, exact inverses, and nothing said beyond what a model allows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.errors import InputError
from rorqual.planner.compare import CONTEXTS, RATIO_COLUMNS, compare, fits, ratio, size
from rorqual.planner.families import BF16, Family, from_config, load, names
from rorqual.planner.table import Table

QUICK = settings(max_examples=50, deadline=None, derandomize=True)
MODEL = st.sampled_from(names()).map(load)
TOKENS = st.none() | st.integers(1, 2**21)
STORAGE = st.sampled_from((None, BF16))


def tables(models: list[str], contexts: list[int]) -> dict[str, Table]:
    return {table.name: table for table in compare([load(name) for name in models], contexts)}


def test_the_quoted_savings() -> None:
    """Issue figures: 3.95 against V4, 39.5 against V3 in FP8, 437.2 against V1."""
    ours = load("v4.1-flash")
    assert ratio(load("deepseek-v4-flash"), ours) == Fraction("3514.25") / 890
    assert load("deepseek-v3").token_bytes("fp8") / ours.token_bytes() == Fraction(35_136, 890)
    against_v1 = ratio(load("deepseek-llm-67b"), ours)
    assert against_v1 is not None
    assert round(float(against_v1), 1) == 437.2


def test_summary() -> None:
    rows = tables(["v4.1-flash", "deepseek-v3.2", "mistral-7b-v0.1"], [4096])["compare"].records()
    assert rows[0] == {
        "model": "v4.1-flash",
        "attention": "CSA2",
        "native storage": "packed",
        "native [B a token]": 890,
        "bf16 [B a token]": 3200,
        "native fixed [B]": 2_703_360,
        "bf16 fixed [B]": 5_242_880,
        "positions [tokens]": 1_048_576,
    }
    assert (rows[1]["native storage"], rows[1]["native [B a token]"], rows[1]["native fixed [B]"]) == ("fp8", 48_068, 0)
    assert (rows[2]["native [B a token]"], rows[2]["native fixed [B]"]) == (0, 536_870_912)


def test_ratios_a_token() -> None:
    found = tables(["v4.1-flash", "deepseek-v3.2", "mistral-7b-v0.1"], [4096])["ratios"]
    assert found.columns == ("model", *RATIO_COLUMNS)
    assert found.rows[0] == ("v4.1-flash", 1, 1, 1, 1)
    assert found.rows[1] == ("deepseek-v3.2", 48_068 / 890, 890 / 48_068, 85_888 / 3200, 3200 / 85_888)
    assert found.rows[2] == ("mistral-7b-v0.1", None, None, None, None)
    assert found.note
    assert tables(["v4.1-flash"], [4096])["ratios"].note == ""


def test_totals_and_the_positions_of_each() -> None:
    found = tables(["v4.1-flash", "deepseek-v4-flash", "deepseek-llm-67b"], [4096, 1_000_000])["totals"]
    rows = {(row[0], row[1]): row[2:] for row in found.rows}
    ours = 890 * 4096 + 2_703_360
    assert rows[4096, "v4.1-flash"][:2] == (ours, 3200 * 4096 + 5_242_880)
    flash = 21 * 652 * 1024 + 20 * 584 * 32 + 43 * 128 * 584
    assert rows[4096, "deepseek-v4-flash"][0] == flash
    assert rows[4096, "deepseek-v4-flash"][2:4] == (flash / ours, ours / flash)
    assert rows[4096, "deepseek-llm-67b"][0] == 389_120 * 4096
    assert rows[1_000_000, "v4.1-flash"][0] == 890_000_000 + 2_703_360
    assert rows[1_000_000, "deepseek-llm-67b"] == (None,) * 6
    assert found.note == "Blank beyond a model's own max_position_embeddings: deepseek-llm-67b 4,096."


def test_a_first_model_that_is_too_short_leaves_the_ratios_blank() -> None:
    found = tables(["deepseek-llm-67b", "v4.1-flash"], [8192])["totals"]
    assert found.rows[1] == (8192, "v4.1-flash", 890 * 8192 + 2_703_360, 3200 * 8192 + 5_242_880, *[None] * 4)


def test_groups_add_up_to_the_summary() -> None:
    found = tables(list(names()), [1000])
    groups = found["groups"].records()
    for row in found["compare"].records():
        for storage, column in ((row["native storage"], "native"), (BF16, "bf16")):
            mine = [group for group in groups if group["model"] == row["model"] and group["storage"] == storage]
            grows: Any = [group["grows [B a token]"] for group in mine]
            fixed: Any = [group["fixed [B]"] for group in mine]
            assert sum(grows) == row[f"{column} [B a token]"]
            assert sum(fixed) == row[f"{column} fixed [B]"]
            assert all(group["formula"] for group in mine)


def test_every_storage_is_sourced() -> None:
    found = tables(["deepseek-v3", "v4.1-flash"], [1000])["storages"].records()
    assert [(row["model"], row["storage"], row["grows [B a token]"]) for row in found] == [
        ("deepseek-v3", "bf16", 70_272),
        ("deepseek-v3", "fp8", 35_136),
        ("v4.1-flash", "packed", 890),
        ("v4.1-flash", "bf16", 3200),
    ]
    assert all(row["stored so by"] for row in found)
    assert [row["config from"] is None for row in found] == [False, False, True, True]


@given(one=MODEL, other=MODEL, tokens=TOKENS, storage=STORAGE)
@QUICK
def test_comparing_is_antisymmetric(one: Family, other: Family, tokens: int | None, storage: str | None) -> None:
    there, back = ratio(one, other, tokens, storage), ratio(other, one, tokens, storage)
    if there is None or back is None:
        assert there is back
        assert not (size(one, tokens, storage) and size(other, tokens, storage))
    else:
        assert there * back == 1
        assert math.isclose(math.log(there), -math.log(back), abs_tol=1e-12)


@given(one=MODEL, other=MODEL, third=MODEL, tokens=st.integers(1, 2**21), storage=STORAGE)
@QUICK
def test_ratios_chain(one: Family, other: Family, third: Family, tokens: int, storage: str | None) -> None:
    whole, first, second = (ratio(*pair, tokens, storage) for pair in ((one, third), (one, other), (other, third)))
    assert whole is not None and first is not None and second is not None
    assert whole == first * second


@given(one=MODEL, storage=STORAGE, tokens=st.integers(0, 2**20), more=st.integers(0, 2**20))
@QUICK
def test_sizes_never_shrink(one: Family, storage: str | None, tokens: int, more: int) -> None:
    assert size(one, tokens, storage) <= size(one, tokens + more, storage)


def test_a_config_without_positions_allows_every_context() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}
    unbounded = from_config(config, "some")
    assert fits(unbounded, 10**12)
    totals = compare([unbounded], [10**12])[2]
    assert totals.rows[0][2] == 4 * 10**12


@pytest.mark.parametrize(
    ("models", "contexts", "message"),
    [
        ([], [1], "compare needs one model or more; got none"),
        (["tiny"], [], "contexts must be one number of tokens or more; got none"),
        (["tiny"], [0], "contexts must be integers of 1 or more; got 0"),
        (["tiny"], [1.5], "contexts must be integers of 1 or more; got 1.5"),
        (["tiny"], [True], "contexts must be integers of 1 or more; got True"),
    ],
)
def test_illegal_comparisons(models: list[str], contexts: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        compare([load(name) for name in models], contexts)
    assert str(caught.value) == message


def test_a_context_that_no_model_reaches_is_refused() -> None:
    limit = r"max_position_embeddings of qwen3-8b, the largest here, is 40,960\); got 40,961"
    with pytest.raises(InputError, match=limit):
        compare([load("llama-2-7b"), load("qwen3-8b")], [4096, 40_961])


def test_default_contexts_suit_this_model() -> None:
    totals = compare([load("v4.1-flash")])[2]
    assert [row[0] for row in totals.rows] == list(CONTEXTS) == [4096, 32_768, 131_072, 1_048_576]
    assert totals.note == ""
    assert [row[0] for row in compare([load("qwen3-8b")])[2].rows] == [4096, 32_768]
    assert [row[0] for row in compare([load("tiny")])[2].rows] == [1024]
