"""Text as it comes: stop texts over tokens, characters over tokens (field cases 47, 48)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rorqual.checkpoint.shipped import shipped_model
from rorqual.engine.text import Detokenizer, StopText

TEXTS = (
    "whale 🐋 of the sea",
    "大きな鯨が泳ぐ",
    "e\u0301 and é\n\nnew",
    "👩‍👩‍👧‍👦 family",
    "a\r\nb\tc",
    " lead and trail ",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_text_and_no_character_is_torn(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.add(token) for token in ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.flush() == text == tokenizer.decode(ids)


@given(st.text(max_size=40))
def test_any_text_comes_through(text: str) -> None:
    own = Tokenizer.from_file(str(shipped_model() / "tokenizer.json"))
    ids = own.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(own)
    assert "".join(detokenizer.add(token) for token in ids) + detokenizer.flush() == own.decode(ids)


def test_a_cut_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🐋", add_special_tokens=False).ids
    assert len(ids) > 1, "the test needs a character of several tokens"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert "\ufffd" in detokenizer.flush()


def test_a_long_text_costs_the_same_a_token(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode("the sea " * 500, add_special_tokens=False).ids:
        detokenizer.add(token)
        assert len(detokenizer._ids) < 8


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By looking at every prefix of the whole text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("abA.", min_size=1, max_size=4), max_size=12),
    st.lists(st.text("abA.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_is_found_however_the_text_is_cut(deltas: list[str], stops: list[str]) -> None:
    """Field case 47: nothing of a stop leaks, and a near miss is released."""
    stop, shown = StopText(stops), ""
    text, found = expected("".join(deltas), stops)
    for delta in deltas:
        shown += stop.add(delta)
        assert text.startswith(shown)
        if stop.found is not None:
            break
    assert (shown + stop.flush(), stop.found) == (text, found)


def test_of_two_stops_one_a_prefix_of_the_other_the_first_complete_ends_the_text() -> None:
    stop = StopText(["END", "ENDING"])
    assert (stop.add("the EN"), stop.add("DING"), stop.found) == ("the ", "", "END")


def test_a_near_miss_is_released_at_the_end() -> None:
    stop = StopText(["\n\nHuman:"])
    assert (stop.add("text\n\nHum"), stop.flush(), stop.found) == ("text", "\n\nHum", None)
