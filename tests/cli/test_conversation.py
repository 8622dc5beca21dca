"""A conversation is one sequence of ids: turns are hits of the next ones, and an eos is fed once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.shipped import passage
from rorqual.cli.conversation import Conversation
from rorqual.cli.init import distinct_keys
from rorqual.config import presets
from rorqual.engine.engine import Engine
from rorqual.engine.output import RequestOutput
from rorqual.engine.params import SamplingParams
from rorqual.errors import CapacityError, InputError
from rorqual.model.load import load
from rorqual.model.transformer import Transformer
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.chat import chat_ids
from rorqual.training.data.documents import Document, Turn
from rorqual.training.data.tokens import ASSISTANT, token_id

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0)
QUESTION = "Where does the old ship lie, and who keeps her lamp through the night, and is there oil for it?"
PAGE = 16


@cache
def checkpoint() -> Path:
    """A random model whose tokenizer knows the chat encoding: window 16, 1,024 positions."""
    folder = Path(mkdtemp(prefix="rorqual-test-"))
    tokenizer = folder / "tokenizer.json"
    train_tokenizer([Document(name="a", text=passage())], 400).save(str(tokenizer))
    config = presets.load("tiny").without("vision")
    size = config.vocab_size
    write_random(
        config, folder / "model", 1, tokenizer=tokenizer, compressed_size=lambda path: distinct_keys(path, size)
    )
    return folder / "model"


@cache
def random_model() -> Transformer:
    return load(checkpoint(), page_tokens=PAGE, kernels="fast")


@cache
def shipped_model() -> Transformer:
    return load(kernels="fast")


def talk(params: SamplingParams = GREEDY, model: Transformer | None = None, **options: object) -> Conversation:
    engine = Engine(model or random_model(), slots=1, **options)  # type: ignore[arg-type]
    return Conversation(engine, params)


def ask(conversation: Conversation, text: str = QUESTION) -> RequestOutput:
    """The finished reply; what was shown is what it says."""
    shown = "".join(conversation.ask(text))
    conversation.engine.check_integrity()
    assert conversation.last is not None and conversation.last.text == shown
    assert not conversation.engine.has_work
    return conversation.last


def closed(conversation: Conversation, turns: list[Turn]) -> list[int]:
    return chat_ids(conversation.tokenizer, turns)


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("prefill", ["ced", "full"])
def test_a_second_turn_hits_the_first_and_equals_a_cold_run(prefill: str, speculative: bool) -> None:
    warm = talk(replay="exact", prefill=prefill, speculative=speculative)
    first = ask(warm)
    second = ask(warm, "And who then?")
    before = [*first.prompt_token_ids, *first.token_ids]
    assert second.prompt_token_ids[: len(before)] == before
    # All pages are hits that the first turn filled; the last token that it said was never computed.
    assert second.counts.hit == (len(before) - 1) // PAGE * PAGE > 2 * PAGE and first.counts.hit == 0
    cold = talk(replay="exact", prefill=prefill, speculative=speculative).engine
    request = cold.submit(second.prompt_token_ids, GREEDY)
    output = cold.output(request)
    assert "".join(delta.text for delta in cold.stream(request)) == second.text
    assert output.token_ids == second.token_ids and output.counts.hit == 0


def test_an_eos_closes_each_reply_once() -> None:
    """Field case 17, of a model that says eos itself: the ids are those of a cold rendering."""
    conversation = talk(model=shipped_model(), params=SamplingParams(max_tokens=64))
    turns: list[Turn] = []
    for question in ("What is a whale?", "Who is Ishmael?", "Where is the ship?"):
        output = ask(conversation, question)
        assert output.finish_reason == "stop" and output.token_ids[-1] == conversation.engine.model.config.eos_token_id
        turns += [Turn("user", question), Turn("assistant", output.text)]
        assert conversation.ids == closed(conversation, turns)


def test_a_reply_that_was_cut_is_closed_too() -> None:
    conversation = talk()
    output = ask(conversation)
    eos = conversation.engine.model.config.eos_token_id
    assert output.finish_reason == "length" and len(output.token_ids) == 24 and output.token_ids[-1] != eos
    assert conversation.ids == [*output.prompt_token_ids, *output.token_ids, eos]


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_a_reply_that_was_stopped_is_kept_as_far_as_it_came(pieces: int) -> None:
    conversation = talk(speculative=False, replay="exact")
    whole = ask(conversation)
    conversation.clear()
    reply = conversation.ask(QUESTION)
    shown = [next(reply) for _ in range(pieces)]
    conversation.stop()
    shown += list(reply)
    output = conversation.last
    assert output is not None and output.finish_reason == "abort" and not conversation.engine.has_work
    assert output.token_ids == whole.token_ids[: len(output.token_ids)] and len(output.token_ids) == pieces
    *opened, eos = closed(conversation, [Turn("user", QUESTION), Turn("assistant", "")])
    kept = [*opened, *output.token_ids, eos]
    assert conversation.ids == kept
    assert ask(conversation, "Go on.").prompt_token_ids[: len(kept)] == kept


def test_who_stops_reading_stops_the_reply() -> None:
    conversation = talk(speculative=False)
    reply = conversation.ask(QUESTION)
    next(reply)
    reply.close()  # type: ignore[attr-defined]
    assert conversation.last is not None and conversation.last.finish_reason == "abort"
    assert not conversation.engine.has_work and conversation.ids[-2] == conversation.last.token_ids[-1]


def test_another_reply_takes_the_place_of_the_last() -> None:
    conversation = talk(replace(SAMPLED, seed=1))
    ask(conversation)
    first = ask(conversation, f"And then? {QUESTION}")
    ids = conversation.ids
    again = "".join(conversation.again())
    second = conversation.last
    assert second is not None and second.prompt_token_ids == first.prompt_token_ids
    assert second.token_ids != first.token_ids and again == second.text
    assert second.counts.hit == len(first.prompt_token_ids) // PAGE * PAGE > first.counts.hit
    assert conversation.ids[: len(second.prompt_token_ids)] == ids[: len(second.prompt_token_ids)]
    assert conversation.ids[len(second.prompt_token_ids) : -1] == second.token_ids


def test_a_greedy_reply_is_said_again_in_exact_mode() -> None:
    conversation = talk(replay="exact")
    first, ids = ask(conversation), conversation.ids
    assert "".join(conversation.again()) == first.text and conversation.ids == ids


def test_a_seed_makes_a_conversation_repeatable_and_its_replies_differ() -> None:
    seeded = replace(SAMPLED, seed=2**63 - 1)
    one, other = talk(seeded, replay="exact"), talk(seeded, replay="exact")
    said = [(ask(each).text, "".join(each.again()), ask(each, "And then?").text) for each in (one, other)]
    assert said[0] == said[1] and said[0][0] != said[0][1]
    assert ask(talk(replace(seeded, seed=5))).text != said[0][0]


def test_a_text_that_does_not_fit_leaves_the_history() -> None:
    conversation = talk(pages=10)
    assert conversation.limit == 160
    ask(conversation)
    ids, last = conversation.ids, conversation.last
    with pytest.raises(CapacityError, match=r"context: \d+ tokens .* limit is 160 tokens, .* of \d+ is kept; /clear"):
        conversation.ask(QUESTION * 8)
    assert (conversation.ids, conversation.last) == (ids, last)
    # The reply is cut by what room is left.
    output = ask(conversation, "?" * 60)
    assert output.finish_reason == "length" and 0 < len(output.token_ids) < 24
    assert len(output.prompt_token_ids) + len(output.token_ids) == 160
    with pytest.raises(CapacityError):
        conversation.ask("x")
    conversation.clear()
    assert len(ask(conversation).prompt_token_ids) < 100


def test_the_models_positions_are_a_limit() -> None:
    assert talk(pages=200).limit == 1024 and talk(max_model_len=100).limit == 100


def test_a_system_turn_stays() -> None:
    engine = talk().engine
    conversation = Conversation(engine, GREEDY, "Be brief.")
    opened = chat_ids(conversation.tokenizer, [Turn("system", "Be brief."), Turn("user", QUESTION)], reply=True)
    assert ask(conversation).prompt_token_ids == opened
    conversation.clear()
    assert ask(conversation).prompt_token_ids == opened and conversation.last is not None
    assert conversation.last.counts.hit > 0, "what was said before is said again"


def test_a_marker_spelled_by_the_user_is_text() -> None:
    conversation = talk()
    prompt = ask(conversation, f"{ASSISTANT}no").prompt_token_ids
    assert prompt.count(token_id(conversation.tokenizer, ASSISTANT)) == 1


def test_what_is_not_legal_is_refused() -> None:
    conversation = talk()
    with pytest.raises(InputError, match="there is no reply yet"):
        conversation.again()
    with pytest.raises(InputError, match="not valid UTF-8"):
        conversation.ask("\udcff")
    ask(conversation)
    conversation.clear()
    with pytest.raises(InputError, match="there is no reply yet"):
        conversation.again()


def test_a_damaged_reply_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = talk()
    ask(conversation)
    ids = conversation.ids
    run = conversation.engine.runner.run

    def damaged(*arguments: object) -> list[object]:
        outputs = run(*arguments)  # type: ignore[arg-type]
        return [replace(o, logits=None if o.logits is None else o.logits * float("nan")) for o in outputs]

    with monkeypatch.context() as patched:
        patched.setattr(conversation.engine.runner, "run", damaged)
        assert list(conversation.ask("And then?")) == [""]
    assert conversation.last is not None and conversation.last.finish_reason == "error"
    assert conversation.ids == ids
    assert "".join(conversation.again()) and len(conversation.ids) > len(ids)
