"""Writing a file of tensors whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rorqual.errors import InputError


def save_tensors(tensors: Mapping[str, Tensor], out: Path) -> None:
    """Write a safetensors file beside its place, then move it there; the usual permissions, nothing else touched.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        os.close(handle)
    except OSError as error:
        raise InputError(f"out: {out} cannot be written ({error.strerror})") from error
    part = Path(name)
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, part)
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        part.replace(out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"out: {out} cannot be written ({error})") from error
    finally:
        part.unlink(missing_ok=True)
