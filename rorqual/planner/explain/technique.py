"""`Technique`: one idea of the architecture and its answers to three questions.

1. Which factor of the cost does it move: the size of an entry, the number of entries, the number of layers that store
   them, or the work?
2. How many bytes or FLOPs does it save, a token, a layer, a prompt, in *this* config?
3. What does it pay: an approximation, something the model can no longer express, a harder training?

Every saving is the last step: all other techniques of the config stay as they are. Savings of different techniques are
therefore not to be added up; the waterfall (`rorqual.planner.explain.waterfall`) is the order in which they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rorqual.config import ModelConfig
from rorqual.planner.figure import Figure

Factor = Literal["entry size", "number of entries", "number of layers", "work"]
FACTORS: tuple[Factor, ...] = ("entry size", "number of entries", "number of layers", "work")
OFF = "off in this config"


@dataclass(frozen=True, kw_only=True, slots=True)
class Technique:
    """One record.

    id: its name on the command line. aliases: other spellings of it. name: as the field writes it.
    factor: what it moves. moves: the same in a sentence.
    approximation, expressiveness, training: what it pays; each says so when that is nothing. Where the V4.1 report is
        silent and the text says what this project does, the sentence ends in "(extrapolated)".
    used: whether a config has it. count: what it saves in a config that has it, the telling figure first; where the
        later ones take time to count, they are generated as they are asked for.
    """

    id: str
    name: str
    factor: Factor
    moves: str
    approximation: str
    expressiveness: str
    training: str
    used: Callable[[ModelConfig], bool]
    count: Callable[[ModelConfig], Iterable[Figure]]
    aliases: tuple[str, ...] = ()

    def savings(self, config: ModelConfig) -> tuple[Figure, ...]:
        """What it saves in this config, each figure with its denominator in the unit; nothing where it is off.

        >>> from rorqual.config import presets
        >>> from rorqual.planner.explain.sharing import CROSS_LAYER_SHARING
        >>> release = presets.load("v4.1-flash")
        >>> [(figure.value, figure.unit) for figure in CROSS_LAYER_SHARING.savings(release)]
        [(Fraction(9434, 1), 'B a token')]
        >>> CROSS_LAYER_SHARING.savings(release.without("compression"))
        ()
        """
        return tuple(self.count(config)) if self.used(config) else ()

    def headline(self, config: ModelConfig) -> Figure | None:
        """The first of `savings`, without waiting for the others; None where the technique is off.

        >>> from rorqual.config import presets
        >>> from rorqual.planner.explain.sharing import COMPRESSION
        >>> figure = COMPRESSION.headline(presets.load("v4.1-flash"))
        >>> figure and (figure.shown, figure.unit, figure.expression)
        ('534', 'B a token', '3 x 356 x (1 - 1/2)')
        """
        return next(iter(self.count(config)), None) if self.used(config) else None

    def document(self, config: ModelConfig) -> dict[str, object]:
        """The three answers, for JSON.

        >>> from rorqual.config import presets
        >>> from rorqual.planner.explain.sharing import HSI
        >>> answers = HSI.document(presets.load("v4.1-flash").without("candidates"))
        >>> answers["status"], answers["factor"], answers["saves"]
        ('off in this config', 'work', {})
        """
        used = self.used(config)
        return {
            "name": self.name,
            "status": "on" if used else OFF,
            "factor": self.factor,
            "moves": self.moves,
            "saves": {figure.id: figure.document() for figure in self.savings(config)},
            "pays": {
                "approximation": self.approximation,
                "expressiveness": self.expressiveness,
                "training": self.training,
            },
        }
