"""`rorqual serve`: keys, addresses, and a process that says where it is, answers, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rorqual.cli.app import main
from rorqual.cli.serve import read_keys
from rorqual.errors import InputError

SECONDS = 120.0
KEY = "sk-open-sesame"
HEADERS = {"authorization": f"Bearer {KEY}"}


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the shipped model on a free port, and its address."""
    command = [
        sys.executable,
        "-c",
        "import sys; from rorqual.cli import main; sys.exit(main())",
        "serve",
        "--port",
        "0",
    ]
    environment = {**os.environ, "RORQUAL_API_KEYS": f"{KEY}=whale"}
    with subprocess.Popen(
        [*command, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"rorqual serves whale at (http://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            yield process, found[1]
        finally:
            watchdog.cancel()
            process.kill()


def test_keys_have_tenants_and_are_never_told() -> None:
    assert read_keys(["", "a", "b=blue"]) == {"a": "key-1", "b": "blue"}
    with pytest.raises(InputError, match="place 2") as error:
        read_keys(["a", f"{KEY}="])
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "70000"], "port: 70000 is not legal"),
        (["--timeout", "0"], "timeout: 0.0 is not legal"),
        (["--host", "256.0.0.1"], "cannot be listened on"),
        (["--port", "0", "--max-model-len", "1"], "max_model_len: 1 is not legal"),
        (["--port", "0", "--memory", "1KiB"], "do not fit a budget of 1.02 kB"),
    ],
)
def test_what_cannot_be_served_is_one_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    assert told in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err


def test_a_server_says_its_plan_and_ends_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What its store was given while it ran is there when it has ended."""
    body = {"prompt": "The whale. " * 60, "max_tokens": 100, "ignore_eos": True, "speculative": False, "stream": True}
    options = ("--model-name", "whale", "--slots", "2", "--max-model-len", "600", "--drain", "100")
    with served(*options, "--store", str(tmp_path / "kept")) as (process, address):
        with httpx.Client(base_url=address, headers=HEADERS, timeout=SECONDS) as client:
            assert client.get("/v1/models").json()["data"][0] | {"created": 0} == {
                "id": "whale",
                "object": "model",
                "created": 0,
                "owned_by": "rorqual",
                "max_model_len": 600,
            }
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                assert refused_in_time(address) == 503
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert "2 slots x" in said
    assert KEY not in said
    assert "Traceback" not in said
    capsys.readouterr()
    assert main(["store", "stat", str(tmp_path / "kept"), "--json"]) == 0
    (kept,) = json.loads(capsys.readouterr().out)
    assert kept["pages"] >= 2 and kept["page_tokens"] == 128


def refused_in_time(address: str) -> int:
    """The status of a new request once the signal has come through."""
    deadline = time.monotonic() + 10
    while True:
        body = {"prompt": "A", "max_tokens": 1}
        status = httpx.post(f"{address}/v1/completions", json=body, headers=HEADERS, timeout=SECONDS).status_code
        if status != 200 or time.monotonic() > deadline:
            return status
