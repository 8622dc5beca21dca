"""A recipe: everything that decides a training run, in one TOML file.

Legal values stand beside each field; an unknown key or a value out of range is a ConfigError that names it, whether it
comes from a file or from Python.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from rorqual.config import ModelConfig, presets
from rorqual.errors import ConfigError
from rorqual.training.data.tokens import LEAST_VOCAB
from rorqual.training.learner import Phase

PRESETS = ("demo", "drafts", "tiny")

Range = tuple[float, float]
"""Least and greatest legal value, both included; of a field of whole numbers both are integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Values of their fields' types, in their ranges. A list is taken and kept as a tuple, an integer as a float where
    the field is one.

    Raises:
        ConfigError: another type, or out of range; the message begins with `section.key`.
    """

    NAME: ClassVar[str]
    RANGES: ClassVar[Mapping[str, Range]] = {}
    """Of every number."""
    OR_ZERO: ClassVar[frozenset[str]] = frozenset()
    """Numbers that may also be 0, outside of their range."""
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Of every string."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = self._checked(each.name, getattr(self, each.name), each.default)
            object.__setattr__(self, each.name, value)

    def _checked(self, key: str, value: Any, default: Any) -> Any:
        name = f"{self.NAME}.{key}"
        if isinstance(default, tuple):
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"{name} must be a list of strings, got {value!r}")
            return tuple(value)
        if isinstance(default, str):
            if value not in self.CHOICES[key]:
                raise ConfigError(f"{name} is {value!r}, must be {' or '.join(map(repr, self.CHOICES[key]))}")
            return value
        whole = isinstance(default, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ConfigError(f"{name} must be {'an integer' if whole else 'a number'}, got {value!r}")
        least, greatest = self.RANGES[key]
        off = key in self.OR_ZERO
        # NaN is in no range.
        if not least <= value <= greatest and not (off and value == 0):
            legal = f"in {_shown(least)}..{_shown(greatest)}"
            raise ConfigError(f"{name} is {value}, must be {'0 or ' if off else ''}{legal}")
        return value if whole else float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecipe(Section):
    """corpus: "english" builds the demo's texts from installed packages; "" takes `--data` only.
    vocab_size: of the tokenizer to train, special tokens included.
    seq_len, long_seq_len: tokens a sequence, before and from `long_from` (a fraction of the steps); 0: never long.
    batch_tokens: a step, rounded down to whole sequences; micro_tokens: at once (the rest is accumulated), likewise.
        At least one sequence either way.
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

    NAME: ClassVar[str] = "data"
    RANGES: ClassVar[Mapping[str, Range]] = {
        "vocab_size": (LEAST_VOCAB, 1 << 20),
        "seq_len": (2, 1 << 20),
        "long_seq_len": (2, 1 << 20),
        "long_from": (0, 1),
        "batch_tokens": (1, 1 << 30),
        "micro_tokens": (1, 1 << 30),
        "heldout_fraction": (0, 0.9),
        "chat_fraction": (-1, 1),
    }
    OR_ZERO: ClassVar[frozenset[str]] = frozenset({"long_seq_len"})
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"corpus": ("", "english")}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRecipe(Section):
    """Weights of the losses beside the next token's, 0 for off.

    learn: "draft" leaves the backbone as it is: only DSpark's losses are taken, only its tensors change.
    indexer: KL to the joint softmax; indexer_rows: share of the query rows it is taken on.
    balance: the small sequence balance loss; bias_rate: step of the router bias, which needs no loss.
    draft_ce, draft_tv, draft_confidence: DSpark; anchors: share of the positions that a block is drafted after.
    draft_decay: weight of a draft of a block relative to the one before it, which must be kept for it to matter.
    replay: share of sequences with a simulated decoder seam.
    noise: share of the input tokens that are replaced by DSpark's noise token, other ones at each pass over a text.
    """

    learn: str = "all"
    indexer: float = 1.0
    indexer_rows: float = 0.25
    balance: float = 1e-3
    bias_rate: float = 1e-3
    draft_ce: float = 1.0
    draft_tv: float = 1.0
    draft_confidence: float = 0.1
    draft_decay: float = 1.0
    anchors: float = 0.0625
    replay: float = 0.25
    noise: float = 0.0

    NAME: ClassVar[str] = "loss"
    RANGES: ClassVar[Mapping[str, Range]] = {
        "indexer": (0, 1e3),
        "indexer_rows": (0, 1),
        "balance": (0, 1e3),
        "bias_rate": (0, 1),
        "draft_ce": (0, 1e3),
        "draft_tv": (0, 1e3),
        "draft_confidence": (0, 1e3),
        "draft_decay": (0.01, 1),
        "anchors": (0, 1),
        "replay": (0, 1),
        "noise": (0, 0.9),
    }
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"learn": ("all", "draft")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecipe(Section):
    """From which fraction of the steps something is on; 1 is never."""

    sparse_from: float = 0.1
    quantise_from: float = 0.0
    quantise_weights_from: float = 0.5
    draft_from: float = 0.3

    NAME: ClassVar[str] = "phases"
    RANGES: ClassVar[Mapping[str, Range]] = dict.fromkeys(
        ("sparse_from", "quantise_from", "quantise_weights_from", "draft_from"), (0.0, 1.0)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimRecipe(Section):
    """lr: Muon's matrices; lr_adam: everything small; lr_table: embeddings, heads; lr_engram: Engram's tables.
    momentum: of Muon and the tables; beta1, beta2: AdamW.
    clip: norm of the backbone's gradient, of the indexer's and of the draft's, each by itself; 0 for none.
    warmup, decay_from: fractions of the steps; flat between, then a cosine down to lr_end x peak.
    ns_steps: Newton-Schulz iterations.
    """

    lr: float = 2e-3
    lr_adam: float = 2e-3
    lr_table: float = 1e-2
    lr_engram: float = 1e-2
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: float = 0.02
    decay_from: float = 0.5
    lr_end: float = 0.05
    ns_steps: int = 5

    NAME: ClassVar[str] = "optim"
    RANGES: ClassVar[Mapping[str, Range]] = {
        "lr": (0, 10),
        "lr_adam": (0, 10),
        "lr_table": (0, 10),
        "lr_engram": (0, 10),
        "momentum": (0, 0.9999),
        "beta1": (0, 0.9999),
        "beta2": (0, 0.999999),
        "weight_decay": (0, 10),
        "clip": (0, 10**9),
        "warmup": (0, 1),
        "decay_from": (0, 1),
        "lr_end": (0, 1),
        "ns_steps": (1, 50),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecipe(Section):
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

    NAME: ClassVar[str] = "run"
    RANGES: ClassVar[Mapping[str, Range]] = {
        "steps": (1, 1 << 31),
        "seed": (0, (1 << 63) - 1),
        "eval_every": (0, 1 << 31),
        "eval_sequences": (1, 1 << 20),
        "sample_every": (0, 1 << 31),
        "save_every": (0, 1 << 31),
        "keep": (1, 1000),
    }
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"autocast": ("auto", "off")}


_KINDS: tuple[type[Section], ...] = (DataRecipe, LossRecipe, PhaseRecipe, OptimRecipe, RunRecipe)
SECTIONS = {kind.NAME: kind for kind in _KINDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """model: text only, before it is fitted to a tokenizer (`rorqual.training.fit.fit_config`).

    Raises:
        ConfigError: a model with a vision tower; sequences longer than the model's positions; drafts alone where there
            are none, or from later than the first step.
    """

    name: str
    model: ModelConfig
    data: DataRecipe = field(default_factory=DataRecipe)
    loss: LossRecipe = field(default_factory=LossRecipe)
    phases: PhaseRecipe = field(default_factory=PhaseRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)

    def __post_init__(self) -> None:
        if self.model.vision is not None:
            raise ConfigError(
                "model: it has a vision tower, which is not trained; take a preset without one, as 'demo', or a "
                "config.json without its vision_config"
            )
        positions = self.model.max_position_embeddings
        for key in ("seq_len", "long_seq_len"):
            length = getattr(self.data, key)
            if length > positions:
                raise ConfigError(f"data.{key} is {length}, must be at most the model's {positions} positions")
        if self.loss.learn == "draft":
            if not self.model.num_nextn_predict_layers:
                raise ConfigError("loss.learn is 'draft', and the model has no draft layers; must be 'all'")
            if self.phases.draft_from:
                raise ConfigError(
                    f"phases.draft_from is {self.phases.draft_from:g}, must be 0 where loss.learn is 'draft'"
                )

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Recipe:
        """A preset by name, or a TOML file.

        Raises:
            ConfigError: neither; cannot be read; no TOML; an unknown key; a value of another type or out of range.
        """
        if str(source) in PRESETS:
            text = (resources.files("rorqual.training") / "recipes" / f"{source}.toml").read_text(encoding="utf-8")
            return cls.parse(text, str(source), Path())
        path = Path(source)
        try:
            if not path.is_file():
                raise ConfigError(f"recipe: {path} is neither a file nor a preset; presets: {', '.join(PRESETS)}")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe: {path} cannot be read: {error}") from None
        return cls.parse(text, path.stem, path.parent)

    @classmethod
    def parse(cls, text: str, name: str, folder: Path) -> Recipe:
        """From TOML text; a model path is relative to `folder`."""
        try:
            stated = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # integers of too many digits are no TOMLDecodeError
            raise ConfigError(f"recipe {name}: not TOML ({error})") from None
        for key in stated:
            if key not in ("model", *SECTIONS):
                raise ConfigError(f"recipe {name}: unknown section '{key}'; legal: model, {', '.join(SECTIONS)}")
        parts: dict[str, Any] = {key: _section(kind, stated.get(key, {})) for key, kind in SECTIONS.items()}
        return cls(name=name, model=_model(stated.get("model", "demo"), folder), **parts)

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

    def seq_len_at(self, step: int) -> int:
        """Tokens of each sequence of a step."""
        long = self.data.long_seq_len and step / self.run.steps >= self.data.long_from
        return self.data.long_seq_len if long else self.data.seq_len


def _section(kind: type[Section], stated: Any) -> Section:
    if not isinstance(stated, dict):
        raise ConfigError(f"{kind.NAME} must be a section, got {stated!r}")
    legal = [each.name for each in dataclasses.fields(kind)]
    for key in stated:
        if key not in legal:
            raise ConfigError(f"{kind.NAME}.{key} is unknown; legal: {', '.join(legal)}")
    return kind(**stated)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _model(stated: Any, folder: Path) -> ModelConfig:
    """A preset's name, a path to a config.json, or a table: `base` (either) and fields to change."""
    if isinstance(stated, str):
        stated = {"base": stated}
    if not isinstance(stated, dict) or not isinstance(stated.get("base"), str):
        raise ConfigError("model must be a preset, a path, or a section with 'base' (either of them) and fields")
    base, changes = stated["base"], {key: value for key, value in stated.items() if key != "base"}
    if base in presets.NAMES:
        config = presets.load(base)
    elif os.path.exists(folder / base):
        config = ModelConfig.from_json(folder / base)
    else:
        raise ConfigError(
            f"model: {folder / base} does not exist and is no preset; presets: {', '.join(presets.NAMES)}"
        )
    return config.replace(**changes) if changes else config
