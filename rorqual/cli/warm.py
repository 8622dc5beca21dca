"""`rorqual warm`: compile the fast kernels ahead of time, with progress."""

from __future__ import annotations


def command() -> None:
    """Compile the fast kernels for this machine; later runs load them from the cache."""
    from rorqual.cli.output import ProgressLine
    from rorqual.ops.dispatch import Backend

    Backend("fast").warm(progress=ProgressLine("compiling kernels"))
