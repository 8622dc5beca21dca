"""The package's one logger. Libraries log; only the command line decides where it goes."""

from __future__ import annotations

import logging

logger = logging.getLogger("rorqual")
logger.addHandler(logging.NullHandler())
