"""`rorqual diff`: two dumps aligned by name and walked in order of computation, the first divergence explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rorqual.analysis.diff_case import Case, Cause
from rorqual.analysis.diff_causes import classify, shape_cause
from rorqual.analysis.diff_dumps import Dump, Renames, numbers
from rorqual.analysis.diff_order import QUANTISED, dimensions, kin, order_key, parse
from rorqual.analysis.diff_report import Divergence, Report, groups, independent
from rorqual.analysis.diff_tolerance import NUMERICS, Tolerance, rows_of
from rorqual.errors import FormatError, InputError
from rorqual.formats.codec import dequantize
from rorqual.formats.spec import FORMATS

VAGUE = ("", "scale byte", "rounding rule")
"""Forms of an error or a quantisation step that a closer look may replace."""
HALF = (torch.bfloat16, torch.float16)


def diff(
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    *,
    renames: Renames | None = None,
    numerics: str = "auto",
) -> Report:
    """Compare two dumps.

    Args:
        ours, theirs: tensors by name; a `Dump` reads one at a time.
        renames: their names to ours.
        numerics: "fp32", "native", or "auto": what a golden folder's README.json says, else native when both dumps
            hold half precision outside images.

    Raises:
        InputError: no name in common, or an unknown `numerics`.
    """
    renames = renames or Renames()
    found = renames.apply(list(theirs))
    common = sorted(set(ours) & set(found), key=order_key)
    if not common:
        raise InputError(
            f"no tensor name in common: ours has {_some(ours)}, theirs has {_some(found)}; "
            "--rename FILE maps their names to ours"
        )
    pair = Pair(ours, theirs, found, tolerance_of(ours, theirs, found, common, numerics))
    seen = list(pair.divergences(common))
    first = seen[0] if seen else None
    own = independent(seen)
    other = own[0] if own else None
    return Report(
        numerics=pair.tolerance.numerics,
        common=len(common),
        agreeing=len(common) - len(seen),
        only_ours=tuple(sorted(set(ours) - set(found), key=order_key)),
        only_theirs=tuple(sorted(set(found) - set(ours), key=order_key)),
        unused_renames=tuple(renames.unused),
        reshaped=tuple(pair.reshaped),
        first=first,
        cause=pair.cause(first) if first else None,
        other=other,
        other_cause=pair.cause(other) if other else None,
        groups=tuple(groups(common, seen, own)),
    )


def tolerance_of(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], found: Mapping[str, str], common: list[str], numerics: str
) -> Tolerance:
    """The tolerance asked for, or the one that the dumps call for."""
    if numerics not in ("auto", *NUMERICS):
        raise InputError(f"numerics: '{numerics}' is not one of auto, {', '.join(NUMERICS)}")
    readmes: list[Mapping[str, Any]] = [d.readme for d in (ours, theirs) if isinstance(d, Dump) and d.readme]
    if numerics == "auto":
        modes = {str(r["mode"]) for r in readmes if r.get("mode") in NUMERICS}
        if modes:
            numerics = "native" if "native" in modes else "fp32"
        else:
            half = (
                ours[n].dtype in HALF and theirs[found[n]].dtype in HALF for n in common if parse(n).kind != "image"
            )
            numerics = "native" if any(half) else "fp32"
    noise: dict[str, float] = {}
    for readme in readmes:
        stated = readme.get("checks", {}).get("noise_vs_alternative_order", {})
        noise |= {name: float(value["rms_rel"]) for name, value in stated.items() if "rms_rel" in value}
    return Tolerance(numerics=numerics, noise=noise)


@dataclass(slots=True)
class Pair:
    """Two dumps under our names. reshaped: names whose values agree though their shapes differ."""

    ours: Mapping[str, Tensor]
    theirs: Mapping[str, Tensor]
    found: Mapping[str, str]
    tolerance: Tolerance
    reshaped: list[str] = field(default_factory=list)

    def look(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """(ours, theirs) of a name as numbers without a batch dimension; None where a dump lacks it."""
        a = numbers(self.ours[name]) if name in self.ours else None
        b = numbers(self.theirs[self.found[name]]) if name in self.found else None
        return align(name, a, b)

    def divergences(self, common: list[str]) -> Iterator[Divergence]:
        for name in common:
            a, b = self.look(name)
            assert a is not None and b is not None
            if a.shape != b.shape:
                if (
                    a.numel() == b.numel()
                    and a.numel()
                    and not bool(self.tolerance.wrong(name, a, b.reshape(a.shape)).any())
                ):
                    self.reshaped.append(name)
                    continue
                yield Divergence(
                    name=name,
                    shape=tuple(a.shape),
                    row=None,
                    index=None,
                    ours=None,
                    theirs=None,
                    rows=a.shape[0],
                    of_rows=a.shape[0],
                    elements=a.numel(),
                    of_elements=a.numel(),
                    error=float("inf"),
                    unit="shape",
                )
                continue
            wrong = self.tolerance.wrong(name, a, b)
            if bool(wrong.any()):
                yield self._divergence(name, a, b, wrong)

    def _divergence(self, name: str, a: Tensor, b: Tensor, wrong: Tensor) -> Divergence:
        index = tuple(int(i) for i in wrong.nonzero()[0])
        floats = a.is_floating_point()
        unit = "elements" if not floats else "abs/(1+|b|)" if self.tolerance.numerics == "fp32" else "rms"
        return Divergence(
            name=name,
            shape=tuple(a.shape),
            row=index[0],
            index=index,
            ours=a[index].item(),
            theirs=b[index].item(),
            rows=int(rows_of(wrong).any(1).sum()),
            of_rows=a.shape[0],
            elements=int(wrong.sum()),
            of_elements=a.numel(),
            error=self.tolerance.error(name, a, b),
            unit=unit,
        )

    def cause(self, divergence: Divergence) -> Cause:
        """What a divergence looks like."""
        name = divergence.name
        a, b = self.look(name)
        assert a is not None and b is not None
        if a.shape != b.shape:
            return shape_cause(name, a, b, self.tolerance)
        cause = self._classify(name, a, b)
        vague = cause.kind in ("error", "quantisation") and cause.what in VAGUE
        return self._of_entry(name, cause) if vague and parse(name).part else cause

    def _of_entry(self, name: str, cause: Cause) -> Cause:
        """Scale bytes or codes alone may look like rounding or like nothing: the cache entry's values tell more. They
        are decoded where a dump holds codes and scales only."""
        stem = parse(name).stem
        for other in dict.fromkeys((stem, *kin(name, self.found))):
            a, b = (self._values(other, side) if x is None else x for side, x in enumerate(self.look(other)))
            if a is None or b is None or a.shape != b.shape or not bool(self.tolerance.wrong(other, a, b).any()):
                continue
            better = self._classify(other, a, b)
            if cause.kind == "quantisation" and (other != stem or better.kind == "quantisation"):
                continue
            if cause.kind == "quantisation" or better.kind != "error" or better.what:
                return replace(better, detail=f"{better.detail} (seen in {other})")
        return cause

    def _classify(self, name: str, a: Tensor, b: Tensor) -> Cause:
        wrong = self.tolerance.wrong(name, a, b)
        return classify(Case(name=name, ours=a, theirs=b, wrong=wrong, tolerance=self.tolerance, look=self.look))

    def _values(self, stem: str, side: int) -> Tensor | None:
        """Values of a cache entry that a dump holds as codes and scales only."""
        last = parse(stem).last
        codes = next((c for p in (".packed", ".codes") if (c := self.look(stem + p)[side]) is not None), None)
        scales = self.look(stem + ".scale")[side]
        if last not in QUANTISED or codes is None or scales is None:
            return None
        try:
            return dequantize(codes.to(torch.uint8), scales.to(torch.uint8), FORMATS[QUANTISED[last]]).double()
        except FormatError:
            return None


def align(name: str, a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Drop leading dimensions of 1 beyond what the name has, or beyond the other's; a mixed pair becomes float."""
    rank = dimensions(name)
    if rank is not None:
        a, b = (None if x is None else _squeezed(x, max(rank, 1)) for x in (a, b))
    if a is None or b is None:
        return a, b
    a, b = _squeezed(a, b.dim()), _squeezed(b, a.dim())
    if a.is_floating_point() != b.is_floating_point():
        a, b = a.double(), b.double()
    return a, b


def _squeezed(x: Tensor, dims: int) -> Tensor:
    while x.dim() > dims and x.shape[0] == 1:
        x = x[0]
    return x


def _some(names: Mapping[str, Any]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f", ... ({len(listed)})" if len(listed) > 3 else "") if listed else "nothing"
