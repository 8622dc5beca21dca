"""Which kernel paths this CPU can run.

    vnni     integer dot products of FP4 index keys (`vpdpbusd`, 512 bits wide); other ops take their vector path
    vector   16-wide fp32 vectors with fused multiply-add: AVX512, AVX2 or NEON registers, LLVM splits as needed;
             FP4 index keys on x86 as products of bytes in pairs (`vpmaddubsw`)
    plain    loops that any CPU runs

All paths of one op agree: bit for bit for FP4 index scores and selections, to fp32 rounding for attention.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any, Literal, get_args

import numba.core.codegen

from rorqual.errors import ConfigError

# Numba's own modules are typed too loosely for typed code.
_numba: Any = numba

Path = Literal["vnni", "vector", "plain"]
PATHS: tuple[Path, ...] = get_args(Path)
"""Best first."""

_NEEDS: dict[Path, tuple[str, ...]] = {
    "vnni": ("avx512f", "avx512bw", "avx512vnni"),
    "vector": ("avx2", "fma"),
    "plain": (),
}
_ARM = ("aarch64", "arm64")


@cache
def features() -> frozenset[str]:
    """LLVM names of the features that kernels are compiled for; `NUMBA_CPU_FEATURES` overrides the host's.

    A constant of the process: Numba reads the variable once.
    """
    given = _numba.config.CPU_FEATURES
    listed = _numba.core.codegen.get_host_cpu_features() if given is None else given
    return frozenset(item[1:] for item in listed.split(",") if item.startswith("+"))


def missing(path: Path) -> tuple[str, ...]:
    """CPU features that `path` needs and this CPU lacks; empty when it can run.

    Raises:
        ConfigError: an unknown path.
    """
    if path not in _NEEDS:
        raise ConfigError(f"path is '{path}', must be one of {', '.join(PATHS)}")
    if path == "vector" and platform.machine().lower() in _ARM:
        return ()
    have = features()
    return tuple(name for name in _NEEDS[path] if name not in have)


@cache
def best_path() -> Path:
    """The fastest path that this CPU runs."""
    return next(path for path in PATHS if not missing(path))


def check_path(path: Path) -> Path:
    """`path` itself. Raises ConfigError, naming the missing features, where this CPU cannot run it."""
    lacks = missing(path)
    if lacks:
        raise ConfigError(f"path '{path}' needs {', '.join(lacks)}, which this CPU lacks; best here: '{best_path()}'")
    return path
