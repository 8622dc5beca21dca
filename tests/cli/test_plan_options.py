"""Options that verbs of `rorqual plan` share: one default each, read alike, refused before anything is computed."""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rorqual.cli import main
from rorqual.cli.plan import capacity, report, trace, traffic
from rorqual.cli.plan.deployment import DeploymentOptions
from rorqual.cli.plan.options import read_number
from rorqual.cli.plan.rates import parse_rate
from rorqual.cli.plan.request import RequestOptions, read_lengths
from rorqual.errors import InputError

Capture = pytest.CaptureFixture[str]


def document(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def refusal(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    return told.err.removeprefix("rorqual: ").strip()


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(
    ("verb", "kind", "lacking"),
    [
        (capacity, DeploymentOptions, set()),
        # The report is about no particular step and has no pool beside the devices.
        (report, DeploymentOptions, {"chunk", "sampled_rows", "pool_host", "pool_disk", "split"}),
        (report, RequestOptions, set()),
        (traffic, RequestOptions, set()),
    ],
)
def test_a_default_is_the_same_wherever_an_option_is(verb: Any, kind: Any, lacking: set[str]) -> None:
    named = defaults(verb.command)
    there = {field.name: field.default for field in fields(kind) if field.name in named}
    assert {field.name for field in fields(kind)} - set(there) == lacking
    assert there == {name: named[name] for name in there}


def test_writing_a_synthetic_trace_knows_every_option_of_a_replay() -> None:
    named = defaults(trace.command)
    assert {name: named[name] for name in trace.OF_A_REPLAY} == trace.OF_A_REPLAY
    assert set(named) - set(trace.OF_A_REPLAY) == {"file", "synthetic"}


@pytest.mark.parametrize("verb", ["ledger", "capacity", "compare"])
def test_contexts_may_be_repeated_and_listed(verb: str, capsys: Capture) -> None:
    table = {"ledger": "contexts", "capacity": "sessions", "compare": "totals"}[verb]
    told = document(capsys, verb, "v4.1-flash", "--context", "4Ki,8192", "--context", "1,048,576".replace(",", ""))
    assert [row["context [tokens]"] for row in told[table]] == [4096, 8192, 2**20]
    # One number as it is printed, or three contexts: nobody guesses.
    assert "--context 1,048,576 may be one number or several" in refusal(capsys, verb, "--context", "1,048,576")
    assert "--context must be a number of tokens" in refusal(capsys, verb, "--context", "4Ki,")


@pytest.mark.parametrize("verb", ["ledger", "capacity", "traffic"])
def test_a_page_goes_by_both_names(verb: str, capsys: Capture) -> None:
    assert document(capsys, verb, "--page", "256") == document(capsys, verb, "--page-tokens", "256")
    assert document(capsys, verb, "--page", "256") != document(capsys, verb)


def test_an_empty_name_is_no_model(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["init", "tiny", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    # Not even where the folder that we are in holds one.
    monkeypatch.chdir(tmp_path / "model")
    for verb in ("ledger", "numbers", "capacity", "traffic", "compare"):
        assert "''" in refusal(capsys, verb, "")
        assert main(["plan", verb, "."]) == 0
        capsys.readouterr()


def test_numbers_of_options() -> None:
    assert read_number("--rate", 0.1) * 10 == 1
    assert read_number("--rate", 0.0) == 0
    assert read_number("--rate", 1e30) == 10**30
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InputError, match=r"^--rate must be a finite number; got"):
            read_number("--rate", value)
    for value in (1e31, -1e31, 1e-31, 1e308, 5e-324):
        with pytest.raises(InputError, match=r"^--rate must be 0 or between 1e-30 and 1e30; got"):
            read_number("--rate", value)


def test_rates_need_a_unit() -> None:
    assert parse_rate("50GB/s", "x") == 50 * 10**9
    assert parse_rate(" 1.5 GiB/s ", "x") == 3 * 2**29
    assert parse_rate("100 Mbit/s", "x") == Fraction(10**8, 8)
    for text in ("", "50", "50GB", "GB/s", "0GB/s", "-1GB/s", "1Gb/s", "x Gbit/s", "1/0Gbit/s"):
        with pytest.raises(InputError, match=r"^x must be"):
            parse_rate(text, "x")


def test_rates_are_bounded() -> None:
    assert parse_rate("1e3Gbit/s", "x") == 125 * 10**9
    for text in ("1e400Gbit/s", "1e999999Gbit/s", "9" * 40 + "GB/s", "1,5GB/s", "50 gbit/s", "1/2Gbit/s"):
        with pytest.raises(InputError, match=r"^x must be above 0 with a unit of bytes or bits a second"):
            parse_rate(text, "x")


@pytest.mark.parametrize(
    ("prompt", "output", "lengths"),
    [
        (None, None, (32_768, 1024)),
        ("1Mi", None, (2**20, 0)),
        ("1048000", None, (1_048_000, 576)),
        (None, "1048000", (576, 1_048_000)),
        ("1", "0", (1, 0)),
    ],
)
def test_lengths_of_a_request(prompt: str | None, output: str | None, lengths: tuple[int, int]) -> None:
    assert read_lengths(2**20, RequestOptions(prompt=prompt, output=output)) == lengths


def test_a_request_that_the_model_cannot_hold(capsys: Capture) -> None:
    assert read_lengths(1024, RequestOptions()) == (512, 512)
    told = refusal(capsys, "traffic", "--prompt", "1M", "--output", "100k")
    limit = "at most 1,048,576 tokens (max_position_embeddings) together; got 1,000,000 and 100,000"
    assert told == f"--prompt and --output must be {limit}"
    assert document(capsys, "traffic", "tiny")["handover"][0]["pages [B]"] == 512 // 128 * 10_176
    assert limit.split(";")[0] in refusal(capsys, "report", "--prompt", "2Mi")


def test_capacity_takes_one_device_where_eight_have_no_use(capsys: Capture) -> None:
    # 6 and 4 experts do not spread over 8.
    told = document(capsys, "capacity", "tiny")
    assert {row["spread"] for row in told["weights"][:-1]} == {"whole"}
    assert "--count must allow an --ep" in refusal(capsys, "capacity", "tiny", "--count", "8")
    assert "--tp x --dp-attention must be --count; got 1 x 3, not 8" in refusal(
        capsys, "capacity", "tiny", "--dp-attention", "3", "--tp", "1"
    )


@pytest.mark.parametrize("verb", ["explain", "capacity", "traffic"])
def test_csv_and_json_hold_the_same_tables(verb: str, capsys: Capture) -> None:
    assert main(["plan", verb, "--csv"]) == 0
    sheets = [list(csv.reader(io.StringIO(part))) for part in capsys.readouterr().out.split("\n\n")]
    assert all(len({len(row) for row in sheet if row}) == 1 for sheet in sheets)
    if verb != "explain":
        assert [len(sheet) - 1 for sheet in sheets] == [len(rows) for rows in document(capsys, verb).values()]


def test_what_the_output_should_be_is_asked_first(capsys: Capture) -> None:
    for verb in ("capacity", "traffic", "explain"):
        assert refusal(capsys, verb, "nobody", "--json", "--csv").startswith("--json and --csv exclude each other")


@pytest.fixture(scope="module")
def sheets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every verb prints as CSV, of two models where it takes one; in one process without torch."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    assert main(["plan", "trace", "--synthetic", "50", str(path)]) == 0
    calls = [[verb, model] for verb in ("ledger", "numbers", "capacity", "traffic") for model in ("v4.1-flash", "tiny")]
    calls += [["explain"], ["compare"], ["glossary"], ["trace", str(path), "--curve"]]
    script = """
import contextlib, io, json, sys
from rorqual.cli import main
told = {}
for call in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", *call, "--csv"]) == 0, call
    told[" ".join(call[:2])] = out.getvalue()
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["plan", "report", "--out", sys.argv[2]]) == 0
told["modules"] = " ".join({"torch", "numpy", "numba", "matplotlib"} & set(sys.modules))
print(json.dumps(told))
"""
    arguments = [sys.executable, "-c", script, json.dumps(calls), str(path.with_name("report.html"))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    told: dict[str, str] = json.loads(done.stdout)
    assert len(told) == len(calls) + 1
    return told


def test_no_verb_imports_torch_or_numpy(sheets: dict[str, str]) -> None:
    assert sheets["modules"] == ""


def test_decimal_and_binary_units_are_never_in_one_table(sheets: dict[str, str]) -> None:
    decimal, binary = re.compile(r"[0-9] [kMGTPE]B\b"), re.compile(r"[0-9] [KMGTPE]iB\b")
    seen = set()
    for call, text in sheets.items():
        for sheet in text.split("\n\n"):
            found = {kind for kind, units in (("decimal", decimal), ("binary", binary)) if units.search(sheet)}
            assert len(found) < 2, (call, sheet.splitlines()[0])
            seen |= found
    assert seen == {"decimal", "binary"}


def test_columns_of_bytes_name_their_unit(sheets: dict[str, str]) -> None:
    for call, text in sheets.items():
        for sheet in text.split("\n\n"):
            for column in next(csv.reader(io.StringIO(sheet)), []):
                assert "bytes" not in column or "[B" in column, (call, column)
