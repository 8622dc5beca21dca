"""What one config file says, before it becomes a ModelConfig, and the helpers both layouts read with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rorqual.config.cache_formats import CacheFormats
from rorqual.config.checks import refuse
from rorqual.errors import ConfigError
from rorqual.log import logger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PartT = TypeVar("PartT", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Values by field name. `stated` is in the file; `implied` is what the layout means by leaving a key out.

    `keys` maps fields to the file's own key where that differs; an error then names both. `label` names the file.
    """

    stated: Mapping[str, Any]
    label: str
    implied: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)

    def constructor_fields(self) -> dict[str, Any]:
        """Arguments for ModelConfig. The number of drafts follows from `compress_ratios` where it is not given."""
        fields = {**self.implied, **self.stated}
        ratios, layers = fields.get("compress_ratios"), fields.get("num_hidden_layers")
        if "num_nextn_predict_layers" not in fields and isinstance(ratios, list | tuple) and type(layers) is int:
            fields["num_nextn_predict_layers"] = max(0, len(ratios) - layers)
        return fields

    def merged_under(self, other: Reading) -> Reading:
        """Both files of a folder as one. `other` is preferred, yet a field that both state must have one value."""
        for name in sorted(self.stated.keys() & other.stated.keys()):
            ours, theirs = self.stated[name], other.stated[name]
            if ours != theirs:
                both = f"{theirs!r} in {other.label}, {ours!r} in {self.label}"
                raise ConfigError(f"{name} must be the same in both files; got {both}")
        stated, implied = {**self.stated, **other.stated}, {**self.implied, **other.implied}
        return Reading(stated=stated, implied=implied, label=f"{other.label} and {self.label}")

    @contextmanager
    def located(self) -> Iterator[None]:
        """Adds the file, and the key it uses, to any refusal raised inside."""
        try:
            yield
        except ConfigError as error:
            name = str(error).partition(" ")[0].partition("[")[0]
            key = self.keys.get(name, name)
            place = self.label if key == name else f"key {key} in {self.label}"
            raise ConfigError(f"{error} ({place})") from None


def section(root: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A required nested object."""
    value = root.get(key)
    if not isinstance(value, Mapping):
        raise refuse(key, "an object", value)
    return value


def part(kind: type[PartT], raw: Mapping[str, Any], prefix: str, ignore: tuple[str, ...] = ()) -> PartT:
    """A nested dataclass from a JSON object; a missing key is an error, an unknown one a warning."""
    fields = dataclasses.fields(kind)
    for f in fields:
        if f.name not in raw and f.default is dataclasses.MISSING:
            raise ConfigError(f"{prefix}.{f.name} is missing")
    names = tuple(f.name for f in fields)
    warn_unknown(raw, (*names, *ignore), prefix)
    return kind(**{name: raw[name] for name in names if name in raw})


def cache_formats(root: Mapping[str, Any], label: str) -> dict[str, CacheFormats]:
    """{"cache": ...} when the file has `cache_formats`, our own key in both layouts; else nothing."""
    if root.get("cache_formats") is None:
        return {}
    raw = section(root, "cache_formats")
    names = {f.name for f in dataclasses.fields(CacheFormats)}
    for name in raw:
        if name not in names:
            raise refuse("cache_formats", "an object with main, index_key, window", name)
    return {"cache": CacheFormats(**raw)}


def require_values(raw: Mapping[str, Any], constants: Mapping[str, object], prefix: str) -> None:
    """Keys that may be absent, but have only one value this model is built for."""
    for key, legal in constants.items():
        if key in raw and (raw[key] != legal or isinstance(raw[key], bool) != isinstance(legal, bool)):
            raise refuse(prefix + key, repr(legal), raw[key])


def warn_unknown(raw: Mapping[str, Any], known: tuple[str, ...], label: str) -> None:
    """Extra keys are accepted: a newer exporter may add some that change nothing. They are never silently dropped."""
    unknown = sorted(str(key) for key in raw.keys() - set(known))
    if unknown:
        logger.warning("%s: unknown keys ignored: %s", label, ", ".join(unknown))
