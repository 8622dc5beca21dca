"""A compiled function with one signature: what there is to warm, and who may run in parallel.

Numba compiles a signature on first use. Here every kernel states its signature, so that "everything is compiled" is a
question with an exact answer, and a call with other types is an error and no silent second compilation.

Machine code is cached on disk. Numba keys it by the time stamp of the file that holds the kernel; a kernel also holds
the code of parts in other files, so its name in the cache carries a digest of those.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch
from numba.core import event

_PARALLEL_REGION = threading.Lock()
# The one module-level object here, because what it guards is process-wide: Numba has a single pool of worker threads,
# and its workqueue layer ends the process when two threads start parallel regions at once.

# Numba is typed too loosely for typed code.
_njit: Any = numba.njit
# Parts are only ever called from kernels: they need no entry for Python and none for C.
_PART = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

inlined: Callable[[Callable[..., Any]], Any] = _njit(**_PART, _nrt=False)
"""Decorates the parts of kernels. Not cached: they become part of the machine code of the kernels that use them.
They may not allocate, and count no references to their arrays, which would cost atomic operations a call."""

spliced: Callable[[Callable[..., Any]], Any] = _njit(**_PART, _nrt=False, inline="always")
"""As `inlined`, for parts of a few lines: their code becomes the caller's before it is compiled, once instead of at
every level of calls above them."""

allocating: Callable[[Callable[..., Any]], Any] = _njit(**_PART)
"""As `inlined`, for the few parts that allocate scratch."""


@cache
def digest_of(source: Path) -> str:
    """Of a file, of every file of this folder that it imports, and so on."""
    found: dict[Path, bytes] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path not in found and path.exists():
            found[path] = path.read_bytes()
            names = re.findall(rb"^from rorqual\.ops\.fast\.(\w+) import", found[path], re.MULTILINE)
            waiting += [path.with_name(f"{name.decode()}.py") for name in names]
    return hashlib.sha256(b"".join(found[path] for path in sorted(found))).hexdigest()[:12]


class Kernel:
    """One jitted function, one signature. Releases the GIL; parallel kernels run one at a time."""

    def __init__(
        self, function: Callable[..., Any], signature: str, parallel: bool, calls: tuple[Kernel, ...] = ()
    ) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__.strip('_')}"
        self.signature = signature
        self.parallel: bool = parallel or any(part.parallel for part in calls)
        self._calls = calls
        digest = digest_of(Path(function.__code__.co_filename))
        if not function.__qualname__.endswith(digest):
            function.__qualname__ += f"_{digest}"
        self._dispatcher = _njit(nogil=True, error_model="numpy", parallel=parallel)(function)
        with suppress(RuntimeError):  # no folder on this machine can be written: compile in every process
            self._dispatcher.enable_caching()
        self._entry: Callable[..., Any] | None = None
        self._compiling = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether a call starts at once."""
        return self._entry is not None

    @property
    def code(self) -> Any:
        """What other kernels call, on arguments of exactly the signature's types; they name this one in `calls`."""
        return self._dispatcher

    def compile(self) -> None:
        """Load the machine code from the disk cache, or make it (seconds)."""
        for part in self._calls:
            part.compile()
        with self._compiling:
            if self._entry is None:
                self._dispatcher.compile(self.signature)
                self._dispatcher.disable_compile()
                self._entry = self._dispatcher

    def __call__(self, *args: Any, tasks: int = 0) -> Any:
        """Run on arguments of exactly the signature's types; a serial kernel may return a value.

        tasks: of a parallel kernel, how many loop iterations there are; one alone wakes no other thread.
        """
        if self._entry is None:
            self.compile()
        assert self._entry is not None
        if not self.parallel:
            return self._entry(*args)
        with _PARALLEL_REGION:
            threads = workers()
            if tasks != 1 or threads == 1:
                self._entry(*args)
                return None
            _mask_threads(1)
            try:
                self._entry(*args)
            finally:
                _mask_threads(threads)
        return None


class _FirstCompilation(event.Listener):
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._called = False

    def on_start(self, event: Any) -> None:
        if not self._called:
            self._called = True
            self._callback()

    def on_end(self, event: Any) -> None:
        pass


@contextmanager
def on_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Call back once, if inside the block something is compiled that the disk cache does not hold."""
    with event.install_listener("numba:compile", _FirstCompilation(callback)):
        yield


def kernel(
    signature: str, *, parallel: bool = False, calls: tuple[Kernel, ...] = ()
) -> Callable[[Callable[..., Any]], Kernel]:
    """Decorator: a `Kernel` of Numba `signature`, such as "void(float32[::1], int64)".

    calls: kernels whose `code` the function calls; it runs alone where one of them does.
    """
    return lambda function: Kernel(function, signature, parallel, calls)


def refuse_gradients(*tensors: torch.Tensor) -> None:
    """Assert that no gradient is asked of a fast op."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    assert not recorded, "fast ops have no gradient: use the plain op, or torch.no_grad()"


def workers() -> int:
    """Threads that a parallel kernel of this thread runs on."""
    return int(_count_threads())


def _thread_calls() -> tuple[Callable[[], int], Callable[[int], None]]:
    """Numba's count and mask of threads, without the locks and checks that its own functions take a call (5 us): the
    pool is started and the counts are ours. A Numba that arranges this otherwise gives its own functions."""
    numba.get_num_threads()
    inside = numba.np.ufunc.parallel
    count, mask = getattr(inside, "_get_num_threads", None), getattr(inside, "_set_num_threads", None)
    if callable(count) and callable(mask) and count() == numba.get_num_threads():
        return count, mask
    return numba.get_num_threads, numba.set_num_threads


_count_threads, _mask_threads = _thread_calls()
