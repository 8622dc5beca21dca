"""Checkpoints in the release's own layout: names, index, load, write."""
