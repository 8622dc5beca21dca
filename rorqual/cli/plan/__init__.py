"""Every byte and FLOP of a model, from its config, with the formula shown.

A verb reads a MODEL (a preset, a config.json, a checkpoint folder), asks `rorqual.planner`, and prints tables, or the
same rows with `--json` or `--csv`. No torch anywhere below.
"""

from __future__ import annotations

from rorqual.cli.app import Verb

BARE = ("ledger", "v4.1-flash")
VERBS: tuple[Verb, ...] = (
    Verb(name="ledger", target="rorqual.cli.plan.ledger:command", help="Layers, entries and bytes of the cache"),
    Verb(name="numbers", target="rorqual.cli.plan.numbers:command", help="Every figure with its formula and source"),
    Verb(name="explain", target="rorqual.cli.plan.explain:command", help="What each technique saves and what it pays"),
    Verb(name="capacity", target="rorqual.cli.plan.capacity:command", help="Sessions and tokens that devices hold"),
    Verb(name="traffic", target="rorqual.cli.plan.traffic:command", help="Bandwidth that a split and a pool need"),
    Verb(name="trace", target="rorqual.cli.plan.trace:command", help="Replay a request trace against a pool"),
    Verb(name="compare", target="rorqual.cli.plan.compare:command", help="Cache bytes of other models beside this one"),
    Verb(name="glossary", target="rorqual.cli.plan.glossary:command", help="The terms, and where each comes from"),
    Verb(name="report", target="rorqual.cli.plan.report:command", help="One self-contained HTML page of it all"),
)
