"""Every error a user can meet, drawn as a tree.

RorqualError
├── ConfigError        a config value, named by its field, with the legal values
├── FormatError        a tensor that a number format cannot hold (NaN, Inf, wrong width)
├── CheckpointError    a checkpoint that is missing, truncated, or does not match the config
├── InputError         a prompt, image, option or file given by the caller
├── HandoverError      a prompt's state that did not come from its prefill worker, or came damaged
└── CapacityError      pages, slots or positions are used up

All but the last two are ValueErrors, so a caller who knows nothing of Rorqual still catches them.
Invariants of our own are `assert`, never one of these.
"""

from __future__ import annotations


class RorqualError(Exception):
    """The root: one line that names the thing and the legal values."""


class ConfigError(RorqualError, ValueError):
    """A config value is refused; the message begins with the field's name."""


class FormatError(RorqualError, ValueError):
    """Values, codes or scales that a number format cannot represent."""


class CheckpointError(RorqualError, ValueError):
    """A checkpoint is missing, damaged, or does not fit its config."""


class InputError(RorqualError, ValueError):
    """Something handed in by the caller: ids, images, options, files."""


class HandoverError(RorqualError):
    """What a prefill worker handed over did not come in time, or is not what was sent; it names which part."""


class CapacityError(RorqualError):
    """The cache has no page, slot or position left for what was asked."""
