"""Recording and injection of intermediate tensors by name: what makes the model an oracle.

Every named tensor of the forward pass goes through `Tap.__call__`, which returns it, or the value injected in its
place. Names are those of the goldens' README.json. The default tap keeps nothing and costs one call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from rorqual.errors import InputError
from rorqual.formats.codec import fake_quantize
from rorqual.formats.spec import NumberFormat

BUILDING = ("tail_kv", "tail_score", "engram_tokens")
"""Last parts of the names of values that only the end state of a trace is made of."""


TIE_REACH = 2e-6
"""About sixteen fp32 roundings of a group's largest element: what two orders of summation may differ by."""
TAIL_ROWS = 8
"""Compressor input rows kept for the end state: at least the largest ratio."""


class Tap:
    """Keeps and replaces nothing."""

    active = False

    def wants(self, name: str) -> bool:
        """Whether `name` would be kept: ask before computing what only a trace needs."""
        return False

    def __call__(self, name: str, value: Tensor, first: int = 0) -> Tensor:
        """Pass `value` through. `first` is the index its first row has in the whole sequence's tensor."""
        return value

    def nudge(self, name: str, value: Tensor, fmt: NumberFormat, first: int) -> Tensor:
        """Called with a cache entry before it is quantised: a chance to note or resolve rounding ties."""
        return value


@dataclass(frozen=True, slots=True)
class Tie:
    """An element that stood within TIE_REACH of its group's largest magnitude from a rounding boundary.

    shift: what to add to it so that it rounds the other way.
    """

    name: str
    position: int
    channel: int
    value: float
    shift: float

    @property
    def place(self) -> tuple[str, int, int]:
        return self.name, self.position, self.channel


class Recorder(Tap):
    """Records tensors whose name matches a glob, and injects given ones.

    Args:
        select: globs separated by commas, e.g. "layers.*.attn_out,logits".
        inject: name -> tensor of the whole sequence; rows are cut out by `first`. Injected names match without the
            prefix, and only while `injecting` is true (the prompt, not the decode steps).

    prefix goes before every recorded name. stacked: each call's rows become one entry of a new first dimension (the
    draft's block). skip: names matched by it are not kept for now. hidden_pieces: rows that are not traced themselves
    but that the trace's end is made of; kept over the whole run, also while muted. ties: a list to note rounding ties
    in, None to look for none. resolve: ties to round the other way.
    """

    active = True

    def __init__(self, select: str = "*", inject: Mapping[str, Tensor] | None = None) -> None:
        self.globs = tuple(g.strip() for g in select.split(","))
        self.inject = dict(inject or {})
        self.used: set[str] = set()
        self.prefix = ""
        self.injecting = True
        self.muted = False
        self.stacked = False
        self.skip: re.Pattern[str] | None = None
        self.pieces: dict[str, list[Tensor]] = {}
        self.hidden_pieces: dict[str, list[Tensor]] = {}
        self.ties: list[Tie] | None = None
        self.resolve: Sequence[Tie] = ()

    def wants(self, name: str) -> bool:
        if self.muted or (self.skip is not None and self.skip.match(name)):
            return False
        return any(fnmatchcase(self.prefix + name, g) for g in self.globs)

    def __call__(self, name: str, value: Tensor, first: int = 0) -> Tensor:
        if name.rpartition(".")[2] in BUILDING:
            pieces = self.hidden_pieces.setdefault(name, [])
            pieces.append(value if value.dim() == 1 else torch.cat((*pieces, value))[-TAIL_ROWS:].clone())
            del pieces[: -1 if value.dim() > 1 else 0]
            return value
        if self.wants(name):
            kept = value.detach().clone()
            self.pieces.setdefault(self.prefix + name, []).append(kept[None] if self.stacked else kept)
        if self.injecting and name in self.inject:
            return self._injected(name, value, first)
        return value

    def _injected(self, name: str, value: Tensor, first: int) -> Tensor:
        given = self.inject[name]
        self.used.add(name)
        if given.shape[1:] != value.shape[1:] or given.shape[0] < first + value.shape[0]:
            raise InputError(
                f"inject: {name} has shape {list(given.shape)}, rows {first}..{first + value.shape[0]} of width "
                f"{list(value.shape[1:])} are needed"
            )
        return given[first : first + value.shape[0]].to(value.dtype)

    def nudge(self, name: str, value: Tensor, fmt: NumberFormat, first: int) -> Tensor:
        if self.ties is None or not value.shape[0]:
            return value
        for tie in self.resolve:
            if tie.name == self.prefix + name and first <= tie.position < first + value.shape[0]:
                value = value.clone()
                value[tie.position - first, tie.channel] += tie.shift
        self.ties += find_ties(self.prefix + name, value, fmt, first)
        return value

    def add(self, name: str, value: Tensor) -> None:
        """Record a tensor that is not a value of the forward pass (state, ids)."""
        if self.wants(name):
            self.pieces.setdefault(self.prefix + name, []).append(value)

    def tensors(self, join: Callable[[str, list[Tensor]], Tensor] | None = None) -> dict[str, Tensor]:
        """Every recorded name with its pieces joined along the rows."""
        combine = join or (lambda _name, pieces: torch.cat(pieces))
        return {name: combine(name, pieces) for name, pieces in self.pieces.items()}


def find_ties(name: str, value: Tensor, fmt: NumberFormat, first: int) -> list[Tie]:
    """Elements of value [rows, width] that round another way when moved by TIE_REACH of their group's amax."""
    x = value.float()
    reach = x.unflatten(-1, (-1, fmt.group)).abs().amax(-1) * TIE_REACH
    reach = reach.repeat_interleave(fmt.group, dim=-1)
    plain = fake_quantize(x, fmt)
    found = []
    for shift in (reach, -reach):
        moved = fake_quantize(x + shift, fmt)
        for row, channel in torch.nonzero(moved != plain).tolist():
            at = (row, channel)
            found.append(Tie(name, first + row, channel, float(x[at]), 2 * float(shift[at])))
    return found
