"""Checkpoints in the release's own layout: names, index, load, write. `names` and `parameters` need no torch."""
