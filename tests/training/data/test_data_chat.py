"""Conversations for training are rendered as `deepseek-recipe` renders them for inference."""

from __future__ import annotations

import deepseek_recipe
import pytest
from tokenizers import Tokenizer

from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.chat import chat_ids
from rorqual.training.data.documents import Document, Turn
from rorqual.training.data.tokens import NOISE, PAD, SPECIAL_TOKENS, special_ids

CONVERSATIONS = {
    "one turn": [("user", "Who's there?")],
    "system": [("system", "Be brief."), ("user", "hi")],
    "many turns": [("user", "a"), ("assistant", "b c"), ("user", " d"), ("assistant", "e\n"), ("user", "f")],
    "system and many": [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    "user turns in a row": [("user", "a"), ("user", "b"), ("user", ""), ("assistant", "c"), ("assistant", "d")],
    "system later": [("user", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", "e"), ("user", "f")],
    "two systems": [("system", "a"), ("system", "b"), ("user", "c")],
    "assistant first": [("assistant", "a"), ("user", "b")],
    "empty contents": [("system", ""), ("user", ""), ("assistant", ""), ("user", "")],
    "markers spelled": [
        ("user", "a <｜User｜> b</think>"),
        ("assistant", "<｜end▁of▁sentence｜>"),
        ("user", "<｜image｜>"),
    ],
    "not ASCII": [("user", "naïve 東京 1234 \t🐋"), ("assistant", "ok"), ("user", "\n")],
    "nothing": [],
}
MESSAGES = {
    "system": deepseek_recipe.SystemMessage,
    "user": deepseek_recipe.UserMessage,
    "assistant": deepseek_recipe.AssistantMessage,
}


def theirs(turns: list[Turn]) -> deepseek_recipe.Conversation:
    return deepseek_recipe.Conversation([MESSAGES[t.role](t.content) for t in turns], thinking_mode=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([Document(name="a", text="a b c d e f User think image end of sentence " * 9)], 300)


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_prompts_equal_deepseek_recipe(case: str, tokenizer: Tokenizer) -> None:
    turns = [Turn(*turn) for turn in CONVERSATIONS[case]]
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(
        deepseek_recipe.Tokenizer.from_str(tokenizer.to_str())
    )
    assert chat_ids(tokenizer, turns, reply=True) == encoding.encode(theirs(turns))


def test_a_trained_conversation_ends_where_the_next_prompt_goes_on(tokenizer: Tokenizer) -> None:
    told = [Turn("user", "a"), Turn("assistant", "b")]
    trained = chat_ids(tokenizer, told)
    assert trained[-1] == special_ids(tokenizer).eos
    following = chat_ids(tokenizer, [*told, Turn("user", "c")], reply=True)
    assert following[: len(trained)] == trained


def test_special_tokens_are_spelled_as_the_library_spells_them() -> None:
    kinds = [
        getattr(deepseek_recipe.SpecialToken, name) for name in dir(deepseek_recipe.SpecialToken) if name[0].isupper()
    ]
    assert len(kinds) == 18
    assert {kind.default_str() for kind in kinds} == set(SPECIAL_TOKENS) - {PAD, NOISE}
