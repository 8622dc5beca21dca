"""`rorqual chat` as its user sees it: by a script of lines, and in a terminal."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import ROOT, RUN, Terminal

from rorqual.checkpoint.random import write_random
from rorqual.checkpoint.shipped import passage
from rorqual.cli import main
from rorqual.cli.chat import COMMANDS
from rorqual.cli.conversation import Conversation
from rorqual.cli.init import distinct_keys
from rorqual.config import presets
from rorqual.engine.engine import Engine
from rorqual.engine.params import SamplingParams
from rorqual.engine.published import find_document, read_document
from rorqual.model.load import load
from rorqual.training.data.bpe import train_tokenizer
from rorqual.training.data.documents import Document

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer knows the chat encoding; it hardly ever ends a reply by itself."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = folder / "tokenizer.json"
    train_tokenizer([Document(name="a", text=passage())], 400).save(str(tokenizer))
    config = presets.load("tiny").without("vision").replace(max_position_embeddings=4096)
    size = config.vocab_size
    write_random(
        config, folder / "tiny", 1, tokenizer=tokenizer, compressed_size=lambda path: distinct_keys(path, size)
    )
    return folder / "tiny"


@pytest.fixture(autouse=True)
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines of this test write."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "rorqual"


@pytest.fixture
def script(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Script:
    return Script(model, monkeypatch, capsys)


class Script:
    """Runs `rorqual chat` on lines of standard input; (what it said, what it complained of)."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        self.model, self._patch, self._capsys = model, monkeypatch, capsys

    def __call__(self, *lines: str, options: tuple[str, ...] = (), code: int = 0) -> tuple[str, str]:
        self._patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        arguments = ["--model", str(self.model), "--kernels", "fast", "--max-tokens", "6", *options]
        assert main(["chat", *arguments]) == code
        captured = self._capsys.readouterr()
        said = captured.err.splitlines(keepends=True)
        plans = [line for line in said if line.startswith("rorqual: engine: ")]
        assert len(plans) == 1 or code, "an engine says what it allocates, once"
        return captured.out, "".join(line for line in said if line not in plans)


def replies(model: Path, *texts: str, new: int = 6) -> list[str]:
    """What a conversation says to these turns."""
    conversation = Conversation(Engine(load(model, kernels="fast"), slots=1), SamplingParams(max_tokens=new))
    return ["".join(conversation.ask(text)) for text in texts]


def test_each_line_is_a_turn_and_nothing_but_replies_is_printed(script: Script, published: Path) -> None:
    out, err = script("Call me.", "", "   ", "  And then?  ")
    assert out == "".join(f"{text}\n" for text in replies(script.model, "Call me.", "And then?"))
    assert err.splitlines() == ["rorqual: the reply was cut after 6 tokens, by --max-tokens"] * 2
    assert list(published.iterdir()) == []


def test_quit_ends_it_wherever_it_stands(script: Script) -> None:
    assert script("/quit ", "Call me.") == ("", "")


def test_a_command_is_no_turn(script: Script) -> None:
    out, err = script("/help", "/dance now", "/regenerate", "Call me.", "/clear", "/regenerate", "Call me.", " /help")
    said = replies(script.model, "Call me.")[0]
    assert all(name in out for name in COMMANDS)
    assert out.count(f"{said}\n") == 2, "a cleared conversation begins anew"
    assert out.endswith(replies(script.model, "Call me.", "/help")[1] + "\n"), "a space in front makes it a turn"
    assert f"rorqual: /dance: no such command; the commands are {', '.join(COMMANDS)}\n" in err
    assert err.count("rorqual: /regenerate: there is no reply yet\n") == 2


def test_regenerate_says_another_one_and_warns_the_greedy(script: Script) -> None:
    out, _ = script("Call me.", "/regenerate", options=("--replay", "exact"))
    first, notice, second = out.split("\n")[:3]
    assert first == second == replies(script.model, "Call me.")[0] and "expect the same reply" in notice
    out, _ = script("Call me.", "/regenerate", options=("--temperature", "1", "--seed", "3"))
    first, second = out.split("\n")[:2]
    assert first != second and "expect" not in out
    assert out == script("Call me.", "/regenerate", options=("--temperature", "1", "--seed", "3"))[0]


def test_stats_are_of_the_last_reply(script: Script) -> None:
    out, _ = script("/stats", "x " * 150, "Why?", "/stats", options=("--no-speculative",))
    empty, full = out.split("context and pools")[0], out.split("context and pools")[1]
    assert "last reply" not in empty and "last reply" in full

    def value(name: str) -> str:
        found = re.findall(rf"^{name} +(.*?) *$", out, re.MULTILINE)
        assert found, name
        return str(found[-1])

    prompt, hit = int(value("prompt tokens")), int(value("of these hit"))
    assert hit == prompt // 128 * 128 >= 256 and value("of these replayed") == "16"
    assert (value("new tokens"), value("finish reason")) == ("6", "length")
    assert int(value("rows computed")) == prompt - hit + 16 + 5
    assert float(value("tokens a second after it")) > 0 and value("acceptance by position") == "-"
    assert int(value("history, tokens")) == prompt + 6 + 1
    assert (value("pages used"), value("slots free")) == ("0", "1 of 1") and int(value("pages cached")) >= 2


def test_a_conversation_is_found_again_by_the_next_process(script: Script, tmp_path: Path) -> None:
    lines, kept = ("x " * 150, "Why?", "/stats"), ("--no-speculative", "--store", str(tmp_path / "kept"))
    runs = [script(*lines, options=kept)[0], script(*lines[:1], *lines[2:], options=kept)[0]]
    tokens = [re.findall(r"^of these from the store +(\d+)", out, re.MULTILINE) for out in runs]
    assert tokens == [["0"], ["256"]]
    assert runs[1].split("\n")[0] == runs[0].split("\n")[0], "greedy, and what was restored is what was computed"
    assert int(re.findall(r"^pages in the store +(\d+)", runs[1], re.MULTILINE)[0]) >= 2


def test_what_does_not_fit_is_one_line_and_the_talk_goes_on(script: Script) -> None:
    out, err = script("Call me.", "x " * 5000, "And then?")
    assert out == "".join(f"{text}\n" for text in replies(script.model, "Call me.", "And then?"))
    (line,) = [line for line in err.splitlines() if "context" in line]
    assert re.fullmatch(r"rorqual: context: \d{1,2},\d{3} tokens .* limit is 4,096 tokens, .*/clear begins anew", line)


def test_a_reply_that_fills_the_context_says_so(script: Script) -> None:
    _, err = script("Call me.", options=("--memory", "1", "--max-tokens", "9"), code=2)
    assert len(err.splitlines()) == 1 and "budget" in err
    out, err = script("?" * 4070, options=("--max-tokens", "100"))
    assert "by the context's limit of 4,096" in err and out.strip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "0"), "max_tokens: 0 is not legal"),
        (("--temperature", "-1"), "temperature: -1.0 is not legal"),
        (("--replay", "never"), "replay: 'never' is not one of bounded, exact"),
        (("--prefill", "half"), "prefill: 'half' is not one of ced, full"),
        (("--memory", "much"), "memory must be a number of bytes"),
        (("--model", "nowhere"), "model: nowhere is not a folder"),
    ],
)
def test_options_that_are_not_legal_are_one_line(script: Script, options: tuple[str, ...], message: str) -> None:
    out, err = script("Call me.", options=options, code=2)
    assert message in err and len(err.splitlines()) == 1 and not out


def test_a_model_without_the_markers_is_refused(tmp_path: Path, capsys: Capture) -> None:
    config = presets.load("tiny")
    size = config.vocab_size
    write_random(config, tmp_path / "bytes", 1, compressed_size=lambda path: distinct_keys(path, size))
    assert main(["chat", "--model", str(tmp_path / "bytes")]) == 2
    assert "tokenizer: has no token" in capsys.readouterr().err


def test_an_interrupt_stops_the_reply_alone(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    pieces = Conversation._pieces
    asked: list[Conversation] = []

    def interrupted(self: Conversation, *rest: object) -> Iterator[str]:
        asked.append(self)
        for at, text in enumerate(pieces(self, *rest)):  # type: ignore[arg-type]
            yield text
            if at == 2 and len(asked) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Conversation, "_pieces", interrupted)
    out, _ = script("Call me.", "And then?", options=("--max-tokens", "200", "--no-speculative"))
    whole = replies(script.model, "Call me.", new=200)[0]
    stopped, after = out.split("\n")[:2]
    assert 0 < len(stopped) < len(whole) / 4 and whole.startswith(stopped) and after
    assert asked[0] is asked[1] and asked[1].last is not None
    assert stopped in asked[1].tokenizer.decode(asked[1].last.prompt_token_ids), "what was said stays"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_before_the_first_step_stops_the_reply(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Engine.submit

    def interrupted(*arguments: object, **options: object) -> str:
        signal.raise_signal(signal.SIGINT)
        return submit(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "submit", interrupted)
        assert script("Call me.", "And then?")[0] == "\n\n"


def test_a_second_interrupt_ends_the_program(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object) -> Iterator[str]:
        signal.raise_signal(signal.SIGINT)
        yield "a"
        signal.raise_signal(signal.SIGINT)
        yield "b"

    monkeypatch.setattr(Conversation, "_pieces", stuck)
    out, _ = script("Call me.", code=130)
    assert out == "a"


def test_text_that_is_no_unicode_is_refused_by_name(model: Path) -> None:
    done = subprocess.run(
        [*RUN, "chat", "--model", str(model), "--max-tokens", "2"],
        input=b"\xff\nCall me.\n",
        capture_output=True,
        cwd=ROOT,
        check=True,
    )
    assert b"prompt: not valid UTF-8 text" in done.stderr and done.stdout.count(b"\n") == 1


def test_top_sees_a_chat(model: Path, published: Path) -> None:
    arguments = [*RUN, "chat", "--model", str(model), "--max-tokens", "5"]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        print("Call me.", file=child.stdin, flush=True)
        assert child.stdout.readline()
        deadline = time.monotonic() + 30
        while not (found := read_document(find_document(str(child.pid))))["stats"]["finished"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found["model"]["name"] == "tiny" and found["stats"]["counts"]["new"] == 5
        child.stdin.close()
        assert child.wait() == 0 and list(published.iterdir()) == []


@pytest.fixture
def terminal(model: Path) -> Iterator[Terminal]:
    with Terminal([*RUN, "chat", "--model", str(model), "--kernels", "plain", "--max-tokens", "3000"]) as made:
        yield made


def test_a_terminal_has_a_prompt_and_ctrl_c_and_ctrl_d(terminal: Terminal) -> None:
    assert "tiny, 4,096 tokens of context; /help lists the commands" in terminal.wait_for("> ")
    assert "(Ctrl-D or /quit ends)" in terminal.interrupt_at_prompt(r"ends\)\s+.*> ")
    terminal.type("Call me.\n")
    terminal.wait_for(r"Call me\.\s+\S")
    terminal.type("\x03")
    terminal.wait_for("> ")
    terminal.type("/stats\n")
    told = terminal.wait_for(r"history, allocated[^>]*> ")
    assert re.search(r"finish reason +abort", told)
    terminal.type("\x04")
    assert terminal.end() == 0
