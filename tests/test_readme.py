"""The documents name only what exists: files, make targets, verbs and their options, public names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import rorqual
from rorqual.cli.app import VERBS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/demo-model.md", "docs/cluster.md")
MADE_BY_THE_READER = re.compile(r"build/|runs/|my-texts/|ids\.json|ours\.safetensors|theirs\.safetensors|README\.json")
FILE_LIKE = re.compile(r"(?:\.?[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|md|txt|toml|json)|LICENSE|Makefile")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def code_spans(text: str) -> list[str]:
    """Inline code and the lines of code blocks, comments cut off."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [span for span in [*lines, *inline] if span]


def verb_calls(text: str) -> list[list[str]]:
    return [span.split() for span in code_spans(text) if re.match(r"rorqual [a-z-]", span)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    words = [word for span in code_spans(text_of(document)) for word in span.split()]
    files = [word for word in words if FILE_LIKE.fullmatch(word) and not MADE_BY_THE_READER.match(word)]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_named_make_targets_exist() -> None:
    spans = [span.split() for span in code_spans(text_of("README.md")) if span.startswith("make ")]
    targets = {words[1] for words in spans}
    assert {"demo", "test", "test-all", "bench"} <= targets
    makefile = text_of("Makefile")
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def test_torch_index_is_explained() -> None:
    assert "make demo TORCH_INDEX=URL" in text_of("README.md")
    assert "TORCH_INDEX" in text_of("Makefile")


def test_named_verbs_and_options_exist() -> None:
    calls = [call for document in DOCUMENTS for call in verb_calls(text_of(document))]
    verbs = {verb.name: verb for verb in VERBS}
    assert {"init", "inspect", "generate", "trace", "verify"} <= {call[1] for call in calls}
    for _, name, *words in calls:
        if name.startswith("-"):  # `rorqual --help`
            continue
        assert name in verbs, f"README calls `rorqual {name}`"
        target = verbs[name].load()
        group = {verb.name: verb for verb in getattr(target, "VERBS", ())}
        if group and words:  # `rorqual plan` alone is legal
            assert words[0] in group, f"README calls `rorqual {name} {words[0]}`"
            target = group[words[0]].load()
        source = inspect.getsource(target)
        for option in (word for word in words if word.startswith("--")):
            parameter = option.removeprefix("--").replace("-", "_")
            assert f'"{option}"' in source or re.search(rf"\b{parameter}\b *:", source), f"{name} has no {option}"


def test_named_python_names_are_public() -> None:
    names = {name for document in DOCUMENTS for name in re.findall(r"\brorqual\.(\w+)\(", text_of(document))}
    assert names == {"load", "trace"}
    assert names <= set(rorqual.__all__)


def test_the_architecture_fits_on_a_page() -> None:
    text = text_of("docs/architecture.md")
    assert len(text.splitlines()) <= 60
    packages = {path.parent.name for path in (ROOT / "rorqual").glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / "rorqual").glob("*.py")} - {"__init__"}
    assert packages
    assert {unit for unit in packages | modules if f"`{unit}`" not in text} == set()


def test_the_five_files_are_five() -> None:
    listed = re.findall(r"^\d\. `([^`]+)`", text_of("README.md"), re.MULTILINE)
    assert len(listed) == 5
    assert len(set(listed)) == 5
