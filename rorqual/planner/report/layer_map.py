"""The layers as a map, a column each: part, mode, ratio, whose KV and Top-K it reads, candidates, Engram, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rorqual.config import LayerRole
from rorqual.layout import KVLayout
from rorqual.planner.report.markup import Markup
from rorqual.planner.report.picture import box, circle, drawing, framed, line, words
from rorqual.planner.units import number_text

CELL, LEFT, RIGHT = 24.0, 92.0, 34.0
LETTERS = {"swa": "S", "full": "F", "reindex": "I", "reuse": "R"}
MODES = {
    "swa": "S: its window alone",
    "full": "F: makes KV, index keys and a Top-K",
    "reindex": "I: makes a Top-K over another's KV",
    "reuse": "R: reads KV and Top-K of others",
}
# Middle of each row, from the top.
_Y = {
    "part": 14.0,
    "layer": 38.0,
    "mode": 64.0,
    "ratio": 90.0,
    "KV from": 114.0,
    "Top-K from": 138.0,
    "candidates": 162.0,
    "Engram table": 188.0,
    "B a token": 214.0,
}
HEIGHT = 232.0


def layer_map(layout: KVLayout) -> Markup:
    """The figure "layer-map"; all that it shows is in its description too, and in the table of layers.

    >>> from rorqual.config import presets
    >>> figure = layer_map(KVLayout(presets.load("v4.1-flash")))
    >>> "full: 2, 8, 14, 20;" in figure, "KV of layer 20: read by 20-39, ratio 1, 356 B" in figure
    (True, True)

    Bytes a token; source: `ModelConfig.roles`, `KVLayout.sources`.
    """
    roles = layout.config.roles
    content = [words(0, middle + 4, name, "faint") for name, middle in _Y.items()]
    content += [*_parts(roles), *_columns(layout), *_links(roles, "KV from"), *_links(roles, "Top-K from")]
    title = f"The {len(roles)} layers: who makes and who shares"
    width = LEFT + CELL * len(roles) + RIGHT
    svg = drawing("layer-map-drawing", title, describe(layout), content, width=width, height=HEIGHT, kind="wide")
    used = {str(role.mode) for role in roles}
    legend = [(mode, meaning) for mode, meaning in MODES.items() if mode in used]
    caption = (
        f"{title}. On a line, a dot makes what the ticks read; of the candidates, a ring makes the pool, a dot uses it."
    )
    return framed("layer-map", svg, caption, legend)


def describe(layout: KVLayout) -> str:
    """The map in words, sizes in bytes a token.

    >>> from rorqual.config import presets
    >>> for sentence in describe(KVLayout(presets.load("real-pair"))).split(". "):
    ...     print(sentence)
    2 layers
    Decoder: 0-1
    Modes: full: 0; reuse: 1
    KV of layer 0: read by 0-1, ratio 1, 356 B a token
    Top-K of layer 0: read by 0-1
    Candidates: made by 0, used by none.

    Source: `ModelConfig.roles`.
    """
    roles = layout.config.roles
    parts = "; ".join(f"{name}: {ranges(ids)}" for name, ids in _grouped((str(r.part), r.layer_id) for r in roles))
    modes = "; ".join(f"{name}: {ranges(ids)}" for name, ids in _grouped((str(r.mode), r.layer_id) for r in roles))
    said = [f"{len(roles)} layers", f"{parts[:1].upper()}{parts[1:]}", f"Modes: {modes}"]
    for source in layout.sources:
        readers = ranges(role.layer_id for role in roles if role.kv_source == source.layer_id)
        size = number_text(source.bytes_per_token)
        said.append(f"KV of layer {source.layer_id}: read by {readers}, ratio {source.ratio}, {size} B a token")
    for layer, readers_of in _grouped((str(r.index_source), r.layer_id) for r in roles if r.index_source is not None):
        said.append(f"Top-K of layer {layer}: read by {ranges(readers_of)}")
    users = ranges(role.layer_id for role in roles if role.uses_candidates)
    said += [f"Candidates: made by {role.layer_id}, used by {users}" for role in roles if role.is_candidate_source]
    tables = [role for role in roles if role.engram_index is not None]
    said += [f"Engram table {role.engram_index}: layer {role.layer_id}" for role in tables]
    return ". ".join(said) + "."


def ranges(ids: Iterable[int]) -> str:
    """Ascending layer ids with neighbours gathered.

    >>> ranges([0, 1, 2, 8, 20, 21]), ranges([])
    ('0-2, 8, 20-21', 'none')

    Without unit; source: the caller.
    """
    runs: list[list[int]] = []
    for id in ids:
        if runs and runs[-1][-1] == id - 1:
            runs[-1].append(id)
        else:
            runs.append([id])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"


def _grouped(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    """By name, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for name, id in pairs:
        found.setdefault(name, []).append(id)
    return list(found.items())


def _middle(layer_id: int) -> float:
    return LEFT + CELL * (layer_id + 0.5)


def _parts(roles: Sequence[LayerRole]) -> Iterator[Markup]:
    """A bracket over each part, named where the name has room."""
    y = _Y["part"]
    for name, ids in _grouped((str(role.part), role.layer_id) for role in roles):
        left, right = LEFT + CELL * ids[0] + 2, LEFT + CELL * (ids[-1] + 1) - 2
        yield line(left, y + 8, right, y + 8, "link")
        if right - left > 8 * len(name):
            yield words((left + right) / 2, y + 4, name, "mid")


def _columns(layout: KVLayout) -> Iterator[Markup]:
    added = {source.layer_id: number_text(source.bytes_per_token) for source in layout.sources}
    for role in layout.config.roles:
        x, mode = _middle(role.layer_id), str(role.mode)
        yield words(x, _Y["layer"] + 4, str(role.layer_id), "mid faint")
        yield box(x - CELL / 2, _Y["mode"] - 13, CELL, 26, f"cell {mode}", f"layer {role.layer_id}: {mode}")
        yield words(x, _Y["mode"] + 5, LETTERS[mode], "mid")
        if role.ratio:
            yield words(x, _Y["ratio"] + 4, str(role.ratio), "mid")
        if role.is_candidate_source or role.uses_candidates:
            ring = role.is_candidate_source
            yield circle(x, _Y["candidates"], 7 if ring else 4, "ring" if ring else "dot")
        if role.engram_index is not None:
            yield box(x - CELL / 2 + 2, _Y["Engram table"] - 11, CELL - 4, 22, "ring")
            yield words(x, _Y["Engram table"] + 4, str(role.engram_index), "mid")
        if role.layer_id in added:
            yield words(x, _Y["B a token"] + 4, added[role.layer_id], "mid")


def _links(roles: Sequence[LayerRole], row: str) -> Iterator[Markup]:
    """A line from each source to its last reader, a tick for every reader, a dot on the source."""
    y = _Y[row]
    sources = ((str(role.kv_source if row == "KV from" else role.index_source), role.layer_id) for role in roles)
    for source, readers in _grouped(pair for pair in sources if pair[0] != "None"):
        x = _middle(int(source))
        yield line(x, y, _middle(readers[-1]), y, "link")
        yield from (line(_middle(id), y - 5, _middle(id), y + 5, "link") for id in readers)
        yield circle(x, y, 6, "dot", f"layer {source}: read by {ranges(readers)}")
