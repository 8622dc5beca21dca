"""The pages on clients are run as they stand, against a server of the demo model."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_serving import served
from serving import demo_model

from rorqual.cli import serve

DOCS = Path(__file__).resolve().parents[2] / "docs" / "clients"
WRITTEN = "http://127.0.0.1:8000"
"""The address on the pages."""
CALLED = r"(?m)^depth in (m|fathoms)$"
RUN = {"curl": "bash", "openai": "python", "anthropic": "python", "langchain": "python"}
"""Page -> the language of all that stands on it; the tests below run it."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as (found, _):
        yield found


def blocks(name: str, language: str) -> list[str]:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


CURL = blocks("curl", "bash")


def run(script: str, address: str) -> str:
    script = "set -euo pipefail\n" + script.replace(WRITTEN, address)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl: apt-get install curl")
@pytest.mark.parametrize("at", range(len(CURL)))
def test_curl_commands(address: str, at: int) -> None:
    found = run(CURL[at], address)
    if '"stream": true' in CURL[at]:
        events = [line.removeprefix("data: ") for line in found.splitlines() if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        usages = [chunk["usage"] for chunk in chunks if chunk["usage"]]
        assert len(usages) == 1
        assert {"prompt_cache_hit_tokens", "prompt_cache_replayed_tokens"} <= set(usages[0])
    else:
        decoder, at_character, answers = json.JSONDecoder(), 0, []
        while at_character < len(found.strip()):
            answer, at_character = decoder.raw_decode(found, at_character)
            answers.append(answer)
        assert len(answers) == CURL[at].count("curl ")
        assert all("error" not in answer or answer["error"] is None for answer in answers)
    if "chat/completions" in CURL[at] and "stream" not in CURL[at]:
        assert json.loads(found)["usage"]["prompt_cache_replayed_tokens"] >= 0
    if "json_schema" in CURL[at]:
        assert json.loads(json.loads(found)["choices"][0]["message"]["content"])["who"] in ("friend", "foe")
    if "tool_choice" in CURL[at]:
        (call,) = json.loads(found)["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["unit"] in ("m", "fathoms")
    if "reasoning_effort" in CURL[at]:
        assert json.loads(found)["choices"][0]["message"]["reasoning_content"]


def test_the_curl_page_has_every_conversation_api() -> None:
    paths = set(re.findall(rf"{WRITTEN}(/[\w/]+)", "".join(CURL)))
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/health", "/stats"} <= paths


@pytest.mark.parametrize(
    ("name", "package", "shown"),
    [
        ("openai", "openai", (r"found in the cache: \d+", CALLED)),
        ("anthropic", "anthropic", (r"model: 'another' is not served here", CALLED)),
        ("langchain", "langchain_openai", (r"(?m)^(friend|foe)$", CALLED)),
    ],
)
def test_python_pages(
    address: str, name: str, package: str, shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[dev]'")
    # LangChain would report its runs elsewhere if the environment said so.
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    code = "\n".join(blocks(name, "python")).replace(WRITTEN, address)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"{name}.md", "exec"), {"__name__": name})
    assert all(re.search(line, said.getvalue()) for line in shown), said.getvalue()
    assert len(said.getvalue()) > 30


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RUN)
def test_nothing_on_a_page_that_is_run_stays_outside(name: str) -> None:
    text = page(name)
    assert "run by `tests/server/test_client_pages.py`" in " ".join(text.split())
    fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
    assert set(fences[::2]) == {RUN[name]} and set(fences[1::2]) == {""}
    assert len(blocks(name, RUN[name])) == len(fences) // 2
    assert not re.search(r"^(    |\t)\S", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)


@pytest.mark.parametrize("name", [*RUN, "others"])
def test_settings_are_the_servers_own(address: str, name: str) -> None:
    """Commands, options, paths, the port and the model's name are those that there are."""
    text = page(name)
    options = inspect.signature(serve.command).parameters
    for command in re.findall(r"`(?:rorqual serve |)(--[^`]+)`", text):
        for option in re.findall(r"--([\w-]+)", command):
            assert option.replace("-", "_") in options, option
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", (DOCS.parents[1] / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    port, host = options["port"].default, options["host"].default
    assert set(re.findall(r":(\d{4})\b", text)) <= {str(port)} and f"http://{host}:{port}" == WRITTEN
    with urllib.request.urlopen(f"{address}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    for path in re.findall(rf"(?:{WRITTEN}|`)(/[\w/]+)", text):
        assert path in (*paths, "/v1"), path
    models = re.findall(r"""["']?\bmodel["']?[:=] ?["'`]?(\w+)""", text, re.IGNORECASE)
    assert set(models) <= {options["model_name"].default, "another"}


def test_a_context_window_is_where_the_page_says(address: str) -> None:
    assert "`/v1/models` gives it in `max_model_len`" in " ".join(page("others").split())
    with urllib.request.urlopen(f"{address}/v1/models") as answer:
        (model,) = json.load(answer)["data"]
    assert (model["id"], model["max_model_len"]) == ("rorqual", demo_model().config.max_position_embeddings)


def test_what_nobody_ran_says_so() -> None:
    text = page("others")
    assert all(line.endswith("(untested)") for line in text.splitlines() if line.startswith("## "))
    tested = {path.stem for path in DOCS.glob("*.md")} - {"others"}
    assert tested == {*RUN, "lm-eval"}
