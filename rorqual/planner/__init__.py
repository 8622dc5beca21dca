"""Every byte and FLOP of a model, from its config, with the formula shown. Pure functions; no torch in here.

    ledger, numbers        what a config stores; the figures that are quoted of it: `numbers(config)`
    explain, glossary      what each technique saves and pays; the terms
    work, counts           what one decoded token reads and computes; parameters
    capacity, deployment   a rank's memory plan, from which the engine allocates; devices, placement, parallel, storage,
                           mix, padding, workspace, roofline, check_log beside them
    traffic                bytes of hand-overs, rates on links, a pool's traffic
    traces                 a request trace replayed against a pool
    families, compare      other models' caches, from their own configs
    report                 all of it on one page
    figure, table, units   how a number explains itself, and how it is printed

>>> from rorqual.config import presets
>>> from rorqual.planner.numbers import numbers
>>> figure = numbers(presets.load("v4.1-flash"))["global_token_bytes"]
>>> figure.value, figure.expression
(890, '(3 / 2 + 1 / 1) x (288 + 68)')
"""
