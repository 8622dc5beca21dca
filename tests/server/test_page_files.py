"""The page without a browser: what is served, under which policy, and that its files agree with each other."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from page_serving import served

from rorqual.server.page import page_files
from rorqual.server.settings import ServerSettings

FILES = {name: body.decode() for name, body in page_files().items()}
KEY = "a-key"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(ServerSettings(api_keys={KEY: "tenant"})) as (found, _):
        yield found


def got(url: str, key: str | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by their lower-case names, body."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, {name.lower(): value for name, value in error.headers.items()}, error.read()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/page/index.html", "text/html"),
        ("/page/style.css", "text/css"),
        ("/page/app.js", "text/javascript"),
        ("/page/cache.js", "text/javascript"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_files_are_served_with_their_types_and_a_strict_policy(address: str, path: str, kind: str) -> None:
    """Without a key: the page is where a key is typed in."""
    status, headers, body = got(address + path)
    assert (status, body) == (200, FILES[path.rpartition("/")[2] or "index.html"].encode())
    assert headers["content-type"].split(";")[0] == kind
    rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'self'"
    assert "script-src" not in rules and "style-src" not in rules, "nothing is looser than the default"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/page/none.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/"])
def test_nothing_else_is_served(address: str, path: str) -> None:
    status, _, body = got(address + path)
    assert status == 404
    assert b"def " not in body


def test_stats_are_for_those_who_have_a_key(address: str) -> None:
    assert got(address + "/stats")[0] == 401
    status, _, body = got(address + "/stats", KEY)
    found = json.loads(body)
    assert status == 200
    assert found["pages_free"] + found["pages_used"] + found["pages_cached"] == found["pages"] == 64
    assert {"global", "window", "tail"} <= set(found["bytes_by_group"])
    assert [layer["id"] for layer in found["layers"]] == list(range(10))
    assert [layer["mode"] for layer in found["layers"]][:8] == [
        *("swa", "full", "reuse", "reuse"),
        *("full", "reuse", "reindex", "reuse"),
    ]


def test_scripts_name_only_what_the_page_has() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', FILES["index.html"]))
    scripts = FILES["app.js"] + FILES["cache.js"]
    named = set(re.findall(r'(?:byId|on)\("([\w-]+)"', scripts))
    named |= {f"pages-{kind}" for kind in ("used", "cached", "free")}
    named |= {f"bar-{kind}" for kind in ("used", "cached")}
    assert len(named) > 40
    assert named <= ids
    referred = re.findall(r'(?:for|aria-(?:labelledby|describedby|controls))="([\w-]+)"', FILES["index.html"])
    assert set(referred) <= ids


def test_every_field_has_a_label() -> None:
    html = FILES["index.html"]
    fields = re.findall(r"<(?:input|select|textarea)\b[^>]*\bid=\"([\w-]+)\"", html)
    assert len(fields) == 8
    for field in fields:
        wrapped = re.search(rf'<label[^>]*>(?:(?!</label>).)*id="{field}"', html, re.DOTALL)
        assert wrapped or f'for="{field}"' in html, field


def test_scripts_read_only_figures_that_the_server_gives(address: str) -> None:
    found = json.loads(got(address + "/stats", KEY)[2])
    named = set(re.findall(r"\bstats\.(\w+)", FILES["cache.js"]))
    counted = set(re.findall(r"\bstats\.counts\.(\w+)", FILES["cache.js"]))
    assert {"pages", "bytes_by_group", "running", "layers", "model"} <= named <= set(found)
    assert counted | {"accepted", "verifications"} <= set(found["counts"])


@pytest.mark.parametrize("name", FILES)
def test_no_file_reaches_elsewhere(name: str) -> None:
    text = FILES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|(?<![:\w])//\w+\.\w|@import|url\(", text)


@pytest.mark.parametrize("name", ["app.js", "cache.js", "index.html"])
def test_text_is_never_taken_as_markup(name: str) -> None:
    """Nor does the page need what its policy forbids: scripts and styles written into it."""
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write"
    loose = r"\beval\(|new Function|\son\w+=|\sstyle=|<script>|<style"
    assert not re.search(f"{markup}|{loose}", FILES[name])
