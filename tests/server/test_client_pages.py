"""The pages on clients are run as they stand, against a server of the demo model."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_serving import served

DOCS = Path(__file__).resolve().parents[2] / "docs" / "clients"
WRITTEN = "http://127.0.0.1:8000"
"""The address on the pages."""


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
    if "reasoning_effort" in CURL[at]:
        assert json.loads(found)["choices"][0]["message"]["reasoning_content"]


def test_the_curl_page_has_every_conversation_api() -> None:
    paths = set(re.findall(rf"{WRITTEN}(/[\w/]+)", "".join(CURL)))
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/health", "/stats"} <= paths


@pytest.mark.parametrize(
    ("name", "package", "shown"),
    [
        ("openai", "openai", r"found in the cache: \d+"),
        ("anthropic", "anthropic", r"model: 'another' is not served here"),
        ("langchain", "langchain_openai", r"(?m)^(friend|foe)$"),
    ],
)
def test_python_pages(address: str, name: str, package: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[dev]'")
    # LangChain would report its runs elsewhere if the environment said so.
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    code = "\n".join(blocks(name, "python")).replace(WRITTEN, address)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"{name}.md", "exec"), {"__name__": name})
    assert re.search(shown, said.getvalue()), said.getvalue()
    assert len(said.getvalue()) > 30


def test_what_nobody_ran_says_so() -> None:
    text = (DOCS / "others.md").read_text(encoding="utf-8")
    assert all(line.endswith("(untested)") for line in text.splitlines() if line.startswith("## "))
    tested = {path.stem for path in DOCS.glob("*.md")} - {"others"}
    assert tested == {"curl", "openai", "anthropic", "langchain", "lm-eval"}
