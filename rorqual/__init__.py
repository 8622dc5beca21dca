"""Rorqual: DeepSeek-V4.1-Flash in readable Python.

The public names load on first use, so `import rorqual` costs a blink and no torch:

    model = rorqual.load("checkpoint/", numerics="fp32")
    tensors = rorqual.trace(model, input_ids)
    outputs = rorqual.LLM(model).generate(["The whale", "A ship"], rorqual.SamplingParams(max_tokens=20))
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rorqual.analysis.trace import trace
    from rorqual.config import ModelConfig
    from rorqual.engine.engine import Engine
    from rorqual.engine.llm import LLM
    from rorqual.engine.output import RequestOutput
    from rorqual.engine.params import Constraint, SamplingParams
    from rorqual.engine.storing import StoreOptions
    from rorqual.errors import RorqualError
    from rorqual.layout import KVLayout
    from rorqual.model.load import load
    from rorqual.training.run import train

__version__ = "0.1.0"

# torch and Numba share GNU OpenMP's threads. One that waits for the next region spins, by default for some 15 ms, and
# on a busy machine holds the core that another needs: a token of the preset `mid` took 95 times as long beside one
# program that kept a core busy. Half a millisecond spans the gaps between a token's regions. Read as torch loads.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"

_EXPORTS = {
    "Constraint": "rorqual.engine.params",
    "Engine": "rorqual.engine.engine",
    "KVLayout": "rorqual.layout",
    "LLM": "rorqual.engine.llm",
    "RequestOutput": "rorqual.engine.output",
    "RorqualError": "rorqual.errors",
    "ModelConfig": "rorqual.config",
    "SamplingParams": "rorqual.engine.params",
    "StoreOptions": "rorqual.engine.storing",
    "load": "rorqual.model.load",
    "trace": "rorqual.analysis.trace",
    "train": "rorqual.training.run",
}

__all__ = [
    "LLM",
    "Constraint",
    "Engine",
    "KVLayout",
    "ModelConfig",
    "RequestOutput",
    "RorqualError",
    "SamplingParams",
    "StoreOptions",
    "__version__",
    "load",
    "trace",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that holds it, and keep it."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rorqual' has no attribute '{name}'; it exports {', '.join(__all__)}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
