"""A recipe: everything that decides a training run, in one TOML file.

Legal values stand beside each field; an unknown key or a value out of range is a ConfigError that names it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rorqual.config import ModelConfig, presets
from rorqual.errors import ConfigError
from rorqual.training.learner import Phase

PRESETS = ("demo", "tiny")

Range = tuple[float, float]
"""Least and greatest legal value, both included."""

_UNBOUNDED = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecipe:
    """corpus: "english" builds the demo's texts from installed packages; "" takes `--data` only.
    vocab_size: of the tokenizer to train, special tokens included.
    seq_len, long_seq_len: tokens a sequence, before and from `long_from` (a fraction of the steps); 0: never long.
    batch_tokens: a step; micro_tokens: at once (the rest is accumulated).
    heldout: document names (shell patterns) that are never trained on; heldout_fraction: share of the rest.
    chat_fraction: share of the sequences that are chat where both kinds exist; negative: as they come.
    """

    corpus: str = ""
    vocab_size: int = 4096
    seq_len: int = 512
    long_seq_len: int = 0
    long_from: float = 0.9
    batch_tokens: int = 8192
    micro_tokens: int = 8192
    heldout: tuple[str, ...] = ()
    heldout_fraction: float = 0.02
    chat_fraction: float = -1.0

    RANGES: ClassVar[Mapping[str, Range]] = {
        "vocab_size": (260, 1 << 20),
        "seq_len": (2, 1 << 20),
        "long_seq_len": (0, 1 << 20),
        "long_from": (0, 1),
        "batch_tokens": (1, 1 << 30),
        "micro_tokens": (1, 1 << 30),
        "heldout_fraction": (0, 0.9),
        "chat_fraction": (-1, 1),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRecipe:
    """Weights of the losses beside the next token's, 0 for off.

    indexer: KL to the joint softmax; indexer_rows: share of the query rows it is taken on.
    balance: the small sequence balance loss; bias_rate: step of the router bias, which needs no loss.
    draft_ce, draft_tv, draft_confidence: DSpark; anchors: share of the positions that a block is drafted after.
    replay: share of sequences with a simulated decoder seam.
    """

    indexer: float = 1.0
    indexer_rows: float = 0.25
    balance: float = 1e-3
    bias_rate: float = 1e-3
    draft_ce: float = 1.0
    draft_tv: float = 1.0
    draft_confidence: float = 0.1
    anchors: float = 0.0625
    replay: float = 0.25

    RANGES: ClassVar[Mapping[str, Range]] = {
        "indexer": (0, 1e3),
        "indexer_rows": (0, 1),
        "balance": (0, 1e3),
        "bias_rate": (0, 1),
        "draft_ce": (0, 1e3),
        "draft_tv": (0, 1e3),
        "draft_confidence": (0, 1e3),
        "anchors": (0, 1),
        "replay": (0, 1),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecipe:
    """From which fraction of the steps something is on; 1 is never."""

    sparse_from: float = 0.1
    quantise_from: float = 0.0
    quantise_weights_from: float = 0.5
    draft_from: float = 0.3

    RANGES: ClassVar[Mapping[str, Range]] = dict.fromkeys(
        ("sparse_from", "quantise_from", "quantise_weights_from", "draft_from"), (0.0, 1.0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimRecipe:
    """lr: Muon's matrices; lr_adam: everything small; lr_table: embeddings, heads, Engram tables.
    momentum: of Muon and the tables; beta1, beta2: AdamW; clip: norm of the gradient, 0 for none.
    warmup, decay_from: fractions of the steps; flat between, then a cosine down to lr_end x peak.
    ns_steps: Newton-Schulz iterations.
    """

    lr: float = 2e-3
    lr_adam: float = 2e-3
    lr_table: float = 1e-2
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: float = 0.02
    decay_from: float = 0.5
    lr_end: float = 0.05
    ns_steps: int = 5

    RANGES: ClassVar[Mapping[str, Range]] = {
        "lr": (0, 10),
        "lr_adam": (0, 10),
        "lr_table": (0, 10),
        "momentum": (0, 0.9999),
        "beta1": (0, 0.9999),
        "beta2": (0, 0.999999),
        "weight_decay": (0, 10),
        "clip": (0, 1e9),
        "warmup": (0, 1),
        "decay_from": (0, 1),
        "lr_end": (0, 1),
        "ns_steps": (1, 50),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecipe:
    """steps: optimiser steps. Every so many steps (0: never): eval_every on eval_sequences held-out sequences,
    sample_every, save_every; keep: checkpoints kept. autocast: "auto" is bf16 where the device gains, else "off"."""

    steps: int = 1000
    seed: int = 0
    eval_every: int = 100
    eval_sequences: int = 32
    sample_every: int = 200
    save_every: int = 100
    keep: int = 2
    autocast: str = "auto"

    RANGES: ClassVar[Mapping[str, Range]] = {
        "steps": (1, 1 << 31),
        "seed": (0, (1 << 63) - 1),
        "eval_every": (0, _UNBOUNDED),
        "eval_sequences": (1, 1 << 20),
        "sample_every": (0, _UNBOUNDED),
        "save_every": (0, _UNBOUNDED),
        "keep": (1, 1000),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """model: before it is fitted to a tokenizer (`rorqual.training.parameters.fit_config`)."""

    name: str
    model: ModelConfig
    data: DataRecipe = field(default_factory=DataRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    phases: PhaseRecipe = field(default_factory=PhaseRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)

    def __post_init__(self) -> None:
        longest = max(self.data.seq_len, self.data.long_seq_len)
        if longest > self.model.max_position_embeddings:
            raise ConfigError(
                f"data.seq_len: {longest} is more than the model's {self.model.max_position_embeddings} positions"
            )
        if self.data.corpus not in ("", "english"):
            raise ConfigError(f"data.corpus is {self.data.corpus!r}, must be '' or 'english'")
        if self.run.autocast not in ("auto", "off"):
            raise ConfigError(f"run.autocast is {self.run.autocast!r}, must be 'auto' or 'off'")

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Recipe:
        """A preset by name, or a TOML file.

        Raises:
            ConfigError: neither; no TOML; an unknown key; a value of another type or out of range.
        """
        if str(source) in PRESETS:
            text = (resources.files("rorqual.training") / "recipes" / f"{source}.toml").read_text(encoding="utf-8")
            return cls.parse(text, str(source), Path())
        path = Path(source)
        if not path.is_file():
            raise ConfigError(f"recipe: {path} is neither a file nor a preset; presets: {', '.join(PRESETS)}")
        return cls.parse(path.read_text(encoding="utf-8"), path.stem, path.parent)

    @classmethod
    def parse(cls, text: str, name: str, folder: Path) -> Recipe:
        """From TOML text; a model path is relative to `folder`."""
        try:
            stated = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe {name}: not TOML ({error})") from None
        sections: dict[str, Any] = {
            "data": DataRecipe,
            "loss": LossRecipe,
            "phases": PhaseRecipe,
            "optim": OptimRecipe,
            "run": RunRecipe,
        }
        for key in stated:
            if key not in ("model", *sections):
                raise ConfigError(f"recipe {name}: unknown section '{key}'; legal: model, {', '.join(sections)}")
        parts = {key: _section(kind, key, stated.get(key, {})) for key, kind in sections.items()}
        return cls(name=name, model=_model(stated.get("model", "tiny"), folder), **parts)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with whole sections changed."""
        return dataclasses.replace(self, **changes)

    def phase_at(self, step: int) -> Phase:
        """What is on at a step, counted from 0."""
        done = step / self.run.steps
        return Phase(
            quantise_caches=done >= self.phases.quantise_from,
            quantise_weights=done >= self.phases.quantise_weights_from,
            sparse=done >= self.phases.sparse_from,
            draft=bool(self.model.num_nextn_predict_layers) and done >= self.phases.draft_from,
            replay=self.loss.replay,
        )

    @property
    def last_phase(self) -> Phase:
        """How the model is used: what evaluation and samples run."""
        return dataclasses.replace(self.phase_at(self.run.steps - 1), replay=0.0)

    def seq_len_at(self, step: int) -> int:
        """Tokens of each sequence of a step."""
        long = self.data.long_seq_len and step / self.run.steps >= self.data.long_from
        return self.data.long_seq_len if long else self.data.seq_len


Section = TypeVar("Section")


def _section(kind: type[Section], name: str, stated: Any) -> Section:
    if not isinstance(stated, dict):
        raise ConfigError(f"{name} must be a section, got {stated!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    ranges: Mapping[str, Range] = getattr(kind, "RANGES", {})
    values = {}
    for key, value in stated.items():
        if key not in fields:
            raise ConfigError(f"{name}.{key} is unknown; legal: {', '.join(fields)}")
        values[key] = _checked(f"{name}.{key}", value, fields[key].default, ranges.get(key))
    return kind(**values)


def _checked(name: str, value: Any, default: Any, legal: Range | None) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of strings, got {value!r}")
        return tuple(value)
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, got {value!r}")
        return value
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(f"{name} must be {'an integer' if whole else 'a number'}, got {value!r}")
    assert legal is not None, name
    if not legal[0] <= value <= legal[1]:
        raise ConfigError(f"{name} is {value}, must be in {legal[0]:g}..{legal[1]:g}")
    return value if whole else float(value)


def _model(stated: Any, folder: Path) -> ModelConfig:
    """A preset's name, a path to a config.json, or a table: `base` (either) and fields to change."""
    if isinstance(stated, str):
        stated = {"base": stated}
    if not isinstance(stated, dict) or not isinstance(stated.get("base"), str):
        raise ConfigError("model must be a preset, a path, or a section with 'base' (either of them) and fields")
    base, changes = stated["base"], {key: value for key, value in stated.items() if key != "base"}
    config = presets.load(base) if base in presets.NAMES else ModelConfig.from_json(folder / base)
    return config.replace(**changes) if changes else config
