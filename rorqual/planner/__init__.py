"""Every byte and FLOP of a model, from its config, with the formula shown. Pure functions; no torch in here."""
