"""The chain of formulas, from the bytes of an entry to how often content, address and query are renewed.

A row reads the config or rows above it, never one below: so the table can be checked by hand from the top.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from rorqual.config import LayerRole, ModelConfig
from rorqual.layout import KVLayout
from rorqual.planner.explain.entries import entries_per_token, entries_text, row_text
from rorqual.planner.explain.text import by_ratio, equals, exact, groups_text, reference_prompt, summed, times
from rorqual.planner.table import Table
from rorqual.planner.units import plain_number
from rorqual.planner.work import index_groups, selected_groups

_SYMBOL = re.compile(r"[A-Za-z]\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One row. symbol: what later rows call it. formula: in symbols, or a field of the config; expression: with the
    numbers put in, evaluating to `value` in `unit`. uses: the symbols it is made of."""

    symbol: str
    what: str
    formula: str
    expression: str
    value: int | Fraction
    unit: str
    uses: tuple[str, ...]


def chain(config: ModelConfig) -> tuple[Link, ...]:
    """The links in order of dependence. Without a KV source the rows on global KV are left out.

    >>> from rorqual.config import presets
    >>> links = {link.symbol: link.value for link in chain(presets.load("v4.1-flash"))}
    >>> [int(links[symbol]) for symbol in ("entry", "token", "content", "address", "query")]
    [356, 890, 4, 8, 40]
    """
    draft = _Draft(config)
    if config.kv_sources:
        draft.global_kv()
    draft.windows()
    if config.kv_sources:
        draft.reading()
    draft.replay()
    draft.refreshes()
    return tuple(draft.links)


def chain_table(config: ModelConfig) -> Table:
    """The chain as rows. Units are a column; source: `chain`.

    >>> from rorqual.config import presets
    >>> chain_table(presets.load("v4.1-flash")).note
    'content : address : query = 4 : 8 : 40'
    """
    links = chain(config)
    by_symbol = {link.symbol: exact(link.value) for link in links}
    return Table(
        name="chain",
        title="The chain of formulas, each row from the config or from rows above",
        columns=("symbol", "what it is", "formula", "evaluated", "value", "unit", "uses"),
        rows=tuple(
            (
                link.symbol,
                link.what,
                link.formula,
                link.expression if link.expression == exact(link.value) else f"{link.expression} {equals(link.value)}",
                plain_number(link.value),
                link.unit,
                ", ".join(link.uses) or "config",
            )
            for link in links
        ),
        note="content : address : query = " + " : ".join(by_symbol[name] for name in ("content", "address", "query")),
    )


class _Draft:
    """Links in the making. `make` puts the values of earlier symbols into a formula; an unknown one cannot be used."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.layout = KVLayout(config)
        self.links: list[Link] = []
        self.values: dict[str, Fraction] = {}

    def read(self, symbol: str, what: str, unit: str, field: str, value: int | Fraction, expression: str = "") -> None:
        """A row that the config states, or that is counted on its layers."""
        self._add(symbol, what, unit, field, expression or exact(value), value, ())

    def make(
        self, symbol: str, what: str, unit: str, formula: str, value: Callable[[dict[str, Fraction]], Fraction]
    ) -> None:
        """A row made of rows above."""
        uses = tuple(dict.fromkeys(name for name in _SYMBOL.findall(formula) if name in self.values))
        put_in = _SYMBOL.sub(lambda m: exact(self.values[m[0]]) if m[0] in self.values else m[0], formula)
        self._add(symbol, what, unit, formula, put_in, value({name: self.values[name] for name in uses}), uses)

    def _add(
        self,
        symbol: str,
        what: str,
        unit: str,
        formula: str,
        expression: str,
        value: int | Fraction,
        uses: Iterable[str],
    ) -> None:
        assert symbol not in self.values, symbol
        self.values[symbol] = Fraction(value)
        self.links.append(
            Link(
                symbol=symbol,
                what=what,
                formula=formula,
                expression=expression,
                value=value,
                unit=unit,
                uses=tuple(uses),
            )
        )

    def global_kv(self) -> None:
        config, layout = self.config, self.layout
        main, index = layout.main_format, layout.index_format
        width, index_width = config.head_dim, config.index_head_dim
        sources = "sum over KV sources of 1 / ratio"
        self.read("main", "main KV of a group", "B", "row of head_dim", main.row_bytes(width), row_text(main, width))
        index_bytes = index.row_bytes(index_width)
        self.read(
            "index", "index key of a group", "B", "row of index_head_dim", index_bytes, row_text(index, index_width)
        )
        self.make("entry", "a group in one KV source", "B", "main + index", lambda v: v["main"] + v["index"])
        self.read(
            "entries",
            "entries a token adds",
            "entries a token",
            sources,
            entries_per_token(config),
            entries_text(config),
        )
        self.make("main_token", "main KV", "B a token", "entries x main", lambda v: v["entries"] * v["main"])
        self.make("index_token", "index keys", "B a token", "entries x index", lambda v: v["entries"] * v["index"])
        self.make(
            "token", "global KV", "B a token", "main_token + index_token", lambda v: v["main_token"] + v["index_token"]
        )

    def windows(self) -> None:
        config, layout = self.config, self.layout
        width, window = config.head_dim, layout.window_format
        self.read("layers", "backbone layers", "layers", "num_hidden_layers", config.num_hidden_layers)
        self.read("W", "window", "tokens", "sliding_window", config.sliding_window)
        self.read(
            "slot", "window KV of a token", "B", "row of head_dim", window.row_bytes(width), row_text(window, width)
        )
        self.make(
            "window",
            "windows of a sequence",
            "B a sequence",
            "layers x W x slot",
            lambda v: v["layers"] * v["W"] * v["slot"],
        )
        if config.kv_sources:
            self.make(
                "crossing",
                "context at which global KV reaches the windows",
                "tokens",
                "window / token",
                lambda v: v["window"] / v["token"],
            )

    def reading(self) -> None:
        config = self.config
        tokens = config.max_position_embeddings
        sparse = [role for role in config.backbone_roles if role.ratio]
        chosen = sum(selected_groups(config, role, tokens) for role in sparse)
        seen = [(count, groups_text(tokens, ratio)) for count, ratio in by_ratio(sparse)]
        self.read("N", "context of the rows below", "tokens", "max_position_embeddings", tokens)
        self.read(
            "chosen",
            "groups that all layers' Top-K read",
            "entries a decoded token",
            "sum over layers with a ratio of min(index_topk, N // ratio)",
            chosen,
            summed(times(count, f"min({config.index_topk}, {groups})") for count, groups in seen),
        )
        self.make(
            "kv_read",
            "main KV and windows read",
            "B a decoded token",
            "chosen x main + layers x min(W, N) x slot",
            lambda v: v["chosen"] * v["main"] + v["layers"] * min(v["W"], v["N"]) * v["slot"],
        )
        self.read(
            "scored",
            "index keys that all indexers score",
            "entries a decoded token",
            "sum over index sources of N // ratio, at most the pool after the candidate source",
            index_groups(config, tokens),
            self._scored_text(tokens),
        )
        self.make(
            "index_read", "index keys read", "B a decoded token", "scored x index", lambda v: v["scored"] * v["index"]
        )
        a_key = 2 * config.index_n_heads * config.index_head_dim
        self.read(
            "score",
            "products and sums of one index score",
            "FLOP a key",
            "2 x index_n_heads x index_head_dim",
            a_key,
            f"2 x {config.index_n_heads} x {config.index_head_dim}",
        )
        self.make(
            "index_flops", "index scores", "FLOP a decoded token", "scored x score", lambda v: v["scored"] * v["score"]
        )

    def _scored_text(self, tokens: int) -> str:
        pool = self.config.candidate_topk_blocks * self.config.candidate_block_size
        indexers = [role for role in self.config.backbone_roles if role.is_index_source]
        free: list[LayerRole] = [role for role in indexers if not role.uses_candidates]
        held: list[LayerRole] = [role for role in indexers if role.uses_candidates]
        terms = [times(count, groups_text(tokens, ratio)) for count, ratio in by_ratio(free)]
        terms += [times(count, f"min({groups_text(tokens, ratio)}, {pool:,})") for count, ratio in by_ratio(held)]
        return summed(terms)

    def replay(self) -> None:
        config = self.config
        encoder, prompt = config.decoder_start, reference_prompt(config)
        self.read("E", "encoder layers, before the last KV source", "layers", "decoder_start", encoder)
        self.make("D", "decoder layers", "layers", "layers - E", lambda v: v["layers"] - v["E"])
        self.make(
            "back",
            "tokens that the encoder's windows look back",
            "tokens",
            "E x (W - 1)",
            lambda v: v["E"] * (v["W"] - 1),
        )
        self.make("field", "receptive field of the encoder's windows", "tokens", "1 + back", lambda v: 1 + v["back"])
        self.read("P", "prompt of the row below", "tokens", "32,768, or all that fit", prompt)
        self.make(
            "prefill",
            "CED prefill over a full one, in layer-tokens",
            "1",
            "(E x P + D x min(W, P)) / (layers x P)",
            lambda v: (v["E"] * v["P"] + v["D"] * min(v["W"], v["P"])) / (v["layers"] * v["P"]),
        )

    def refreshes(self) -> None:
        config = self.config
        self.read(
            "content",
            "times that global KV is written anew along the stack (KV sources)",
            "refreshes a token",
            "number of kv_source_layer_ids",
            len(config.kv_source_layer_ids),
        )
        self.read(
            "address",
            "times that a Top-K is chosen anew (index sources)",
            "refreshes a token",
            "number of index_source_layer_ids",
            len(config.index_source_layer_ids),
        )
        self.make(
            "query", "times that a query is made anew (layers)", "refreshes a token", "layers", lambda v: v["layers"]
        )
