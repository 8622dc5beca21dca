"""Held out by document, whole groups at a time."""

from __future__ import annotations

import pytest

from rorqual.errors import ConfigError
from rorqual.training.data.documents import Document
from rorqual.training.data.split import heldout_groups

PAIRS = [Document(name=f"{v}/{b}", text="x", group=b) for v in ("one", "two") for b in ("Job", "Ruth", "Mark", "Luke")]


def test_a_pattern_takes_the_whole_group() -> None:
    assert heldout_groups(PAIRS, ["one/Ruth"], 0) == {"Ruth"}
    assert heldout_groups(PAIRS, ["*/Job", "two/M*"], 0) == {"Job", "Mark"}
    assert heldout_groups(PAIRS, [], 0) == set()


def test_a_fraction_of_the_rest_is_drawn_by_name() -> None:
    alone = heldout_groups(PAIRS, [], 0.25)
    assert len(alone) == 1
    assert heldout_groups(reversed(PAIRS), [], 0.25) == alone, "the order of the documents does not matter"
    (named,) = {"Job", "Ruth"} - alone if len({"Job", "Ruth"} - alone) == 1 else {"Job"}
    both = heldout_groups(PAIRS, [f"*/{named}"], 0.25)
    assert named in both and len(both) == 2
    assert len(heldout_groups(PAIRS, [], 0.9)) == 3, "never all"
    assert heldout_groups(PAIRS[:1], [], 0.9) == set(), "a single document is trained on"


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data.heldout: '\*/Rut' matches no document; .*: (one|two)/Ruth, (one|two)/R"
    ):
        heldout_groups(PAIRS, ["*/Job", "*/Rut"], 0)
    with pytest.raises(ConfigError, match="nothing is left to train on"):
        heldout_groups(PAIRS, ["*"], 0)
    assert heldout_groups([], ["*/Job"], 0.5) == set(), "no document at all is for another to report"
