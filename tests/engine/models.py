"""Small models for equivalence tests, made once a session."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from rorqual.checkpoint.random import write_random
from rorqual.config import presets
from rorqual.model.load import load
from rorqual.model.transformer import Transformer

GOLDENS = Path(__file__).parents[1] / "goldens"
PAGE = 16


@cache
def golden(case: str = "fp32-text", kernels: str = "plain") -> Transformer:
    """The model of a golden folder: window 16, positions 256."""
    mode = "native" if case.startswith("native") else "fp32"
    return load(GOLDENS / case, numerics=mode, page_tokens=PAGE, kernels=kernels)


@cache
def tiny_folder() -> Path:
    """A random `tiny` checkpoint, every part on, 1,024 positions."""
    folder = Path(mkdtemp(prefix="rorqual-test-")) / "tiny"
    write_random(presets.load("tiny"), folder, seed=7)
    return folder


@cache
def tiny(kernels: str = "plain", numerics: str = "fp32") -> Transformer:
    return load(tiny_folder(), numerics=numerics, page_tokens=PAGE, kernels=kernels)


@cache
def demo() -> Transformer:
    """The model of the package: window and page 128, 4,096 positions."""
    return load(None, kernels="fast")


def random_ids(count: int, seed: int = 0, vocab: int = 500) -> torch.Tensor:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))
