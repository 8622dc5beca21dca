"""The examples of docs/split.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rorqual.config import presets
from rorqual.inventory.names import expected_tensors
from rorqual.layout import KVLayout
from rorqual.model.transformer import of_encoder
from rorqual.planner.traffic import HANDOVERS, handover

TEXT = (Path(__file__).parents[2] / "docs" / "split.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs_and_prints_text(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example, "docs/split.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_the_examples_are_there() -> None:
    assert len(EXAMPLES) == 2


def test_the_bytes_are_the_planners() -> None:
    layout, found = KVLayout(presets.load("v4.1-flash")), 0
    for row in re.findall(r"^\| ([\d,]+) \| (\w+) \| (.*) \|$", TEXT, re.MULTILINE):
        tokens, mode, rest = (
            int(row[0].replace(",", "")),
            row[1],
            [int(n.replace(",", "")) for n in row[2].split(" | ")],
        )
        own = handover(layout, tokens, mode)
        parts = [own.pages, own.tails + own.history, own.rings + own.drafts, own.streams + own.mixing, own.logits]
        assert rest == [*parts, own.total]
        found += 1
    assert found == 4 * len(HANDOVERS)


def test_what_an_encoder_loads() -> None:
    config = presets.load("v4.1-flash")
    specs = list(expected_tensors(config).values())
    own = [spec for spec in specs if of_encoder(config, spec.name)]
    assert f"{len(own):,} of the release's {len(specs):,} tensors" in TEXT
    for kept in (lambda spec: True, lambda spec: spec.part != "engram_tables"):
        whole, encoder = (sum(spec.nbytes for spec in part if kept(spec)) for part in (specs, own))
        assert f"{whole:,} B | {encoder:,} B" in TEXT
