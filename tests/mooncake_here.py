"""Whether Mooncake can be loaded on this machine; tests that need it skip with what is missing."""

from __future__ import annotations

import pytest

from rorqual.errors import InputError
from rorqual.store import mooncake


def missing() -> str:
    try:
        mooncake.master_binary()
    except InputError as error:
        return str(error)
    return ""


needs_mooncake = pytest.mark.skipif(bool(missing()), reason=missing() or "Mooncake is here")
