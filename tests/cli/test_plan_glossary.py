"""`rorqual plan glossary`: all terms, one term, the page, and what is refused."""

from __future__ import annotations

import csv
import io
import json

import pytest

from rorqual.cli import main
from rorqual.planner.glossary import ENTRIES, markdown

Capture = pytest.CaptureFixture[str]


def test_all_terms(capsys: Capture) -> None:
    assert main(["plan", "glossary"]) == 0
    printed = capsys.readouterr().out
    assert all(entry.term in printed for entry in ENTRIES)
    assert "Extrapolated: The report does not disclose" in " ".join(printed.split())


def test_one_term(capsys: Capture) -> None:
    assert main(["plan", "glossary", "candidate", "pool"]) == 2
    capsys.readouterr()
    assert main(["plan", "glossary", "Candidate pool"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the candidate pool is a TLB" in printed
    assert '"HISA" (not verified here)' in printed


def test_json_and_csv(capsys: Capture) -> None:
    assert main(["plan", "glossary", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == [entry.term for entry in ENTRIES]
    assert told["CED"]["descends_from"][0].startswith('Y. Sun et al., "You Only Cache Once')
    assert told["CSA2"]["extrapolated"].startswith("The report does not disclose")
    assert told["page"]["extrapolated"] is None
    assert main(["plan", "glossary", "ring", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["ring"]
    assert main(["plan", "glossary", "--csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [row[0] for row in rows[1:]] == [entry.term for entry in ENTRIES]


def test_the_page(capsys: Capture) -> None:
    assert main(["plan", "glossary", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("FlashAttention",), "term must be one of MHA, MQA"),
        (("ring", "--markdown"), "--markdown prints the whole page"),
        (("--markdown", "--json"), "--markdown prints the whole page"),
        (("--json", "--csv"), "--json and --csv exclude each other"),
    ],
)
def test_what_is_refused(capsys: Capture, arguments: tuple[str, ...], message: str) -> None:
    assert main(["plan", "glossary", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert not told.out
