"""Every trace format, line by line, and the refusals that name line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rorqual.errors import InputError
from rorqual.planner.traces import formats, synthetic, text
from rorqual.planner.traces.ahead import batches_ahead
from rorqual.planner.traces.prompts import Prompts
from rorqual.planner.traces.request import Request

MOONCAKE = {"timestamp": 1200, "input_length": 1500, "output_length": 80, "hash_ids": [7, 8, 31]}
BAILIAN = {
    "chat_id": 12,
    "parent_chat_id": -1,
    "timestamp": 4.25,
    "input_length": 40,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [70, 71, 90],
}
CHATS = ((12, -1, 4.25), (13, 12, 9.25), (14, -1, 10.25))
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,300,20,320,API log\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.2500000,4096,12\n2023-11-16 18:00:01,5,0\n"
PLAIN = "timestamp_s,input_tokens,output_tokens,session\n0.25,4096,128,alice\n3,10,1,\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], str]:
    def put(content: str | bytes) -> str:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return put


def read(path: str, name: str | None = None) -> tuple[str, list[Request]]:
    found = formats.detect(path) if name is None else formats.named(name)
    return found.name, list(formats.requests(path, found))


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_mooncake(write: Callable[[str | bytes], str]) -> None:
    """Milliseconds; blocks of 512, the partial last one with an id (1,500 tokens: 3) or without one (2)."""
    second = {**MOONCAKE, "timestamp": 1300.5, "hash_ids": [7, 8]}
    path = write(lines(MOONCAKE, second))
    assert read(path) == (
        "mooncake",
        [Request(1_200_000, 1500, 80, [7, 8, 31]), Request(1_300_500, 1500, 80, [7, 8])],
    )
    assert formats.named("mooncake").block_tokens == 512


def test_bailian(write: Callable[[str | bytes], str]) -> None:
    """Seconds; blocks of 16; -1 is no parent. Its fields include Mooncake's and must not be taken for them."""
    second = {**BAILIAN, "chat_id": 13, "parent_chat_id": 12, "timestamp": 5, "input_length": 48}
    path = write(lines(BAILIAN, second))
    assert read(path) == (
        "bailian",
        [
            Request(4_250_000, 40, 9, [70, 71, 90], 12, None),
            Request(5_000_000, 48, 9, [70, 71, 90], 13, 12),
        ],
    )
    assert formats.named("bailian").block_tokens == 16


def test_traces_without_hashes(write: Callable[[str | bytes], str]) -> None:
    assert read(write(BURSTGPT)) == ("burstgpt", [Request(5_000_000, 300, 20)])
    assert read(write(AZURE)) == ("azure", [Request(0, 4096, 12), Request(750_000, 5, 0)])
    plain = [Request(250_000, 4096, 128, [], "alice", "alice"), Request(3_000_000, 10, 1)]
    assert read(write(PLAIN)) == ("plain", plain)
    assert all(formats.named(name).block_tokens == 0 for name in ("burstgpt", "azure", "plain"))


def test_columns_may_stand_in_any_order_and_among_others(write: Callable[[str | bytes], str]) -> None:
    path = write("GeneratedTokens,more,ContextTokens,TIMESTAMP\n1,x,2,2024-05-10 00:00:00.009930+00:00\n")
    assert read(path) == ("azure", [Request(0, 2, 1)])
    path = write("output_tokens,timestamp_s,input_tokens\n1,2,3\n")
    assert read(path) == ("plain", [Request(2_000_000, 3, 1)])


def test_line_ends_blank_lines_and_a_byte_order_mark(write: Callable[[str | bytes], str]) -> None:
    path = write(b"\xef\xbb\xbf\r\n  \r\n" + lines(MOONCAKE).strip().encode() + b"\r\n\r\n")
    assert read(path)[1] == [Request(1_200_000, 1500, 80, [7, 8, 31])]
    path = write(b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode() + b"\r\n")
    assert len(read(path)[1]) == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("timestamp", -1, "timestamp must be a time in milliseconds, 0 or more; got -1"),
        ("timestamp", "1", "timestamp must be a time in milliseconds, 0 or more; got '1'"),
        ("timestamp", float("nan"), "timestamp must be a time in milliseconds, 0 or more; got nan"),
        ("timestamp", float("inf"), "timestamp must be a time in milliseconds, 0 or more; got inf"),
        ("timestamp", True, "timestamp must be a time in milliseconds, 0 or more; got True"),
        ("input_length", -5, "input_length must be an integer of 0 or more; got -5"),
        ("input_length", 1500.0, "input_length must be an integer of 0 or more; got 1500.0"),
        ("output_length", None, "output_length must be an integer of 0 or more; got None"),
        ("hash_ids", 7, "hash_ids must be a list of integers; got 7"),
        ("hash_ids", [1], "hash_ids must be 3 ids, one for each 512 of 1500 tokens; got 1"),
        ("hash_ids", [1, 2, 3, 4], "hash_ids must be 3 ids, one for each 512 of 1500 tokens; got 4"),
        ("hash_ids", [1, 2, "3"], "hash_ids must be distinct integers; got [1, 2, '3']"),
        ("hash_ids", [1, 2, 3.0], "hash_ids must be distinct integers; got [1, 2, 3.0]"),
        ("hash_ids", [1, 2, [3]], "hash_ids must be distinct integers; got [1, 2, [3]]"),
        ("hash_ids", [1, 2, 1], "hash_ids must be distinct integers; got [1, 2, 1]"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    write: Callable[[str | bytes], str], field: str, value: object, message: str
) -> None:
    path = write(lines(MOONCAKE, {**MOONCAKE, field: value}))
    with pytest.raises(InputError) as caught:
        read(path)
    assert str(caught.value) == f"line 2: {message}"


def test_blocks_that_end_with_the_prompt_have_one_id_each(write: Callable[[str | bytes], str]) -> None:
    assert read(write(lines({**MOONCAKE, "input_length": 1024, "hash_ids": [1, 2]})))[1][0].ids == [1, 2]
    path = write(lines({**MOONCAKE, "input_length": 1024, "hash_ids": [1, 2, 3]}))
    with pytest.raises(InputError, match="hash_ids must be 2 ids, one for each 512 of 1024 tokens; got 3"):
        read(path)
    assert read(write(lines({**MOONCAKE, "input_length": 0, "hash_ids": []})))[1][0].ids == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mooncake", lines(MOONCAKE) + "{", "line 2: not JSON (Expecting property name enclosed in double quotes)"),
        ("mooncake", lines(MOONCAKE) + "[1]\n", "line 2: the line must be one JSON object; got '[1]'"),
        ("mooncake", lines(MOONCAKE).strip() * 2, "line 1: the line must be one JSON object; got "),
        ("mooncake", '{"timestamp": 1}', "line 1: input_length is missing"),
        ("mooncake", "[" * 100_000, "line 1: not JSON"),
        ("mooncake", '{"timestamp": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ("bailian", lines({**BAILIAN, "chat_id": "x"}), "line 1: chat_id must be an integer; got 'x'"),
        ("bailian", lines({**BAILIAN, "timestamp": None}), "line 1: timestamp must be a time in seconds, 0 or more"),
        ("bailian", lines({**BAILIAN, "timestamp": 10**400}), "line 1: timestamp must be a time in seconds, 0 or more"),
        ("bailian", lines(MOONCAKE), "line 1: parent_chat_id is missing"),
        ("burstgpt", BURSTGPT + "6,ChatGPT,,20,20,API log\n", "line 3: Request tokens must be an integer of 0 or more"),
        ("burstgpt", BURSTGPT + "6,ChatGPT,1\n", "line 3: 3 cells; the header names 6"),
        ("burstgpt", BURSTGPT + "x,ChatGPT,1,2,3,API log\n", "line 3: Timestamp must be a time in seconds, 0 or more"),
        ("burstgpt", AZURE, "line 1: the header must name Timestamp once; got 'TIMESTAMP,ContextTokens,"),
        ("azure", AZURE + "yesterday,1,1\n", "line 4: TIMESTAMP must be a date and time such as"),
        (
            "azure",
            AZURE + "2023-11-16 17:59:59,1,1\n",
            "line 4: TIMESTAMP must be no earlier than the first, 2023-11-16",
        ),
        ("azure", AZURE + '"2023,1,1\n', "line 4: not CSV"),
        ("plain", PLAIN + "1,-1,1,\n", "line 4: input_tokens must be an integer of 0 or more; got '-1'"),
        ("plain", PLAIN + "1,1e3,1,\n", "line 4: input_tokens must be an integer of 0 or more; got '1e3'"),
        (
            "plain",
            "timestamp_s,timestamp_s,input_tokens,output_tokens\n",
            "line 1: the header must name timestamp_s once",
        ),
    ],
)
def test_malformed_lines(write: Callable[[str | bytes], str], name: str, content: str, message: str) -> None:
    path = write(content)
    with pytest.raises(InputError) as caught:
        read(path, name)
    assert str(caught.value).startswith(message)


def test_a_line_without_an_end_is_not_read_whole(write: Callable[[str | bytes], str], monkeypatch: Any) -> None:
    monkeypatch.setattr(text, "MAX_LINE", 100)
    with pytest.raises(InputError, match="line 2 is longer than 100 characters: this is no trace"):
        read(write(lines(MOONCAKE) + "x" * 101), "mooncake")


@pytest.mark.parametrize("content", ["", "\n\n", "a,b,c\n1,2,3\n", '{"timestamp": 1}\n', "{\n", "PK\x03\x04\xff"])
def test_an_unknown_format_is_refused(write: Callable[[str | bytes], str], content: str) -> None:
    with pytest.raises(InputError, match=r"the trace is empty|line 1 is of no known format; give --format"):
        read(write(content))


def test_files_that_are_none(tmp_path: Path, write: Callable[[str | bytes], str]) -> None:
    with pytest.raises(InputError, match="No such file"):
        read(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="Is a directory"):
        read(str(tmp_path))
    with pytest.raises(InputError, match="the trace holds no request"):
        read(write(AZURE.split("\n")[0]))
    with pytest.raises(InputError, match="format must be one of bailian, mooncake, burstgpt, azure, plain; got 'csv'"):
        read(write(AZURE), "csv")


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    synthetic.write(str(path), 9000)
    calls: list[tuple[int, int]] = []
    for _ in formats.requests(str(path), formats.detect(str(path)), lambda done, total: calls.append((done, total))):
        pass
    size = path.stat().st_size
    assert len(calls) == 3
    assert calls == sorted(calls)
    assert 0 < calls[0][0] < size
    assert calls[-1] == (size, size)


def test_a_second_process_reads_the_same(tmp_path: Path, write: Callable[[str | bytes], str]) -> None:
    path = tmp_path / "trace.jsonl"
    synthetic.write(str(path), 1200)
    mooncake = formats.named("mooncake")
    calls: list[tuple[int, int]] = []
    here, there = (Prompts(512, 128, 300_000_000) for _ in range(2))
    batches = list(batches_ahead(str(path), mooncake, there, lambda done, total: calls.append((done, total))))
    assert batches == list(here.batches(formats.requests(str(path), mooncake)))
    assert sum(len(batch.times_us) for batch in batches) == 1200 > len(batches[0].times_us)
    assert summed(there) == summed(here)
    assert calls[-1] == (path.stat().st_size,) * 2
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"^line 1201: timestamp is missing$"):
        list(batches_ahead(str(path), mooncake, Prompts(512, 128, 1)))
    # One that is given up half way ends its reader.
    stream = batches_ahead(str(path), mooncake, Prompts(512, 128, 1))
    assert next(stream) == batches[0]
    stream.close()  # type: ignore[attr-defined]


def test_chats_cross_the_pipe(write: Callable[[str | bytes], str]) -> None:
    """Two turns 5 s apart are one session, and a third a second after it another."""
    turns = [{**BAILIAN, "chat_id": chat, "parent_chat_id": before, "timestamp": at} for chat, before, at in CHATS]
    path, bailian = write(lines(*turns)), formats.named("bailian")
    here, there = (Prompts(16, 128, 300_000_000) for _ in range(2))
    assert list(batches_ahead(path, bailian, there)) == list(here.batches(formats.requests(path, bailian)))
    assert summed(there) == summed(here)
    assert (there.sessions.started, there.sessions.peak) == (2, 2)


def summed(prompts: Prompts) -> list[object]:
    """All that a trace's prompts add up to."""
    arrivals, sessions = prompts.arrivals, prompts.sessions
    return [
        *(getattr(arrivals, name) for name in ("requests", "input_tokens", "output_tokens", "late", "peak_minute")),
        *(arrivals.first_us, arrivals.now_us),
        *(sessions.started, sessions.peak, sessions.mean(arrivals.first_us)),
    ]


def test_the_synthetic_trace_is_the_same_every_time_and_as_described(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in "abc")
    synthetic.write(str(first), 3000)
    synthetic.write(str(again), 3000)
    synthetic.write(str(other), 3000, seed=1)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    name, requests = read(str(first))
    assert name == "mooncake"
    assert len(requests) == 3000
    assert 23 < sum(len(request.ids) for request in requests) / 3000 < 25
    assert [r.time_us for r in requests] == sorted(r.time_us for r in requests)
    # An id names all before it: it always stands behind the same one.
    before: dict[int, int] = {}
    for request in requests:
        for left, right in zip([-1, *request.ids], request.ids, strict=False):
            assert before.setdefault(right, left) == left
    with pytest.raises(InputError, match="File exists"):
        synthetic.write(str(first), 1)
    with pytest.raises(InputError, match="a synthetic trace has 1 request or more; got 0"):
        synthetic.write(str(tmp_path / "d"), 0)
