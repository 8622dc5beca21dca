"""A conversation survives the end of its process: real processes, one after the other, over one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import Said, said
from models import random_ids, tiny, tiny_folder
from talking import PAGE, PARAMS

from rorqual.engine.llm import LLM

SCRIPT = Path(__file__).with_name("talking.py")


def talked(store: Path, replay: str, prefill: str, ids: list[int]) -> tuple[Said, dict[str, Any]]:
    """What a process of its own says to a prompt, and what that cost."""
    command = [sys.executable, str(SCRIPT), str(tiny_folder()), str(store), replay, prefill, ",".join(map(str, ids))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return (found["ids"], found["logprobs"]), found["counts"]


@pytest.mark.parametrize(
    ("replay", "prefill"),
    [("bounded", "ced"), pytest.param("exact", "full", marks=pytest.mark.full)],
)
def test_a_conversation_survives_a_restart(tmp_path: Path, replay: str, prefill: str) -> None:
    """The second turn, in a second process, is what one process would have said, to the bit."""
    alone = LLM(tiny("plain"), pages=64, slots=1, speculative=False, replay=replay, prefill=prefill)
    ids = random_ids(90, seed=3).tolist()
    first, cost = talked(tmp_path, replay, prefill, ids)
    assert first == said(alone.generate(ids, PARAMS)[0]) and cost["hit"] == cost["restored"] == 0
    turn = [*ids, *first[0], *random_ids(21, seed=4).tolist()]
    second, cost = talked(tmp_path, replay, prefill, turn)
    (output,) = alone.generate(turn, PARAMS)
    assert second == said(output)
    # The last token that was said was never fed.
    assert cost["hit"] == cost["restored"] == output.counts.hit == (len(ids) + len(first[0]) - 1) // PAGE * PAGE
    assert cost["computed"] == output.counts.computed and output.counts.restored == 0
