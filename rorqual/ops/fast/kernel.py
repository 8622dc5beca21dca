"""A compiled function with one signature: what there is to warm, and who may run in parallel.

Numba compiles a signature on first use. Here every kernel states its signature, so that "everything is compiled" is a
question with an exact answer, and a call with other types is an error and no silent second compilation.

A kernel's machine code is cached on disk under the time stamp of the file that holds the kernel alone: after editing a
file that kernels elsewhere inline (`vectors`, `pages`), delete the `__pycache__` folder of `ops/fast`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])

_PARALLEL_REGION = threading.Lock()
# The one module-level object here, because what it guards is process-wide: Numba has a single pool of worker threads,
# and its workqueue layer ends the process when two threads start parallel regions at once.

# Parts are only ever called from kernels: they need no entry for Python and none for C.
_PART = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

inlined: Callable[[Function], Function] = numba.njit(**_PART, _nrt=False)
"""Decorates the parts of kernels. Not cached: they become part of the machine code of the kernels that use them.
They may not allocate, and count no references to their arrays, which would cost atomic operations a call."""

allocating: Callable[[Function], Function] = numba.njit(**_PART)
"""As `inlined`, for the few parts that allocate scratch."""


class Kernel:
    """One jitted function, one signature. Releases the GIL; parallel kernels run one at a time."""

    def __init__(self, function: Callable[..., Any], signature: str, parallel: bool) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__.strip('_')}"
        self.signature = signature
        self.parallel = parallel
        self._dispatcher = numba.njit(cache=True, nogil=True, error_model="numpy", parallel=parallel)(function)
        self._entry: Callable[..., Any] | None = None
        self._compiling = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether a call starts at once."""
        return self._entry is not None

    def compile(self, on_cold: Callable[[], None] = lambda: None) -> None:
        """Load the machine code from the disk cache, or make it; `on_cold` is called before the latter."""
        with self._compiling:
            if self._entry is None:
                with event.install_listener("numba:compile", _Cold(on_cold)):
                    self._dispatcher.compile(self.signature)
                self._dispatcher.disable_compile()
                self._entry = self._dispatcher

    def __call__(self, *args: Any, tasks: int = 0) -> None:
        """Run on arguments of exactly the signature's types.

        tasks: of a parallel kernel, how many loop iterations there are; one alone wakes no other thread.
        """
        if self._entry is None:
            self.compile()
        assert self._entry is not None
        if not self.parallel:
            self._entry(*args)
            return
        with _PARALLEL_REGION:
            threads = numba.get_num_threads()
            if tasks != 1 or threads == 1:
                self._entry(*args)
                return
            numba.set_num_threads(1)
            try:
                self._entry(*args)
            finally:
                numba.set_num_threads(threads)


class _Cold(event.Listener):  # type: ignore[misc]
    """Calls back once, when a compilation starts."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def on_start(self, event: Any) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def on_end(self, event: Any) -> None:
        pass


def kernel(signature: str, *, parallel: bool = False) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: a `Kernel` of Numba `signature`, such as "void(float32[::1], int64)"."""
    return lambda function: Kernel(function, signature, parallel)


def workers() -> int:
    """Threads that a parallel kernel of this thread runs on."""
    return int(numba.get_num_threads())
