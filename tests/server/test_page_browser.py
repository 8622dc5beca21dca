"""The page in a real browser: a chat with the demo model, the live cache, a narrow screen, the dark.

Screenshots for people to look at go to build/page/.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_scripts import CONTRASTS, FOCUS, FOLLOWED
from page_serving import served
from PIL import Image
from serving import demo_model, scripted

from rorqual.server.settings import ServerSettings

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = Path(__file__).resolve().parents[2] / "build" / "page"
LIMIT = 180_000  # milliseconds: kernels may have to be compiled first

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as (found, _):
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Containers run as root, where Chromium's own sandbox refuses to start.
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens the page; at the end it has logged no error and asked nobody but its own server."""
    pages: list[Any] = []
    troubles: list[str] = []

    def open_page(
        width: int = 1280, height: int = 860, dark: bool = False, at: str = address, touch: bool = False
    ) -> Any:
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            is_mobile=touch,
        )
        page.set_default_timeout(LIMIT)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda line: line.type == "error" and troubles.append(line.text))
        page.on("request", lambda asked: asked.url.startswith((at, "data:")) or troubles.append(asked.url))
        page.goto(at)
        until(page, "!document.querySelector('#state').textContent.startsWith('Waiting')")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    # A browser logs by itself that a request was refused: the page shows why.
    assert [line for line in troubles if not re.search("status of 40[01]", line)] == []


def until(page: Any, condition: str) -> None:
    """Until an expression holds. The page's policy forbids what Playwright's own waiting does with one."""
    end = time.monotonic() + LIMIT / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page: Any) -> None:
    page.wait_for_selector("#send:visible")
    page.wait_for_selector(".assistant:not(.running) .foot")


def shot(page: Any, name: str, part: str | None = None) -> None:
    """A picture of the page, or of one part of it with all that one would have to scroll for."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    path = SHOTS / f"{name}.png"
    if part is None:
        page.screenshot(path=path)
    else:
        size = page.viewport_size
        page.set_viewport_size({**size, "height": size["height"] + 900})
        page.locator(part).screenshot(path=path)
        page.set_viewport_size(size)
    assert path.stat().st_size > 10_000


def no_sideways_scroll(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def test_a_chat_streams_and_the_cache_is_seen_to_change(opened: Callable[..., Any]) -> None:
    page = opened()
    written = page.text_content("#written")
    page.click("#settings summary")
    page.fill("#max-tokens", "60")
    page.evaluate("""() => { window.lengths = new Set(); new MutationObserver(() => {
        const node = document.querySelector('.assistant .words'); if (node) window.lengths.add(node.textContent.length);
    }).observe(document.querySelector('#log'), { childList: true, subtree: true, characterData: true }); }""")
    say(page, "Tell me of the sea, and of the ships that go down to it.")
    finished(page)
    assert len(page.evaluate("[...window.lengths]")) > 3, "the answer came at once, not token by token"
    text = page.text_content(".assistant .words")
    assert text.strip()
    assert page.text_content("#prompt") == ""
    assert re.search(r"\d+ tokens", page.text_content(".assistant .foot"))
    until(page, f"document.querySelector('#written').textContent !== '{written}'")
    assert int(page.text_content("#talk-prompt").replace(",", "")) > 5
    assert re.fullmatch(r"\d+ ms", page.text_content("#talk-first"))
    assert page.locator("#layers li").count() == 10
    assert page.locator("#layers li.full").count() == 2
    assert {"global", "window", "tail"} <= set(page.locator("#bytes dt").all_text_contents())
    # What a screen reader was told is the end of what was said, and why it ended.
    assert text.endswith(page.text_content("#live").removesuffix("cut at the token limit").rstrip())
    page.click("#settings summary")
    assert page.evaluate(FOLLOWED), "the end of the answer is out of sight"
    shot(page, "light")


def test_a_second_turn_hits_the_cache(opened: Callable[..., Any]) -> None:
    page = opened()
    page.click("#settings summary")
    page.fill("#system", "Here is what was said before. " * 40)
    page.fill("#max-tokens", "8")
    for text in ("Who is there?", "And who is that?"):
        say(page, text)
        finished(page)
    assert page.locator(".assistant").count() == 2
    hit = re.match(r"([\d,]+) \(\d+ %\)", page.text_content("#talk-hit"))
    assert hit and int(hit[1].replace(",", "")) >= 128
    assert int(page.text_content("#talk-replay")) > 0
    until(page, "Number(document.querySelector('#pages-cached').textContent) > 0")
    page.focus("#again")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "log", "the button is disabled, the focus is on what comes"
    finished(page)
    assert page.locator(".assistant").count() == 2, "a new answer takes the place of the last one"
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    assert page.text_content("#talk-hit") == "-"


@pytest.mark.parametrize("how", ["button", "escape"])
def test_a_generation_is_stopped(opened: Callable[..., Any], how: str) -> None:
    page = opened()
    page.click("#settings summary")
    page.select_option("#thinking", "high")
    page.fill("#temperature", "1.2")
    page.click("#settings summary")
    # What the model says ends when it likes; these words go on until they are stopped.
    with scripted(demo_model().tokenizer.encode("The sea is deep and wide and", add_special_tokens=False).ids):
        say(page, "Think long and hard about the sea.")
        page.wait_for_selector(".assistant.running .thinking .words")
        if how == "button":
            page.focus("#stop")
        page.keyboard.press("Enter" if how == "button" else "Escape")
        page.wait_for_selector("#send:visible")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert "stopped" in page.text_content(".assistant .foot")
    assert page.text_content(".thinking summary") == "Thinking"
    # Its pages and its slot are free again.
    until(page, "document.querySelector('#requests').textContent === '0, 0'")
    until(page, "document.querySelector('#pages-used').textContent === '0'")


def test_a_refused_image_is_told_and_the_message_comes_back(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened()
    picture = tmp_path / "picture.png"
    Image.new("RGB", (64, 48), "teal").save(picture)
    page.set_input_files("#file", picture)
    page.wait_for_selector("#images img")
    say(page, "What is on it?")
    page.wait_for_selector(".error")
    assert "no vision tower" in page.text_content(".error")
    assert page.input_value("#prompt") == "What is on it?"
    assert page.locator("#images img").count() == 1
    page.click("#images button")
    assert page.locator("#images img").count() == 0
    page.click("#settings summary")
    page.fill("#tools", "[not JSON")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".error:has-text('Tools: not JSON')")
    assert page.input_value("#prompt") == "What is on it?"
    # Dropped beside the chat: it is taken all the same, and the page stays.
    drop = """() => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(8)], "a.png", { type: "image/png" }));
      document.querySelector("#cache").dispatchEvent(
        new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop)
    page.wait_for_selector("#images img")
    assert page.get_attribute("#images button", "aria-label") == "Remove image 1"
    page.evaluate(drop.replace("a.png", "a.pdf").replace("image/png", "application/pdf"))
    page.wait_for_selector(".error:has-text('a.pdf is no image')")
    assert page.locator("#images img").count() == 1


def test_keyboard_alone_goes_everywhere(opened: Callable[..., Any]) -> None:
    page = opened()
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    page.fill("#prompt", "")
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))")
    assert levels[0] == 1 and all(b <= a + 1 for a, b in itertools.pairwise(levels)), "no level is left out"
    page.evaluate("document.activeElement.blur()")
    shot(page, "welcome")
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue  # past the last one, before the first
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className || ''"))
        assert page.evaluate(FOCUS) == "solid", f"{seen[-1]} does not show that it has the focus"
    assert {"skip", "new-chat", "log", "prompt", "file", "send"} <= set(seen)


def test_a_server_with_keys_is_told_one(opened: Callable[..., Any]) -> None:
    with served(ServerSettings(api_keys={"a-key": "tenant"})) as (address, _):
        page = opened(at=address)
        assert "asks for an API key" in page.text_content("#state")
        say(page, "Who is there?")
        page.wait_for_selector(".error")
        assert "no valid API key" in page.text_content(".error")
        page.click("#settings summary")
        page.fill("#key", "a-key")
        page.fill("#max-tokens", "8")
        page.press("#prompt", "Enter")
        finished(page)
        page.reload()
        assert page.input_value("#key") == "a-key", "kept as long as the tab is open"
        until(page, "document.querySelector('#state').textContent.startsWith('Live')")
        assert page.evaluate("localStorage.length") == 0
        page.goto("about:blank")


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_contrast(opened: Callable[..., Any], dark: bool) -> None:
    page = opened(dark=dark)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", ground))) < 150 if dark else sum(map(int, re.findall(r"\d+", ground))) > 600
    page.click("#settings summary")
    page.fill("#max-tokens", "24")
    page.select_option("#thinking", "low")
    say(page, "Of the sea.")
    finished(page)
    found = page.evaluate(CONTRASTS)
    assert len(found) > 40
    assert [(text, round(ratio, 2)) for text, ratio in found if ratio < 4.5] == []
    page.click("#settings summary")
    shot(page, f"panel-{'dark' if dark else 'light'}", "#cache")
    if dark:
        shot(page, "dark")


def test_a_phone_needs_no_sideways_scroll(opened: Callable[..., Any]) -> None:
    page = opened(width=360, height=740, touch=True)
    page.click("#settings summary")
    page.fill("#max-tokens", "40")
    assert no_sideways_scroll(page)
    fingers = "[...document.querySelectorAll('button, .button, summary')].filter((node) => node.checkVisibility())"
    assert page.evaluate(f"Math.min(...{fingers}.map((node) => node.getBoundingClientRect().height))") >= 44
    letters = (
        "[...document.querySelectorAll('input, select, textarea')].map((n) => parseFloat(getComputedStyle(n).fontSize))"
    )
    assert page.evaluate(f"Math.min(...{letters})") >= 16, "smaller ones make a phone zoom in"
    page.click("#settings summary")
    say(page, "Of a ship, the-longest-word-that-anybody-has-ever-typed-into-a-field-of-a-page-without-a-break.")
    assert page.input_value("#prompt").endswith("\n"), "a phone has no other key that breaks the line"
    page.click("#send")
    assert page.evaluate("document.activeElement.id") == "log", "a keyboard would cover the answer"
    finished(page)
    assert no_sideways_scroll(page)
    shot(page, "phone")
    assert not page.is_visible("#cache")
    page.click("#panel-toggle")
    assert page.is_visible("#cache") and page.get_attribute("#panel-toggle", "aria-expanded") == "true"
    assert no_sideways_scroll(page)
    shot(page, "phone-cache")


def test_tool_calls_are_shown_and_answered(opened: Callable[..., Any]) -> None:
    """The demo model calls no tool: the stream is a recorded one, and the second request is looked at."""
    page = opened()
    asked: list[dict[str, Any]] = []

    def call(arguments: str, **more: Any) -> str:
        piece = {"index": 0, "function": {"arguments": arguments}, **more}
        return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]}) + "\n\n"

    first = (
        call("", id="call-1", function={"name": "depth", "arguments": ""})
        + call('{"place": ')
        + call('"<b>Fram</b>"}')
        + 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}\n\ndata: [DONE]\n\n'
    )
    second = 'data: {"choices": [{"index": 0, "delta": {"content": "<b>Deep.</b>"}, "finish_reason": "stop"}]}\n\n'

    def answered(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=first if len(asked) == 1 else second)

    page.route("**/v1/chat/completions", answered)
    page.click("#settings summary")
    page.fill("#tools", '[{"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}]')
    say(page, "How deep is it?")
    page.wait_for_selector(".tool input")
    assert page.text_content(".tool strong") == "depth"
    assert page.text_content(".tool pre") == '{"place": "<b>Fram</b>"}', "markup is shown as text"
    assert page.evaluate(FOLLOWED), "the end of the answer is out of sight"
    assert page.text_content("#live") == "It calls depth and waits for the result."
    page.fill(".tool input", "5,550 m")
    page.press(".tool input", "Enter")
    assert page.evaluate("document.activeElement.id") == "log"
    until(page, "document.querySelectorAll('.assistant .words')[1]?.textContent === '<b>Deep.</b>'")
    assert asked[0]["tools"][0]["function"]["name"] == "depth"
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][2] == {"role": "tool", "tool_call_id": "call-1", "content": "5,550 m"}
    assert asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"place": "<b>Fram</b>"}'
